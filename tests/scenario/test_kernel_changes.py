"""Kernel slowdown changes apply to every accelerator type of a cluster and never exceed datasheet peaks."""

import pytest

from clustersim import Scenario
from clustersim.hardware.accelerator import Accelerator
from clustersim.scenario.changes.kernels import with_matmul_slowdown, with_memory_bound_slowdown

MIXED_CLUSTER = {"name": "dgx-h100", "gpus": 16, "mixed": {"node": 1, "accelerator": "a100-sxm-80gb"}}


def accelerator_types(scenario: Scenario) -> tuple[Accelerator, ...]:
    return scenario.cluster.accelerator_kinds()[0]


@pytest.fixture
def scenario() -> Scenario:
    training = {"sequence": 1024, "global_batch": 16}
    return Scenario.from_mapping({"model": "llama-tiny", "cluster": MIXED_CLUSTER, "training": training})


def peak_fractions(accelerator: Accelerator) -> list[float]:
    efficiency = accelerator.efficiency
    return [
        efficiency.matmul.peak_fraction,
        efficiency.attention_forward.peak_fraction,
        efficiency.attention_backward.peak_fraction,
    ]


def test_matmul_slowdown_on_all_accelerators(scenario: Scenario) -> None:
    before, after = accelerator_types(scenario), accelerator_types(with_matmul_slowdown(scenario, 2.0))
    assert len(after) == 2
    for before_type, after_type in zip(before, after, strict=True):
        assert peak_fractions(after_type) == pytest.approx([share / 2.0 for share in peak_fractions(before_type)])
        assert after_type.efficiency.memory_bandwidth_fraction == before_type.efficiency.memory_bandwidth_fraction


def test_memory_bound_slowdown_on_all_accelerators(scenario: Scenario) -> None:
    before, after = accelerator_types(scenario), accelerator_types(with_memory_bound_slowdown(scenario, 2.0))
    for before_type, after_type in zip(before, after, strict=True):
        assert after_type.efficiency.memory_bandwidth_fraction == pytest.approx(
            before_type.efficiency.memory_bandwidth_fraction / 2.0
        )
        assert peak_fractions(after_type) == peak_fractions(before_type)


def test_speedup_is_capped_at_datasheet_peaks(scenario: Scenario) -> None:
    for accelerator in accelerator_types(with_matmul_slowdown(with_memory_bound_slowdown(scenario, 0.1), 0.1)):
        assert {*peak_fractions(accelerator), accelerator.efficiency.memory_bandwidth_fraction} == {1.0}
