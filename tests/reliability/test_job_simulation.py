"""Job simulations over weeks, against closed forms."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from clustersim.hardware.failures import (
    DurationDistribution,
    FailureComponent,
    FailureDomain,
    FailureEffect,
    FailureMode,
    FailureRate,
    FailureSlowdown,
)
from clustersim.reliability.checkpoint_cost import daly_interval, young_interval
from clustersim.reliability.checkpoint_timeline import CheckpointTimeline
from clustersim.reliability.failure_events import generate_failures
from clustersim.reliability.job_simulation import JobParameters, JobSimulation
from clustersim.results.goodput import TrainingRun
from clustersim.scenario.reliability import ElasticPolicy, MaintenanceWindow, ReliabilityModel, SparePool
from tests.conftest import examples
from tests.reliability.job_helpers import (
    DAY,
    HOUR,
    failure_domains,
    job_failure,
    job_parameters,
    mean_wall_seconds,
    reliability_model,
    run_with_failures_at,
    simulate_run,
)


@given(
    work=st.floats(1.0, 1e6),
    compute=st.floats(0.5, 1e5),
    block=st.floats(0.0, 1e3),
)
def test_without_failures_wall_time_is_work_plus_checkpoints(work: float, compute: float, block: float) -> None:
    """One checkpoint after each interval that does not end the run, and one at the end."""
    result = simulate_run(
        replace(job_parameters(reliability_model([]), CheckpointTimeline(compute, block), work), max_wall=1e12)
    )
    snapshots = max(0, math.ceil(work / compute * (1.0 - 1e-9)) - 1)
    assert result.wall == pytest.approx(work + (snapshots + 1) * block)
    assert result.work == pytest.approx(work)
    assert result.finished
    assert result.losses["checkpoints"] == pytest.approx((snapshots + 1) * block, abs=1e-6)


@pytest.mark.parametrize(("between", "restart", "block", "compute"), [(3.0, 10.0, 1.0, 30.0), (1.0, 5.0, 2.0, 20.0)])
def test_the_mean_wall_time_matches_daly_under_his_assumptions(
    between: float, restart: float, block: float, compute: float
) -> None:
    """Memoryless failures at rate 1/M, also while a checkpoint is written and while the job restarts.

    One segment of tau seconds of work and delta of a checkpoint needs t = tau + delta without a failure. Let E
    be its expected time. With probability exp(-t/M) it takes t. Else the failure comes after a mean of M - t /
    (exp(t/M) - 1), the restart of R seconds takes M (exp(R/M) - 1) in the mean (a failure begins it anew), and
    all begins again: E = M (exp(t/M) - 1) exp(R/M), and the run takes E for each of its segments (Daly 2006,
    equation 20).
    """
    m, r, delta, tau = between * HOUR, restart * 60.0, block * 60.0, compute * 60.0
    work = 200.0 * tau
    expected = m * (math.exp((tau + delta) / m) - 1.0) * math.exp(r / m) * work / tau
    job = job_parameters(reliability_model([job_failure(m)], r), CheckpointTimeline(tau, delta), work)
    assert mean_wall_seconds(job, 150) == pytest.approx(expected, rel=0.01)


def test_expected_ettr_of_the_published_formula_holds_where_losses_are_small() -> None:
    """E[ETTR] = (1 - N r (u + dt/2)) / (1 + w/dt) (arXiv:2410.21680) is of first order in N r: a failure in 2 days."""
    nodes, rate, restart, interval, write = 64, 1.0 / (64 * 2 * DAY), 300.0, 1800.0, 20.0
    job = job_parameters(
        reliability_model([job_failure(1.0 / (nodes * rate))], restart), CheckpointTimeline(interval, write), 30.0 * DAY
    )
    expected = (1.0 - nodes * rate * (restart + interval / 2.0)) / (1.0 + write / interval)
    runs = [simulate_run(job, run_id) for run_id in range(60)]
    assert sum(training_run.work for training_run in runs) / sum(item.wall for item in runs) == pytest.approx(
        expected, rel=0.01
    )


def test_the_first_order_ettr_formula_fails_for_long_restarts() -> None:
    """It gives a quarter; Daly's exact mean, which the runs match, gives less than half of that."""
    mean_interval, restart, interval, write = HOUR, 0.6 * HOUR, 1200.0, 60.0
    first_order = (1.0 - (restart + interval / 2.0) / mean_interval) / (1.0 + write / interval)
    exact = interval / (
        mean_interval * (math.exp((interval + write) / mean_interval) - 1.0) * math.exp(restart / mean_interval)
    )
    job = job_parameters(
        reliability_model([job_failure(mean_interval)], restart), CheckpointTimeline(interval, write), 2.0 * DAY
    )
    runs = [simulate_run(job, run_id) for run_id in range(60)]
    ettr = sum(training_run.work for training_run in runs) / sum(item.wall for item in runs)
    assert ettr == pytest.approx(exact, rel=0.05)
    assert abs(first_order - exact) > 0.2


