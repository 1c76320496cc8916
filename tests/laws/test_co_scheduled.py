"""Invariants of co-scheduled jobs: they slow each other only where they use the same links at the same time."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from clustersim import RenderedResult, Scenario, simulate, simulation
from clustersim.build import build_simulation
from clustersim.engine import co_scheduled
from clustersim.program.task import ComputeTask, SendTask, Stream
from clustersim.results.co_scheduled_jobs import last_full_load_time
from clustersim.results.simulation_result import SimulationResult
from tests.conftest import examples
from tests.engine.network.recording_network import RecordingNetwork
from tests.laws.test_background_traffic import first_message
from tests.laws.test_shared_network import slowed_clusters
from tests.laws.timelines import assert_same_trace
from tests.strategies import mappings

OVERSUBSCRIBED_LEAF: dict[str, Any] = {"leaf": {"nodes": 2, "oversubscription": 2}}
"""Two nodes below a leaf whose uplinks carry the bandwidth of one of them."""
LARGER_FABRICS: dict[str, dict[str, Any]] = {
    "one switch": {"leaf": {"nodes": 16}},
    "racks": {"leaf": {"nodes": 2}, "spine": {"units": 4}, "core": {"pods": 2}},
}
"""Fabrics of 32 GPUs."""
TWO_STAGE_JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "layout": {"tp": 1, "pp": 2, "dp": 1},
    "training": {"sequence": 1024, "global_batch": 1},
    "framework": {"name": "ideal", "launch": "10 us"},
}
TWO_REPLICA_JOB: dict[str, Any] = {
    **TWO_STAGE_JOB,
    "layout": {"tp": 1, "dp": 2},
    "training": {"sequence": 1024, "global_batch": 2},
}


def job_on_nodes(nodes: list[int], job: dict[str, Any], fabric: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """Mapping of a job of two ranks, each on the first GPU of a node."""
    order = [8 * node for node in nodes]
    return {**job, "cluster": {"name": "dgx-h100", "gpus": 2, "fabric": fabric, "placement": {"order": order}}, **extra}


def simulate_with_jobs(mapping: dict[str, Any], *other_mappings: dict[str, Any], **job: Any) -> RenderedResult:
    """A step with co-scheduled jobs; `job` holds their other settings."""
    jobs = [{"scenario": other_mapping, **job} for other_mapping in other_mappings]
    return simulate(Scenario.from_mapping({**mapping, "degradations": {"jobs": jobs}}))


@st.composite
def co_scheduled_scenarios(draw: st.DrawFn) -> Scenario:
    """Two jobs of 2 to 16 GPUs each, scattered over a slow cluster, one possibly started before the other."""
    fabric_name = draw(st.sampled_from(sorted(LARGER_FABRICS)))
    mapping, other_mapping = draw(mappings(fabric_name)), draw(mappings(fabric_name))
    cluster = draw(slowed_clusters({**mapping["cluster"], "fabric": LARGER_FABRICS[fabric_name]}))
    for item in (mapping, other_mapping):
        assume(item["layout"]["data"] != "data_parallel")  # which is of one node
        item["training"]["sequence"] = 512
    sizes = [element["cluster"]["gpus"] for element in (mapping, other_mapping)]
    gpus = draw(st.permutations(range(sum(sizes))))
    if draw(st.booleans()):  # nodes of two GPUs that both jobs share, as far as possible
        gpus = sorted(range(2 * max(sizes)), key=lambda gpu: gpu % 2)
    placements = [{"order": gpus[: sizes[0]]}, {"order": gpus[-sizes[1] :]}]
    job_mappings = [
        {**entry, "cluster": {**cluster, "gpus": size, "placement": placement}}
        for entry, size, placement in zip((mapping, other_mapping), sizes, placements, strict=True)
    ]
    step = simulate(Scenario.from_mapping(job_mappings[0])).step_time
    start = draw(st.sampled_from([0.0, 0.3, -0.7])) * step
    job = {"scenario": job_mappings[1], "start": f"{start!r} s"}
    return Scenario.from_mapping({**job_mappings[0], "degradations": {"jobs": job}})


def assert_equal_jobs(result: SimulationResult, other: SimulationResult, *, relative: float = 1e-9) -> None:
    """Assert that all jobs have equal traces and isolated times."""
    assert_same_trace(result.trace, other.trace, relative=relative)
    for job, other_job in zip(result.co_scheduled_jobs, other.co_scheduled_jobs, strict=True):
        assert_same_trace(job.trace_table.trace, other_job.trace_table.trace, relative=relative)
        assert job.isolated_step_times == pytest.approx(other_job.isolated_step_times, rel=relative)
        assert job.ended_steps == other_job.ended_steps


def is_slowed_by_jobs(result: SimulationResult) -> bool:
    """Whether co-scheduled jobs change the step time."""
    assert result.isolated_step_time is not None
    return abs(result.step_time - result.isolated_step_time) > 1e-9 * result.isolated_step_time


@given(co_scheduled_scenarios())
@examples(40)
def test_folded_equals_unfolded_with_co_scheduled_jobs(scenario: Scenario) -> None:
    folded, unfolded_result = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    event(f"others are felt: {is_slowed_by_jobs(folded)}")
    event(f"folded: {folded.simulated_rank_count < folded.rank_count}")
    assert unfolded_result.simulated_rank_count == unfolded_result.rank_count
    assert_equal_jobs(folded, unfolded_result)


@given(co_scheduled_scenarios())
@examples(40)
def test_coalesced_equals_fine_grained_with_co_scheduled_jobs(scenario: Scenario) -> None:
    """Jobs that wait for each other on links multiply differences of rounding from microbatch to microbatch."""
    fine_grained = simulate(scenario.with_overrides("cost.coalesce=false"))
    assert_equal_jobs(simulate(scenario), fine_grained, relative=1e-7)


@given(co_scheduled_scenarios())
@examples(20)
def test_no_link_is_overloaded_by_jobs_and_all_their_bytes_arrive(scenario: Scenario) -> None:
    networks: list[RecordingNetwork] = []

    class CollectedNetwork(RecordingNetwork):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            networks.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(co_scheduled, "FluidNetwork", CollectedNetwork)
        simulate(scenario)
    assert len(networks) >= 3  # the other job isolated, both, the other isolated for as many steps
    for network in networks:
        network.check_invariants()


@given(co_scheduled_scenarios())
@examples(12)
def test_the_same_jobs_give_the_same_bytes(scenario: Scenario) -> None:
    first = simulate(scenario)
    for again in (simulate(scenario), simulate(Scenario.from_mapping(scenario.to_mapping()))):
        assert pickle.dumps((again.trace, again.step_time)) == pickle.dumps((first.trace, first.step_time))
        assert [co_scheduled_job.to_json() for co_scheduled_job in again.co_scheduled_jobs] == [
            item.to_json() for item in first.co_scheduled_jobs
        ]


@pytest.mark.parametrize("job", [TWO_STAGE_JOB, TWO_REPLICA_JOB])
@pytest.mark.parametrize("start", ["0 s", "-7 ms", "3 ms"])
def test_jobs_that_share_no_link_change_nothing(job: dict[str, Any], start: str) -> None:
    """Exactly: the jobs are on nodes below different leaves, and neither's traffic leaves them."""
    separate_leaves = {"leaf": {"nodes": 2}}
    mapping, other_mapping = (
        job_on_nodes([0, 1], job, separate_leaves),
        job_on_nodes([2, 3], TWO_REPLICA_JOB, separate_leaves),
    )
    shared = simulate_with_jobs(mapping, other_mapping, start=start)
    isolated = simulate(replace(shared.scenario, co_scheduled_jobs=()))
    assert_same_trace(shared.trace, isolated.trace)
    (other_job,) = shared.co_scheduled_jobs
    assert other_job.step_times.tolist() == other_job.isolated_step_times.tolist()


