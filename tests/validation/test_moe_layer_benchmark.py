"""Published layers of experts, part by part."""

import numpy as np
import pytest

from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.kernels import compare_kernels, read_kernels
from clustersim.validation.moe_layer_benchmark import moe_layer_breakdown


def moe_layer_cases(dtype: str = "bf16") -> list[ValidationCase]:
    layers = [case for case in read_kernels() if case.text("op") == "moe_layer"]
    return [case for case in layers if case.text("dtype") == dtype]


@pytest.mark.parametrize("dtype", ["bf16", "fp8 blockwise"])
def test_published_moe_layers_are_within_a_quarter(dtype: str) -> None:
    """All of a benchmark whose products are faster than other published ones, and in blocks slower: by a quarter."""
    comparisons = compare_kernels(moe_layer_cases(dtype))
    errors = np.array(
        [
            comparison.predicted / comparison.measured - 1.0
            for comparison in comparisons
            if comparison.predicted is not None
        ]
    )
    assert len(errors) == len(moe_layer_cases(dtype)) == 12
    assert abs(errors).max() < 0.25
    assert abs(errors).mean() < 0.16


def test_kernels_depend_on_direction_and_dispatcher() -> None:
    """FLOP of backward are twice forward's; copies are made here where rows travel, there where tokens do."""
    kernels_by_case = {
        (case.text("notes"), case.text("direction")): moe_layer_breakdown(case) for case in moe_layer_cases()
    }
    for (notes, direction), kernels in kernels_by_case.items():
        assert {"dispatch tokens", "combine tokens"} <= set(kernels)
        assert ("dispatcher a2a" in notes) == any(name.startswith("mlp.permute") for name in kernels)
        if direction == "fwd":
            backward_kernels = kernels_by_case[notes, "bwd"]
            assert sum(_expert_matmul_seconds(backward_kernels)) == pytest.approx(
                2 * sum(_expert_matmul_seconds(kernels)), rel=0.05
            )


def test_a_blockwise_fp8_layer_casts_every_linear_input() -> None:
    """Of the routed tokens: 1 x 128 blocks, by rows and by columns; weights were cast before."""
    case = next(case for case in moe_layer_cases("fp8 blockwise") if case.text("direction") == "fwd")
    assert {name for name in moe_layer_breakdown(case) if ".cast" in name} == {
        "experts.up.cast_input",
        "experts.down.cast_input",
    }


def _expert_matmul_seconds(seconds_by_kernel: dict[str, float]) -> list[float]:
    return [seconds for name, seconds in seconds_by_kernel.items() if name.startswith(("experts.up", "experts.down"))]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "fp8"}, "not modelled"),
        ({"direction": ""}, "not modelled"),
        ({"notes": ""}, "sizes of the layer"),
        ({"gpu": "none"}, "no cluster"),
    ],
)
def test_a_layer_that_is_not_stated_is_skipped(change: dict[str, str], reason: str) -> None:
    case = moe_layer_cases()[0]
    with pytest.raises(CannotPredictError, match=reason):
        moe_layer_breakdown(ValidationCase({**case.cells, **change}, case.line_number))
