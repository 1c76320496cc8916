"""Warnings about misaligned model dimensions, with the nearest efficient ones."""

from typing import Any

import pytest

from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.sentences import parts

MODEL = {"layers": 2, "hidden": 1024, "heads": 8, "head_dim": 128, "ffn": 4096, "vocab": 32000}


def scenario_warnings(cluster: str, *overrides: str, tp: int = 2, **model: int) -> tuple[str, ...]:
    mapping: dict[str, Any] = {
        "model": {**MODEL, **model},
        "cluster": {"name": cluster, "gpus": 8},
        "layout": {"tp": tp, "dp": 8 // tp},
        "training": {"sequence": 2048, "global_batch": 8},
    }
    return Scenario.from_mapping(mapping, overrides).warnings


@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-h100", "hgx-b200", "mi300x"])
def test_aligned_dimensions_do_not_warn(cluster: str) -> None:
    assert scenario_warnings(cluster) == ()


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"hidden": 1028},
            "model.hidden 1028: ... 1028 elements ... 16 bytes ... 2.6 times ... a100-sxm-80gb; 1024 or 1032",
        ),
        (
            {"ffn": 4100},
            "model.ffn 4100: ... 2050 elements ... tp 2 ... 16 bytes ... 2.6 times ... a100-sxm-80gb; 4096 or 4112",
        ),
        (
            {"vocab": 50258},
            "model.vocab 50258: ... 25129 ... tp 2 ... 16 bytes ... 2.6 times ... a100-sxm-80gb; 50256 or 50272",
        ),
        ({"head_dim": 120}, "model.head_dim 120: ... a100-sxm-80gb ... 128; 96 or 128"),
    ],
)
def test_misaligned_dimensions_suggest_aligned_ones(sizes: dict[str, int], sentence: str) -> None:
    (warning,) = scenario_warnings("dgx-a100", **sizes)
    assert parts(sentence).match(warning)


def test_misaligned_head_dim_affects_attention_and_projections() -> None:
    """4 heads of 125 on each rank make rows of 500 elements, 1,000 bytes."""
    padded, projections = sorted(scenario_warnings("dgx-h100", tp=2, heads=8, head_dim=125))
    assert parts("model.head_dim 125: ... h100-sxm-80gb ... 128 ... copies").match(padded)
    assert parts("model.head_dim 125: ... 500 elements ... tp 2 ... 16 bytes").match(projections)
    assert projections.endswith("120 or 128 fits")


def test_standard_attention_needs_16_byte_rows() -> None:
    """BLOOM's chronicles: a head dimension of 108 took a third longer than 104, 112 and 144."""
    (warning,) = scenario_warnings("dgx-a100", "training.attention=standard", heads=16, head_dim=108)
    assert "matmuls of standard attention take about 17 times as long" in warning
    assert warning.endswith("104 or 112 fits")
    assert scenario_warnings("dgx-a100", "training.attention=standard", heads=16, head_dim=104) == ()


@pytest.mark.parametrize(
    ("bad", "good"), [({"vocab": 32002}, {"vocab": 32016}), ({"head_dim": 125}, {"head_dim": 128})]
)
def test_misaligned_step_is_slower_than_larger_aligned_one(bad: dict[str, int], good: dict[str, int]) -> None:
    steps = []
    for sizes in (bad, good):
        mapping: dict[str, Any] = {
            "model": {**MODEL, **sizes},
            "cluster": {"name": "dgx-h100", "gpus": 8},
            "layout": {"tp": 2, "dp": 4},
            "training": {"sequence": 4096, "global_batch": 16},
        }
        steps.append(simulate(Scenario.from_mapping(mapping)).step_time)
    assert steps[0] > steps[1]