def test_jobs_that_start_after_the_step_change_nothing() -> None:
    shared = simulate_with_jobs(
        job_on_nodes([0, 2], TWO_REPLICA_JOB, OVERSUBSCRIBED_LEAF),
        job_on_nodes([1, 3], TWO_REPLICA_JOB, OVERSUBSCRIBED_LEAF),
        start="10 s",
    )
    assert_same_trace(shared.trace, simulate(replace(shared.scenario, co_scheduled_jobs=())).trace)
    (other,) = shared.co_scheduled_jobs
    assert (other.ended_steps, len(other.step_times)) == (0, 1)
    assert other.slowdown == pytest.approx(0.0, abs=1e-12)


def first_message_times(result: RenderedResult) -> tuple[float, float, float]:
    """Start, latency and transfer time in seconds of the first message."""
    start, duration = first_message(result)
    send_task = next(task for task in result.program.programs[0].tasks if isinstance(task, SendTask))
    shares = build_simulation(replace(result.scenario, co_scheduled_jobs=())).contention
    assert shares is not None
    latency = float(shares.link_demand(send_task.comm_op).latency[0])
    return start, latency, duration - latency


@pytest.mark.parametrize("oversubscription", [4, 8])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_equal_jobs_get_equal_shares_of_a_link(count: int, oversubscription: int) -> None:
    """Stages 0 are below one leaf and stages 1 below another, so all messages share one uplink and one downlink.

    It carries four NICs' bandwidth over the oversubscription: one message has it all, each of n has 1/n.
    """
    fabric = {"leaf": {"nodes": 4, "oversubscription": oversubscription}}
    jobs = [job_on_nodes([node, 4 + node], TWO_STAGE_JOB, fabric) for node in range(1 + count)]
    shared = simulate_with_jobs(*jobs)
    _, isolated_latency, isolated_transfer = first_message_times(
        simulate(replace(shared.scenario, co_scheduled_jobs=()))
    )
    _, latency, shared_transfer = first_message_times(shared)
    assert latency == isolated_latency
    assert shared_transfer == pytest.approx((1 + count) * isolated_transfer, rel=1e-9)
    assert shared.step_time == pytest.approx(shared.co_scheduled_jobs[0].step_times[0], rel=1e-12)