@pytest.mark.parametrize("formula", [young_interval, daly_interval])
def test_interval_formulas_are_within_one_percent_of_the_optimum(formula: object) -> None:
    """Of Daly's exact mean, over all intervals, with checkpoints that take a hundredth of the time between failures."""
    mean_interval, cost = 3.0 * HOUR, 0.01 * 3.0 * HOUR

    def slowdown(interval: float) -> float:
        return mean_interval * (math.exp((interval + cost) / mean_interval) - 1.0) / interval

    best = min(slowdown(mean_interval * 2.0 ** (exponent / 50.0)) for exponent in range(-400, 100))
    assert callable(formula)
    assert slowdown(formula(cost, mean_interval)) == pytest.approx(best, rel=0.01)


EFFECTS = st.sampled_from(
    [FailureEffect.STOP, FailureEffect.HANG, FailureEffect.CORRUPT, FailureEffect.SLOW, FailureEffect.PLANNED]
)
DURATIONS = st.tuples(st.floats(1.0, 2e4), st.floats(1.0, 20.0)).map(
    lambda mean_and_variation: DurationDistribution(
        mean_and_variation[0], mean_and_variation[0] * mean_and_variation[1]
    )
)


@st.composite
def failure_modes(draw: st.DrawFn) -> tuple[FailureMode, ...]:
    modes = []
    for index in range(draw(st.integers(1, 4))):
        effect = draw(EFFECTS)
        nic = draw(st.booleans())
        modes.append(
            FailureMode(
                f"kind-{index}",
                FailureRate(draw(st.sampled_from([*FailureComponent])), draw(st.floats(1e-9, 3e-7))),
                effect=effect,
                failure_domain=draw(st.sampled_from([*FailureDomain])),
                weibull_shape=draw(st.sampled_from([1.0, 0.7, 2.0])),
                detection_time=draw(DURATIONS),
                discovery_time=draw(DURATIONS),
                repair_time=draw(DURATIONS),
                slowdown=FailureSlowdown(draw(st.floats(0.3, 0.95)), affects_nic=nic)
                if effect is FailureEffect.SLOW
                else None,
            )
        )
    return tuple(modes)


RELIABILITIES = st.builds(
    ReliabilityModel,
    failures=failure_modes(),
    rate_geometric_std=st.sampled_from([1.0, 1.7]),
    restart=st.builds(reliability_model, st.just([]), st.floats(0.0, 2000.0)).map(lambda each: each.restart),
    spares=st.builds(SparePool, st.integers(0, 20), st.integers(0, 1)),
    elastic=st.sampled_from([*ElasticPolicy]),
    replaces_slow_nodes=st.booleans(),
    repair_slots=st.one_of(st.none(), st.integers(1, 5)),
    maintenance=st.one_of(st.none(), st.just(MaintenanceWindow(3.0 * DAY, 2.0 * HOUR))),
)
SAVINGS = st.one_of(
    st.builds(CheckpointTimeline, st.floats(600.0, 2e4), st.floats(0.0, 300.0)),
    st.builds(
        CheckpointTimeline, st.floats(600.0, 2e4), st.floats(0.0, 30.0), st.floats(1.0, 500.0), st.floats(0.0, 50.0)
    ),
    st.builds(
        CheckpointTimeline,
        st.floats(600.0, 2e4),
        st.floats(0.0, 30.0),
        st.floats(1.0, 500.0),
        st.floats(0.0, 50.0),
        st.integers(1, 8),
        st.just(True),
    ),
)


@examples(150)
@given(reliability=RELIABILITIES, saving=SAVINGS, bound=st.booleans(), run_index=st.integers(0, 3))
def test_time_is_conserved(
    reliability: ReliabilityModel, saving: CheckpointTimeline, bound: bool, run_index: int
) -> None:
    """Work and losses sum to the wall time; nodes are in the job, idle or in repair; states are a share of it.

    A run that cannot run ahead of its queue is the same.
    """
    domains = failure_domains(bound=bound)
    job = replace(job_parameters(reliability, saving, 5.0 * DAY, load=60.0, domains=domains), max_wall=60.0 * DAY)
    result = simulate_run(job, run_index)
    assert result.work + sum(result.losses.values()) == pytest.approx(result.wall, rel=1e-9)
    assert min(result.losses.values()) >= -1e-6 * result.wall
    node_count = (
        domains.nodes
        + (reliability.spares.shared_nodes or 0)
        + reliability.spares.nodes_per_rack * domains.counts.racks
    )
    assert sum(result.nodes.values()) == pytest.approx(node_count * result.wall, rel=1e-9)
    assert min(result.nodes.values()) >= 0.0
    assert sum(result.states.values()) <= result.wall * (1.0 + 1e-9)
    assert result.work == pytest.approx(job.work) if result.finished else result.work <= job.work
    assert simulate_run(job, run_index) == result
    assert _run_beside_a_clock(job, run_index) == result


