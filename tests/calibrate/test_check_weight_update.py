"""Weight updates in every precision that the optimizers support, with gradient clipping."""

from collections.abc import Iterator

import pytest

from clustersim.scenario import Scenario
from tests.calibrate.check_scenarios import LLAMA, single_thread, small_scenario

torch = pytest.importorskip("torch")

from calibrate.check.supported import build_plan  # noqa: E402 - torch first
from calibrate.check.weight_update import MAX_GRADIENT_NORM, WeightUpdate  # noqa: E402

ALL_BF16 = "training.precision={compute: bf16, gradients: bf16, master: none, moments: bf16}"
PRECISIONS = ("training.precision=fp32", "training.precision=bf16", ALL_BF16)


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    with single_thread():
        yield


def _make_update(scenario: Scenario, gradient: float) -> WeightUpdate:
    """Two weights with constant gradients of that value."""
    training = build_plan(scenario).training
    storage_dtype = getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[training.recipe.weight_formats.stored.value])
    update = WeightUpdate([torch.nn.Parameter(torch.ones(4, 8, dtype=storage_dtype)) for _ in range(2)], training)
    for master in update._masters:
        assert master.grad is not None
        master.grad.fill_(gradient)
    return update


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fused", ["true", "false"])
def test_weights_are_updated_in_every_precision(precision: str, fused: str) -> None:
    """All weights move equally against their gradients: Adam's first step is its learning rate whatever they are."""
    update = _make_update(small_scenario(LLAMA, precision, f"training.fused={fused}"), 100.0)
    update._optimizer.param_groups[0]["lr"] = 0.125
    update.update_weights()
    for weight in update.weights:
        assert bool((weight < 1.0).all()) and weight.unique().numel() == 1


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fused", ["true", "false"])
@pytest.mark.parametrize("gradient", [1.0, MAX_GRADIENT_NORM])
def test_gradient_norm_above_the_limit_is_clipped(precision: str, fused: str, gradient: float) -> None:
    """64 equal gradients have a norm of eight times one; bf16 has 8 significant bits."""
    update = _make_update(small_scenario(LLAMA, precision, f"training.fused={fused}"), gradient)
    update.update_weights()
    expected = min(gradient, MAX_GRADIENT_NORM / 8.0)
    for master in update._masters:
        torch.testing.assert_close(master.grad, torch.full_like(master.grad, expected), rtol=0.01, atol=0.0)