def test_a_message_gets_the_full_link_once_the_shorter_one_has_ended() -> None:
    """Both start moving at once and keep the link full, so the longer one takes the sum of their isolated times.

    They get equal shares in bytes per second; a little of a message's isolated time is for filling its pipeline.
    """
    long_job = {**TWO_STAGE_JOB, "training": {"sequence": 2048, "global_batch": 1}}
    jobs = job_on_nodes([0, 2], TWO_STAGE_JOB, OVERSUBSCRIBED_LEAF), job_on_nodes([1, 3], long_job, OVERSUBSCRIBED_LEAF)
    (start, short_latency, short_transfer), (long_start, long_latency, long_transfer) = (
        first_message_times(simulate(Scenario.from_mapping(job))) for job in jobs
    )
    start_offset = start + short_latency - long_start - long_latency
    assert start_offset < 0.0  # it computes longer before it sends
    link_share = short_transfer / (short_transfer + long_transfer / 2)  # seconds of its isolated transfer per second
    assert link_share == pytest.approx(0.5, rel=0.05)
    for mapping, other_mapping, other_start, expected_transfer in (
        (*jobs, start_offset, short_transfer / link_share),
        (*reversed(jobs), -start_offset, short_transfer + long_transfer),
    ):
        shared = simulate_with_jobs(mapping, other_mapping, start=f"{other_start!r} s")
        assert first_message_times(shared)[2] == pytest.approx(expected_transfer, rel=1e-6)


@pytest.mark.parametrize("coalesce", [True, False])
def test_equal_jobs_double_the_transfer_time_inside_segments(coalesce: bool) -> None:
    """Collectives inside segments are exposed; both jobs run in lockstep, so transfers get half the link's rate."""
    tensor_parallel_job = {
        **TWO_STAGE_JOB,
        "layout": {"tp": 2, "async_tensor_model_parallel_allreduce": False},
        "cost": {"coalesce": coalesce},
    }
    shared = simulate_with_jobs(
        job_on_nodes([0, 2], tensor_parallel_job, OVERSUBSCRIBED_LEAF),
        job_on_nodes([1, 3], tensor_parallel_job, OVERSUBSCRIBED_LEAF),
    )
    shares = build_simulation(replace(shared.scenario, co_scheduled_jobs=())).contention
    assert shares is not None
    segments = [task.segment for task in shared.program.programs[0].tasks if isinstance(task, ComputeTask)]
    transfer_seconds = sum(
        float(shares.link_demand(comm_op).transfer[0]) for segment in segments for comm_op in segment.comm_ops
    )
    assert shared.isolated_step_time is not None
    assert shared.step_time - shared.isolated_step_time == pytest.approx(transfer_seconds, rel=1e-9)
    assert shared.step_time == pytest.approx(float(shared.co_scheduled_jobs[0].step_times[0]), rel=1e-12)


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("overlap", [True, False])
def test_swapping_the_simulated_job_keeps_both_step_times(batch: int, overlap: bool) -> None:
    """Up to the end of the first of them; all ranks of a job end at once here."""
    short_job = {**TWO_REPLICA_JOB, "layout": {"tp": 1, "dp": 2, "data": {"ddp": {"overlap": overlap}}}}
    long_job = {**TWO_REPLICA_JOB, "training": {"sequence": 1024, "global_batch": batch}}
    first_mapping, second_mapping = (
        job_on_nodes([0, 2], short_job, OVERSUBSCRIBED_LEAF),
        job_on_nodes([1, 3], long_job, OVERSUBSCRIBED_LEAF),
    )
    first_result, second_result = (
        simulate_with_jobs(first_mapping, second_mapping),
        simulate_with_jobs(second_mapping, first_mapping),
    )
    (second_job,), (first_job,) = first_result.co_scheduled_jobs, second_result.co_scheduled_jobs
    assert (first_result.isolated_step_time, second_result.isolated_step_time) == (
        first_job.isolated_step_times[0],
        second_job.isolated_step_times[0],
    )
    assert is_slowed_by_jobs(first_result)
    assert is_slowed_by_jobs(second_result)
    if second_job.step_times[0] <= first_result.step_time:
        assert second_job.step_times[0] == second_result.step_time
    else:
        assert first_job.step_times[0] == first_result.step_time
    if batch == 2 and overlap:
        assert first_result.step_time == second_result.step_time == second_job.step_times[0]


