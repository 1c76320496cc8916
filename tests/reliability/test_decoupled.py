"""Replicas that do not wait for each other, several in a site, and such that come and go."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.hardware.prices import Price
from clustersim.reliability.job_simulation import HEALTHY, RESTART
from clustersim.reliability.link_cuts import Outage
from clustersim.reliability.local_training import simulate_local_training
from clustersim.reliability.replica_outages import Presence, _planned_absences, replica_jobs
from clustersim.reliability.replica_places import replica_places, replica_scenarios, transfer_seconds
from clustersim.results.goodput import TimelineInterval
from clustersim.results.outer_rounds import OuterRounds, ReplicaRound
from clustersim.results.site_traffic import SiteLinkTraffic
from clustersim.scenario import Scenario
from clustersim.scenario.diloco import DilocoSettings, StepBudget
from clustersim.simulation import simulate
from tests.conftest import examples

STEPS = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6)


def scenario(*overrides: str, **diloco: Any) -> Scenario:
    """A model of 8 layers on one cluster of four nodes, two replicas."""
    return Scenario.from_mapping(
        {
            "model": {"preset": "llama3-8b", "layers": 8},
            "cluster": {"name": "dgx-h100", "gpus": 32},
            "layout": {"tp": 4, "dp": 8, "data": "zero1"},
            "training": {"sequence": 4096, "global_batch": 64, "microbatch": 1, "precision": "bf16"},
            "diloco": {"inner_steps": 10, "replicas": 2} | diloco,
        },
        overrides,
    )


def rounds(steps: list[float], quorum: int | None, *, inner_steps: int = 10, exposed: float = 0.5) -> OuterRounds:
    fastest = sorted(range(len(steps)), key=steps.__getitem__)[:quorum]
    replicas = tuple(
        ReplicaRound(str(i), ("a",), 8, 4, step, 1.1 * step, exposed, is_waited_for=i in fastest)
        for i, step in enumerate(steps)
    )
    settings = DilocoSettings(inner_steps, overlap=1, quorum=quorum)
    return OuterRounds("", settings, replicas, (), 1.0, 0.1, 0.0, 0.0, 0.0, "ring", 1000.0, 0.0, 0.0)


@given(STEPS, st.data())
@examples(100)
def test_the_time_of_replicas_is_conserved(steps: list[float], data: st.DataObject) -> None:
    result = rounds(steps, data.draw(st.none() | st.integers(1, len(steps))))
    for replica in result.replicas:
        waits = result.waits(replica)
        parts = 10 * replica.step_time + waits.slowed + waits.exchange + waits.slower
        assert min(waits.slowed, waits.exchange, waits.slower) >= 0.0
        assert parts == pytest.approx(result.replica_round_seconds(replica))


@given(STEPS)
@examples(100)
def test_a_quorum_of_all_is_in_step_and_a_smaller_one_never_slower(steps: list[float]) -> None:
    in_step = rounds(steps, None)
    assert in_step.round_seconds == rounds(steps, len(steps)).round_seconds
    rates = [rounds(steps, quorum).tokens_per_second for quorum in range(1, len(steps) + 1)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(in_step.tokens_per_second)


def test_with_a_quorum_of_one_each_goes_at_its_own_pace() -> None:
    """Steps of 1 and 3 s: the faster waits for its exchange, the slower for nothing."""
    result = rounds([1.0, 3.0], 1)
    fast, slow = result.replicas
    assert result.pacer is fast
    assert result.round_seconds == pytest.approx(10.1 + 0.5 + 0.1)
    assert result.waits(fast).exchange == pytest.approx(0.6)
    assert result.waits(slow).exchange == result.waits(slow).slower == 0.0
    assert result.tokens_per_second == pytest.approx(10 * 4000 * (1 / 10.7 + 1 / 30.3))


def test_step_budgets_let_nobody_wait_for_slower_replicas() -> None:
    """Steps of 1 and 3 s: thirty of one in the time of ten of the other."""
    result = rounds([1.0, 3.0], None)
    budgeted = replace(result, settings=replace(result.settings, step_budget=StepBudget.BY_SPEED))
    assert [budgeted.inner_steps(replica) for replica in budgeted.replicas] == [30, 10]
    assert budgeted.waits(budgeted.replicas[0]).slower == pytest.approx(0.2)  # one of its steps is slowed, too
    assert budgeted.tokens_per_second > result.tokens_per_second


def test_what_a_round_costs_is_its_gpus_and_its_egress() -> None:
    result = rounds([1.0, 1.0], None)
    priced = tuple(replace(replica, price_per_second=Price(0.5, "USD")) for replica in result.replicas)
    link = SiteLinkTraffic("a", "b", 1e12, 1e9, 0.5, cost=10.0 * result.round_seconds)
    assert result.price_per_second is None
    assert replace(result, replicas=priced, links=(link,)).price_per_second == Price(pytest.approx(11.0), "USD")
    assert replace(result, run_tokens=86400.0 * result.tokens_per_second).run_days(0.5) == pytest.approx(2.0)


def test_replicas_of_one_cluster_step_as_half_of_it_does() -> None:
    """Nodes of the two share no link that is full, so each step is that of a job of its own."""
    result = simulate_local_training(scenario())
    alone = simulate(next(replica_scenarios(scenario()))).step_time
    assert [replica.name for replica in result.replicas] == ["dgx-h100 1", "dgx-h100 2"]
    assert [replica.step_time for replica in result.replicas] == pytest.approx([alone, alone])
    assert (result.links, result.bandwidth_needs) == ((), ())


def test_replicas_divide_gpus_and_batch() -> None:
    slots = replica_places(scenario(replicas=4))
    assert np.concatenate([slot.gpus for slot in slots]).tolist() == list(range(32))
    jobs = list(replica_scenarios(scenario(replicas=4)))
    assert {(job.layout.world_size, job.training.global_batch) for job in jobs} == {(8, 16)}


@pytest.mark.parametrize(
    ("diloco", "sentence"),
    [
        ({"replicas": 3}, "32 GPUs are not 3 equal parts; such as 2, 4, 8 are"),
        ({"replicas": 32}, "each replica of 1 GPUs does not hold whole copies"),
        ({"quorum": 3}, "cannot wait for 3 of 2 replicas"),
        ({"rejoin": "peer"}, "did you mean peers"),
        ({"away": {"site": "x", "end": "1 h"}}, "there is no site x"),
        ({"away": {"site": "dgx-h100", "begin": "2 h", "end": "1 h"}}, "is not after begin"),
        ({"away": {"site": "dgx-h100", "end": "3 h", "every": "2 h"}}, "returns before it leaves again"),
    ],
)
def test_mistakes_are_named(diloco: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        scenario(**diloco)


def line(*times: float) -> list[TimelineInterval]:
    """Up from the first time to the second, down to the third, up again, and so on."""
    labels = [HEALTHY, RESTART] * len(times)
    return [TimelineInterval(begin, end, label) for begin, end, label in zip(times, times[1:], labels, strict=False)]


def test_presence_counts_what_works_and_takes_part() -> None:
    """Ten seconds: the second replica is down from 4 to 6, away from 8 to 10, and cut off from 0 to 1."""
    lines = [line(0.0, 10.0), line(0.0, 4.0, 6.0, 10.0)]
    second = frozenset({1})
    presence = Presence.build(lines, [Outage(0.0, 1.0, second)], [Outage(8.0, 10.0, second)], 10.0)
    assert presence.uptimes == pytest.approx([1.0, 0.6])
    weights = np.array([0.5, 0.5])
    assert presence.worked(weights, 1) == pytest.approx((0.5 + 0.5 * 0.2, 0.5 + 0.5 * 0.5))
    assert presence.worked(weights, 2)[1] == pytest.approx(0.5)


def test_planned_absences_repeat_until_the_end() -> None:
    plan = scenario(away={"site": "dgx-h100", "begin": "8 h", "end": "20 h", "every": "1 d"})
    replicas = list(replica_scenarios(plan))
    result = replace(rounds([1.0, 1.0], None), settings=plan.diloco)
    result = replace(result, replicas=tuple(replace(r, sites=("dgx-h100",)) for r in result.replicas))
    jobs = replica_jobs(plan, replicas, result, 3 * 86400.0)
    outages = list(_planned_absences(result, jobs, 3 * 86400.0))
    assert [outage.begin / 3600.0 for outage in outages] == [8.0, 32.0, 56.0]
    assert all(12.0 * 3600.0 < outage.end - outage.begin < 13.0 * 3600.0 for outage in outages)  # and a restart


def test_rejoining_from_peers_loses_at_most_a_round() -> None:
    own, peers = scenario(), scenario(quorum=1)
    assert (own.diloco.rejoins_from_peers, peers.diloco.rejoins_from_peers) == (False, True)  # type: ignore[union-attr]
    result = replace(rounds([1.0, 1.0], 1), settings=peers.diloco)
    job = replica_jobs(peers, list(replica_scenarios(peers)), result, 86400.0)[0].parameters
    assert job.checkpoint_timeline.interval == pytest.approx(result.round_seconds)


def test_states_move_at_the_rate_of_all_nics() -> None:
    """Sixteen GPUs, each with a NIC of 50 GB/s."""
    plan = scenario()
    first, second = replica_places(plan)
    seconds = transfer_seconds(plan.cluster.machine, first, second, 800e9)
    assert seconds == pytest.approx(1.0, rel=0.01)
