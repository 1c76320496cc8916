"""Kernels slow the collectives that they overlap, by a number of the accelerator: on MI300X, whose file has one."""

from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.results.simulation_result import SimulationResult


def mi300x_scenario(*overrides: str, slowdown: float | None = None) -> Scenario:
    """FSDP over the eight GPUs of a node. slowdown: of collectives, None: the file's."""
    accelerator = {"like": "mi300x"} if slowdown is None else {"like": "mi300x", "collective_interference": slowdown}
    mapping: dict[str, Any] = {
        "cluster": {"name": "mi300x", "gpus": 8, "accelerator": accelerator},
        "model": {"family": "llama", "layers": 4, "hidden": 4096, "heads": 32, "ffn": 14336, "vocab": 32000},
        "layout": {"data": "fsdp"},
        "training": {"sequence": 4096, "global_batch": 8, "microbatch": 1},
    }
    return Scenario.from_mapping(mapping, list(overrides))


def test_a_node_waits_longer_for_gathers_that_its_kernels_slow() -> None:
    step_times = [simulate(mi300x_scenario(slowdown=slowdown)).step_time for slowdown in (0.0, 0.23, 2.0)]
    assert step_times == sorted(step_times)
    assert step_times[0] < step_times[2]
    assert simulate(mi300x_scenario()).step_time == step_times[1], "what the file says"


def test_a_stated_interference_is_of_kernels_only() -> None:
    stated = [simulate(mi300x_scenario("cost.interference=0.19", slowdown=slowdown)) for slowdown in (0.0, 2.0)]
    assert stated[0].step_time == stated[1].step_time == simulate(mi300x_scenario(slowdown=0.0)).step_time


def test_nothing_changes_where_nothing_overlaps() -> None:
    """With tensor parallelism, whose collectives kernels wait for, and no other ranks."""
    alone = [simulate(mi300x_scenario("layout.tp=8", slowdown=slowdown)).step_time for slowdown in (0.0, 2.0)]
    assert alone[0] == alone[1]


@pytest.mark.parametrize("network", ["shared", "uncontended"])
def test_folded_and_coalesced_steps_are_those_of_every_rank_and_operation(network: str) -> None:
    """Within the drift of ranks that rounding puts ahead (`test_ways_of_execution`)."""

    def result(*overrides: str) -> SimulationResult:
        return simulate(mi300x_scenario(f"cost.network={network}", *overrides, slowdown=1.0))

    folded = result()
    for overrides in (("cost.symmetry=off",), ("cost.coalesce=false",), ("cost.symmetry=off", "cost.coalesce=false")):
        assert result(*overrides).step_time == pytest.approx(folded.step_time, rel=1e-6), overrides
