"""Are kernels slower or faster on every accelerator of a cluster, and nowhere faster than the datasheet?"""

import pytest

from clustersim import Scenario
from clustersim.hardware.accelerator import Accelerator
from clustersim.scenario.changes.kernels import with_matmul_slowdown, with_memory_bound_slowdown

MIXED = {"name": "dgx-h100", "gpus": 16, "mixed": {"node": 1, "accelerator": "a100-sxm-80gb"}}


def accelerators(scenario: Scenario) -> tuple[Accelerator, ...]:
    return scenario.cluster.accelerator_kinds()[0]


@pytest.fixture
def scenario() -> Scenario:
    training = {"sequence": 1024, "global_batch": 16}
    return Scenario.from_mapping({"model": "llama-tiny", "cluster": MIXED, "training": training})


def shares(accelerator: Accelerator) -> list[float]:
    efficiency = accelerator.efficiency
    return [efficiency.matmul.share, efficiency.attention_forward.share, efficiency.attention_backward.share]


def test_products_are_slower_on_every_accelerator(scenario: Scenario) -> None:
    before, after = accelerators(scenario), accelerators(with_matmul_slowdown(scenario, 2.0))
    assert len(after) == 2
    for one, other in zip(before, after, strict=True):
        assert shares(other) == pytest.approx([share / 2.0 for share in shares(one)])
        assert other.efficiency.memory == one.efficiency.memory


def test_streaming_kernels_are_slower_on_every_accelerator(scenario: Scenario) -> None:
    before, after = accelerators(scenario), accelerators(with_memory_bound_slowdown(scenario, 2.0))
    for one, other in zip(before, after, strict=True):
        assert other.efficiency.memory == pytest.approx(one.efficiency.memory / 2.0)
        assert shares(other) == shares(one)


def test_nothing_is_faster_than_the_datasheet(scenario: Scenario) -> None:
    for accelerator in accelerators(with_matmul_slowdown(with_memory_bound_slowdown(scenario, 0.1), 0.1)):
        assert {*shares(accelerator), accelerator.efficiency.memory} == {1.0}