def _run_beside_a_clock(job: JobParameters, run_index: int) -> TrainingRun:
    """A run whose queue always holds an event of the next hours, so that it cannot run far ahead of it."""

    def tick() -> Iterator[simpy.Event]:
        while True:
            yield env.timeout(1e4)

    env = simpy.Environment()
    env.process(tick())
    events = generate_failures(job.reliability, job.domains, 1, run_index, job.work)
    return JobSimulation(job, events, env=env).run(run_index)


def assert_no_worse(
    baseline: ReliabilityModel,
    improved: ReliabilityModel,
    checkpoints: CheckpointTimeline,
    improved_checkpoints: CheckpointTimeline,
) -> None:
    """The improved mean wall time is not above the baseline in the same runs, up to 0.1 % of random error."""
    assert (
        mean_wall_seconds(job_parameters(improved, improved_checkpoints, 5.0 * DAY), 40)
        <= mean_wall_seconds(job_parameters(baseline, checkpoints, 5.0 * DAY), 40) * 1.001
    )


NODE_FAILURE = job_failure(
    6.0 * HOUR,
    failure_domain=FailureDomain.NODE,
    repair_time=DurationDistribution(10.0 * HOUR, 40.0 * HOUR),
    detection_time=DurationDistribution.constant(200.0),
)


@pytest.mark.parametrize("few", [0, 1, 2, 4, 8])
def test_more_spares_never_raise_the_mean(few: int) -> None:
    fewer, more = (reliability_model([NODE_FAILURE], 300.0, spares=SparePool(nodes)) for nodes in (few, few + 1))
    assert_no_worse(fewer, more, CheckpointTimeline(1800.0, 30.0), CheckpointTimeline(1800.0, 30.0))


def test_faster_storage_restarts_and_detection_never_raise_the_mean() -> None:
    slow = reliability_model([NODE_FAILURE], 300.0, spares=SparePool(8))
    saving = CheckpointTimeline(1800.0, 30.0)
    assert_no_worse(slow, slow, saving, CheckpointTimeline(1800.0, 15.0))
    assert_no_worse(slow, reliability_model([NODE_FAILURE], 100.0, spares=SparePool(8)), saving, saving)
    assert_no_worse(
        slow,
        reliability_model(
            [replace(NODE_FAILURE, detection_time=DurationDistribution.constant(0.0))], 300.0, spares=SparePool(8)
        ),
        saving,
        saving,
    )
    assert_no_worse(slow, replace(slow, rate_factor=0.5), saving, saving)
    assert_no_worse(slow, replace(slow, repair_slots=None), saving, saving)


def test_a_slow_component_degrades_the_job_until_detection() -> None:
    """One after 1,000 s at 80 %, detected after 500 s: 500 s at 80 %, a checkpoint of 10 s and a restart of 100 s."""
    slow = FailureMode(
        "slow",
        FailureRate(FailureComponent.JOB, 1e-9),
        FailureEffect.SLOW,
        discovery_time=DurationDistribution.constant(500.0),
        slowdown=FailureSlowdown(0.8),
        repair_time=DurationDistribution.constant(1.0),
    )
    job = job_parameters(reliability_model([slow], 100.0, spares=SparePool(1)), CheckpointTimeline(1e5, 10.0), 3000.0)
    result = run_with_failures_at(job, 1000.0)
    assert result.losses["degraded"] == pytest.approx(100.0)
    assert result.losses["restart"] == 100.0
    assert result.losses["checkpoints"] == pytest.approx(20.0)
    assert result.states["0.800"] == pytest.approx(500.0)
    assert result.wall == pytest.approx(3000.0 + 100.0 + 100.0 + 20.0)
    assert result.interruptions == 0


def test_silent_corruption_rolls_back_to_a_snapshot_before_it() -> None:
    """Corrupt from 2,500 s on, detected 1,500 s later: back to the snapshot begun at 2,010 s, after 2,000 s of work."""
    corruption = FailureMode(
        "wrong",
        FailureRate(FailureComponent.JOB, 1e-9),
        FailureEffect.CORRUPT,
        FailureDomain.NOTHING,
        discovery_time=DurationDistribution.constant(1500.0),
    )
    result = run_with_failures_at(
        job_parameters(reliability_model([corruption], 100.0), CheckpointTimeline(1000.0, 10.0), 10_000.0), 2500.0
    )
    assert result.losses["lost_work"] == pytest.approx(4000.0 - 30.0 - 2000.0)


