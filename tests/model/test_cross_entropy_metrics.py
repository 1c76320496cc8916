"""Metrics that compute the cross-entropy of all logits once more: passes of forward, and copies behind backward."""

from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.common.errors import ClusterSimError
from clustersim.memory.activations import Activations
from clustersim.model.kernels import Kernel
from tests.memory.test_activations import layer_stage

SEQUENCE, VOCAB = 2048, 32000
LOGITS = SEQUENCE * VOCAB


def scenario(metrics: int, **training: Any) -> Scenario:
    """Two narrow layers and a head, whose logits outweigh everything else."""
    model = {"layers": 2, "hidden": 256, "heads": 2, "ffn": 1024, "vocab": VOCAB}
    overheads = {"cross_entropy_metrics": metrics}
    stated = {"sequence": SEQUENCE, "global_batch": 1, "loss": "compiled", "overheads": overheads, **training}
    return Scenario.from_mapping({"model": model, "cluster": {"name": "dgx-h100", "gpus": 1}, "training": stated})


def _kernels(metrics: int) -> tuple[list[Kernel], list[Kernel]]:
    """Of the head, forward and backward."""
    operators = build_plan(scenario(metrics)).head.operators
    forward = [kernel for operator in operators for kernel in operator.forward]
    return forward, [kernel for operator in operators for kernel in operator.input_gradient]


@pytest.mark.parametrize("metrics", [1, 2])
def test_each_metric_casts_the_logits_and_takes_their_log_softmax(metrics: int) -> None:
    """Read in bf16 and written in FP32, read and written in FP32: 2 + 4 + 4 + 4 bytes a logit; no backward."""
    (forward, backward), (plain_forward, plain_backward) = _kernels(metrics), _kernels(0)
    moved = sum(kernel.bytes for kernel in forward) - sum(kernel.bytes for kernel in plain_forward)
    assert moved == metrics * (2 + 4 + 4 + 4) * LOGITS
    assert backward == plain_backward
    assert simulate(scenario(metrics)).step_time > simulate(scenario(0)).step_time


def test_logits_are_kept_behind_backward_for_a_metric_that_copies_them_twice() -> None:
    """Left by then: 2 bytes of the logits, 4 of their copy, 4 of the log-softmax; token ids for the embedding."""
    for metrics in (1, 2):  # one after the other
        activations = Activations(build_plan(scenario(metrics)))
        stage = layer_stage(activations, 2, embedding=True, head=True)
        peak = activations.saved_bytes(stage) + activations.transient_bytes(stage)
        assert peak == (2 + 4 + 4) * LOGITS + 8 * SEQUENCE


def test_metrics_of_logits_that_never_exist_are_refused() -> None:
    with pytest.raises(ClusterSimError, match=r"cross_entropy_metrics: 2.*fused_linear"):
        scenario(2, loss="fused_linear")
    with pytest.raises(ClusterSimError, match="cross_entropy_metrics"):
        scenario(-1)
