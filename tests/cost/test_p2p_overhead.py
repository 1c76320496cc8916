"""What hosts add to messages between stages: the same for every size, and nothing to whatever else ranks exchange."""

from dataclasses import replace

import pytest

from clustersim import Scenario, simulate
from clustersim.common.units import Seconds

HOST = 2e-3
CHAIN = {
    "model": "gpt2-small",
    "cluster": {"name": "dgx-a100", "gpus": 4},
    "layout": {"pp": 4, "dp": 1, "pipeline_overlap": False},
    "schedule": "gpipe",
    "training": {"sequence": 128, "global_batch": 1, "microbatch": 1},
}


def step(*changes: str, message: Seconds) -> Seconds:
    made = Scenario.from_mapping(CHAIN, changes)
    return simulate(replace(made, framework=replace(made.framework, p2p_seconds=message))).step_time


@pytest.mark.parametrize("network", ["shared", "uncontended"])
def test_one_microbatch_waits_for_the_hosts_once_per_hop(network: str) -> None:
    """One microbatch goes down three hops and its gradients come up three: six messages, one after the other."""
    longer = step(f"cost.network={network}", message=HOST) - step(f"cost.network={network}", message=0.0)
    assert longer == pytest.approx(6 * HOST)


def test_it_does_not_depend_on_what_is_sent() -> None:
    more = ("training.microbatch=4", "training.global_batch=4")
    assert step(*more, message=HOST) - step(*more, message=0.0) == pytest.approx(6 * HOST)


def test_without_stages_there_is_nothing_to_hand_on() -> None:
    alone = ("layout.pp=1", "layout.dp=4", "training.global_batch=4", "schedule=1f1b")
    assert step(*alone, message=HOST) == step(*alone, message=0.0)