def test_peer_snapshots_survive_a_node_failure_but_not_a_rack_failure() -> None:
    """Snapshots every 100 s, each tenth stored: a node loses work since the last one, a rack since the stored one."""
    saving = CheckpointTimeline(100.0, 0.0, 1.0, 0.0, 10, has_peer_copies=True)
    for takes, safe in ((FailureDomain.NODE, 1500.0), (FailureDomain.RACK, 1000.0)):
        failure = FailureMode("it", FailureRate(FailureComponent.JOB, 1e-9), failure_domain=takes)
        result = run_with_failures_at(
            job_parameters(reliability_model([failure], 10.0, spares=SparePool(4)), saving, 5000.0), 1550.0
        )
        assert result.losses["lost_work"] == pytest.approx(1550.0 - safe)


def test_an_elastic_job_continues_with_the_remaining_nodes() -> None:
    """One of 64 nodes is lost for good: the job waits forever, or continues at 63/64 of its rate."""
    failure = FailureMode(
        "it",
        FailureRate(FailureComponent.JOB, 1e-9),
        failure_domain=FailureDomain.NODE,
        repair_time=DurationDistribution.constant(1e8),
    )
    job = job_parameters(
        reliability_model([failure], 0.0, spares=SparePool(0)), CheckpointTimeline(500.0, 0.0), 64_000.0
    )
    assert not run_with_failures_at(job, 1000.0).finished
    shrunk = replace(job, reliability=replace(job.reliability, elastic=ElasticPolicy.SHRINK_BATCH))
    result = run_with_failures_at(shrunk, 1000.0)
    assert result.finished
    assert result.wall == pytest.approx(1000.0 + (64_000.0 - 1000.0) * 64 / 63)


def test_repaired_nodes_rejoin_an_elastic_job() -> None:
    """Repaired after 10,000 s: a restart of 50 s after a checkpoint, then the full rate."""
    failure = FailureMode(
        "it",
        FailureRate(FailureComponent.JOB, 1e-9),
        failure_domain=FailureDomain.NODE,
        repair_time=DurationDistribution.constant(1e4),
    )
    reliability = reliability_model([failure], 50.0, spares=SparePool(0), elastic=ElasticPolicy.SHRINK_BATCH)
    result = run_with_failures_at(job_parameters(reliability, CheckpointTimeline(500.0, 0.0), 64_000.0), 1000.0)
    assert result.losses["restart"] == 100.0
    assert result.losses["degraded"] == pytest.approx((1e4 - 50.0) / 64)


def test_one_repair_crew_repairs_one_node_at_a_time() -> None:
    """Two nodes are lost at once in a rack of two: with one crew the second is repaired after twice the time."""
    for repair_slots, waiting_seconds in ((None, 1000.0), (1, 2000.0)):
        failure = FailureMode(
            "it",
            FailureRate(FailureComponent.JOB, 1e-9),
            failure_domain=FailureDomain.RACK,
            repair_time=DurationDistribution.constant(1000.0),
        )
        job = job_parameters(
            reliability_model([failure], spares=SparePool(0), repair_slots=repair_slots),
            CheckpointTimeline(50.0, 0.0),
            1e4,
            domains=failure_domains(per_rack=2),
        )
        assert run_with_failures_at(job, 100.0).losses["waiting"] == pytest.approx(waiting_seconds)


def test_a_node_of_an_nvlink_rack_is_replaced_within_it_or_with_the_rack() -> None:
    """A rack of 4 that is one NVLink domain: 3 spare nodes elsewhere do not help, 4 do, and so does one in the rack."""
    failure = FailureMode(
        "it",
        FailureRate(FailureComponent.JOB, 1e-9),
        failure_domain=FailureDomain.NODE,
        repair_time=DurationDistribution.constant(1000.0),
    )
    for spares, waiting_seconds in ((SparePool(3), 1000.0), (SparePool(4), 0.0), (SparePool(0, 1), 0.0)):
        job = job_parameters(
            reliability_model([failure], spares=spares),
            CheckpointTimeline(50.0, 0.0),
            1e4,
            domains=failure_domains(bound=True),
        )
        assert run_with_failures_at(job, 100.0).losses["waiting"] == pytest.approx(waiting_seconds)


def test_maintenance_starts_after_a_checkpoint() -> None:
    """Every 10,000 s for 100 s: twice in 25,000 s of work, with a checkpoint of 5 s and a restart of 20 s each."""
    result = simulate_run(
        job_parameters(
            reliability_model([], 20.0, maintenance=MaintenanceWindow(1e4, 100.0)),
            CheckpointTimeline(1e6, 5.0),
            25_000.0,
        )
    )
    assert result.losses["maintenance"] == 200.0
    assert result.losses["lost_work"] == 0.0
    assert result.losses["restart"] == 40.0
    assert result.wall == pytest.approx(25_000.0 + 200.0 + 40.0 + 15.0)