def test_co_scheduled_jobs_repeat_steps_until_this_job_ends() -> None:
    """Their steps follow each other without gaps, up to the one in which this job ends."""
    long_job = {**TWO_REPLICA_JOB, "training": {"sequence": 1024, "global_batch": 48}}
    shared = simulate_with_jobs(
        job_on_nodes([0, 2], long_job, OVERSUBSCRIBED_LEAF), job_on_nodes([1, 3], TWO_REPLICA_JOB, OVERSUBSCRIBED_LEAF)
    )
    (other,) = shared.co_scheduled_jobs
    assert other.ended_steps == len(other.step_times) == len(other.isolated_step_times) > 2
    assert float(other.step_times.sum()) <= shared.step_time
    assert other.trace_table.trace.makespan >= shared.step_time * (1 - 1e-9)
    assert other.slowdown > 0.0


def test_links_carry_the_bytes_of_all_jobs() -> None:
    """The isolated bytes where only one job is, which ends with this one; both jobs' bytes where both are."""
    shared = simulate_with_jobs(
        job_on_nodes([0, 2], TWO_REPLICA_JOB, OVERSUBSCRIBED_LEAF),
        job_on_nodes([1, 3], TWO_REPLICA_JOB, OVERSUBSCRIBED_LEAF),
    )
    isolated = simulate(replace(shared.scenario, co_scheduled_jobs=()))
    (nic, other_nic), uplink = (("nic0.0", "leaf0.0"), ("nic1.0", "leaf0.0")), ("leaf0.0", "spine0.0")
    carried = shared.link_loads(nic, other_nic, uplink, bins=7).total_bytes
    isolated_bytes = isolated.link_loads(nic, other_nic, uplink, bins=7).total_bytes
    assert isolated_bytes[1] == 0.0 < isolated_bytes[0]
    assert carried == pytest.approx([isolated_bytes[0], isolated_bytes[0], 2 * isolated_bytes[2]], rel=1e-9)
    delayed = simulate_with_jobs(
        job_on_nodes([0, 2], TWO_REPLICA_JOB, OVERSUBSCRIBED_LEAF),
        job_on_nodes([1, 3], TWO_REPLICA_JOB, OVERSUBSCRIBED_LEAF),
        start="10 s",
    )
    assert delayed.link_loads(nic, other_nic, bins=7).total_bytes == pytest.approx([isolated_bytes[0], 0.0], rel=1e-9)


@given(co_scheduled_scenarios(), st.sampled_from([lambda _: 1, lambda steps: steps + 2]))
@examples(20)
def test_the_first_guess_of_co_scheduled_steps_does_not_matter(
    scenario: Scenario, guess_steps: Callable[[int], int]
) -> None:
    """Too few steps are run again with more; more than needed come after this job's end."""
    usual, original_guess = simulate(scenario), simulation._estimate_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "_estimate_steps", lambda *each: guess_steps(original_guess(*each)))
        result = simulate(scenario)
    assert_same_trace(result.trace, usual.trace)
    (job,), (usual_job,) = result.co_scheduled_jobs, usual.co_scheduled_jobs
    steps = min(job.trace_table.step_count, usual_job.trace_table.step_count)
    event(f"as many: {job.trace_table.step_count == usual_job.trace_table.step_count}")
    event(f"several: {steps > 1}")
    assert job.ended_steps == usual_job.ended_steps
    if usual_job.ended_steps:
        assert job.step_times.tolist() == usual_job.step_times.tolist()


@pytest.mark.parametrize("data", ["zero1", "fsdp"])
def test_a_step_ends_before_any_rank_needs_the_next_step(data: str) -> None:
    """The first rank to end then gathers parameters of the next step, while others are far from it."""
    staged = {
        **TWO_STAGE_JOB,
        "layout": {"tp": 1, "pp": 2, "dp": 2, "data": data},
        "cluster": {"name": "dgx-h100", "gpus": 4},
    }
    training = {"sequence": 1024, "global_batch": 4, "gradient_clipping": False}  # at which all ranks would synchronize
    one_step, two_steps = (
        simulate(Scenario.from_mapping({**staged, "training": training, "steps": steps})) for steps in (1, 2)
    )
    in_second_step = two_steps.trace_table.tasks.step[two_steps.trace_table.entries_of(slice(None))] == 1
    second_step_start = float(two_steps.trace.start[in_second_step & (two_steps.trace.stream != Stream.RECEIVE)].min())
    step_end = last_full_load_time(one_step.trace, one_step.program)
    assert step_end < one_step.step_time * (1 - 1e-3)
    assert step_end <= second_step_start * (1 + 1e-12)
    assert second_step_start < one_step.step_time * (1 - 1e-3)
