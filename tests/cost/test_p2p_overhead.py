"""P2P launch overhead of messages between stages: the same for every size, and none for collectives."""

from dataclasses import replace

import pytest

from clustersim import Scenario, simulate
from clustersim.common.units import Seconds

HOST = 2e-3
PIPELINE = {
    "model": "gpt2-small",
    "cluster": {"name": "dgx-a100", "gpus": 4},
    "layout": {"pp": 4, "dp": 1, "overlap_p2p_comm": False},
    "schedule": "gpipe",
    "training": {"sequence": 128, "global_batch": 1, "microbatch": 1},
}


def step_seconds(*changes: str, overhead: Seconds) -> Seconds:
    scenario = Scenario.from_mapping(PIPELINE, changes)
    return simulate(replace(scenario, framework=replace(scenario.framework, p2p_seconds=overhead))).step_time


@pytest.mark.parametrize("network", ["shared", "uncontended"])
def test_one_microbatch_waits_for_the_hosts_once_per_hop(network: str) -> None:
    """One microbatch goes down three hops and its gradients come up three: six messages, one after the other."""
    extra_seconds = step_seconds(f"cost.network={network}", overhead=HOST) - step_seconds(
        f"cost.network={network}", overhead=0.0
    )
    assert extra_seconds == pytest.approx(6 * HOST)


def test_p2p_overhead_does_not_depend_on_the_payload() -> None:
    larger_batch = ("training.microbatch=4", "training.global_batch=4")
    assert step_seconds(*larger_batch, overhead=HOST) - step_seconds(*larger_batch, overhead=0.0) == pytest.approx(
        6 * HOST
    )


def test_without_pipeline_stages_there_is_no_p2p_overhead() -> None:
    single_stage = ("layout.pp=1", "layout.dp=4", "training.global_batch=4", "schedule=1f1b")
    assert step_seconds(*single_stage, overhead=HOST) == step_seconds(*single_stage, overhead=0.0)
