"""Laws of jobs that are on one machine, and slow each other where they are on the same links at the same time."""

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
from clustersim.results.co_located_jobs import last_full_load_time
from clustersim.results.simulation_result import SimulationResult
from tests.conftest import examples
from tests.engine.network.recording_network import Watched
from tests.laws.test_background_traffic import first_message
from tests.laws.test_shared_network import slower
from tests.laws.timelines import same
from tests.strategies import mappings

UNITS: dict[str, Any] = {"leaf": {"nodes": 2, "oversubscription": 2}}
"""Two nodes below a leaf whose uplinks carry what one of them can send."""
LARGER: dict[str, dict[str, Any]] = {
    "one switch": {"leaf": {"nodes": 16}},
    "racks": {"leaf": {"nodes": 2}, "spine": {"units": 4}, "core": {"pods": 2}},
}
"""Fabrics of 32 GPUs."""
STAGES: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "layout": {"tp": 1, "pp": 2, "dp": 1},
    "training": {"sequence": 1024, "global_batch": 1},
}
REPLICAS: dict[str, Any] = {**STAGES, "layout": {"tp": 1, "dp": 2}, "training": {"sequence": 1024, "global_batch": 2}}


def on(nodes: list[int], job: dict[str, Any], fabric: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A job of two ranks, each on the first GPU of a node."""
    order = [8 * node for node in nodes]
    return {**job, "cluster": {"name": "dgx-h100", "gpus": 2, "fabric": fabric, "placement": {"order": order}}, **more}


def result(mine: dict[str, Any], *theirs: dict[str, Any], **job: Any) -> RenderedResult:
    """A step beside other jobs; job: what else is said of them."""
    jobs = [{"scenario": their, **job} for their in theirs]
    return simulate(Scenario.from_mapping({**mine, "disturbances": {"jobs": jobs}}))


@st.composite
def crowds(draw: st.DrawFn) -> Scenario:
    """Two jobs of 2 to 16 GPUs each that are scattered over a slow machine, one maybe begun before the other."""
    place = draw(st.sampled_from(sorted(LARGER)))
    mine, other = draw(mappings(place)), draw(mappings(place))
    cluster = draw(slower({**mine["cluster"], "fabric": LARGER[place]}))
    for item in (mine, other):
        assume(item["layout"]["data"] != "data_parallel")  # which is of one node
        item["training"]["sequence"] = 512
    sizes = [element["cluster"]["gpus"] for element in (mine, other)]
    gpus = draw(st.permutations(range(sum(sizes))))
    if draw(st.booleans()):  # nodes of two that both jobs have, as far as they can
        gpus = sorted(range(2 * max(sizes)), key=lambda gpu: gpu % 2)
    ways = [{"order": gpus[: sizes[0]]}, {"order": gpus[-sizes[1] :]}]
    both = [
        {**entry, "cluster": {**cluster, "gpus": size, "placement": way}}
        for entry, size, way in zip((mine, other), sizes, ways, strict=True)
    ]
    step = simulate(Scenario.from_mapping(both[0])).step_time
    start = draw(st.sampled_from([0.0, 0.3, -0.7])) * step
    job = {"scenario": both[1], "start": f"{start!r} s"}
    return Scenario.from_mapping({**both[0], "disturbances": {"jobs": job}})


def alike(one: SimulationResult, other: SimulationResult, *, relative: float = 1e-9) -> None:
    """Assert that all jobs did the same."""
    same(one.trace, other.trace, relative=relative)
    for mine, theirs in zip(one.co_located_jobs, other.co_located_jobs, strict=True):
        same(mine.trace_table.trace, theirs.trace_table.trace, relative=relative)
        assert mine.isolated_step_times == pytest.approx(theirs.isolated_step_times, rel=relative)
        assert mine.ended_steps == theirs.ended_steps


def felt(found: SimulationResult) -> bool:
    """Whether the others cost a step anything."""
    assert found.isolated_step_time is not None
    return abs(found.step_time - found.isolated_step_time) > 1e-9 * found.isolated_step_time


@given(crowds())
@examples(80)
def test_folded_is_unfolded_beside_other_jobs(scenario: Scenario) -> None:
    folded, every = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    event(f"others are felt: {felt(folded)}")
    event(f"folded: {folded.simulated_rank_count < folded.rank_count}")
    assert every.simulated_rank_count == every.rank_count
    alike(folded, every)


@given(crowds())
@examples(40)
def test_coalesced_is_fine_grained_beside_other_jobs(scenario: Scenario) -> None:
    alike(simulate(scenario), simulate(scenario.with_overrides("cost.coalesce=false")))


@given(crowds())
@examples(20)
def test_no_link_is_overloaded_by_jobs_and_all_their_bytes_arrive(scenario: Scenario) -> None:
    made: list[Watched] = []

    class Noted(Watched):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(co_scheduled, "FluidNetwork", Noted)
        simulate(scenario)
    assert len(made) >= 3  # the other alone, both, the other alone for as many steps
    for network in made:
        network.check()


@given(crowds())
@examples(12)
def test_the_same_jobs_give_the_same_bytes(scenario: Scenario) -> None:
    first = simulate(scenario)
    for again in (simulate(scenario), simulate(Scenario.from_mapping(scenario.to_mapping()))):
        assert pickle.dumps((again.trace, again.step_time)) == pickle.dumps((first.trace, first.step_time))
        assert [co_located_job.to_json() for co_located_job in again.co_located_jobs] == [
            item.to_json() for item in first.co_located_jobs
        ]


@pytest.mark.parametrize("job", [STAGES, REPLICAS])
@pytest.mark.parametrize("start", ["0 s", "-7 ms", "3 ms"])
def test_jobs_that_share_no_link_change_nothing(job: dict[str, Any], start: str) -> None:
    """To the last digit: on nodes below other leaves, which neither leaves."""
    below = {"leaf": {"nodes": 2}}
    mine, theirs = on([0, 1], job, below), on([2, 3], REPLICAS, below)
    beside = result(mine, theirs, start=start)
    alone = simulate(replace(beside.scenario, co_scheduled_jobs=()))
    same(beside.trace, alone.trace)
    (job_beside,) = beside.co_located_jobs
    assert job_beside.step_times.tolist() == job_beside.isolated_step_times.tolist()


def test_jobs_that_begin_later_change_nothing() -> None:
    beside = result(on([0, 2], REPLICAS, UNITS), on([1, 3], REPLICAS, UNITS), start="10 s")
    same(beside.trace, simulate(replace(beside.scenario, co_scheduled_jobs=())).trace)
    (other,) = beside.co_located_jobs
    assert (other.ended_steps, len(other.step_times)) == (0, 1)
    assert other.slowdown == pytest.approx(0.0, abs=1e-12)


def message(found: RenderedResult) -> tuple[float, float, float]:
    """When the first message begins, its latency, and how long its bytes move."""
    start, whole = first_message(found)
    sent = next(task for task in found.program.programs[0].tasks if isinstance(task, SendTask))
    shares = build_simulation(replace(found.scenario, co_scheduled_jobs=())).contention
    assert shares is not None
    latency = float(shares.link_demand(sent.comm_op).latency[0])
    return start, latency, whole - latency


@pytest.mark.parametrize("oversubscription", [4, 8])
@pytest.mark.parametrize("many", [1, 2, 3])
def test_equal_jobs_that_send_at_once_have_equal_parts_of_a_link(many: int, oversubscription: int) -> None:
    """All stages 0 are below one leaf, all stages 1 below another, so all messages go up one bundle and down one.

    It carries four NICs' bandwidth over the oversubscription: one message has it all, n have an nth.
    """
    fabric = {"leaf": {"nodes": 4, "oversubscription": oversubscription}}
    jobs = [on([number, 4 + number], STAGES, fabric) for number in range(1 + many)]
    beside = result(*jobs)
    _, idle, alone = message(simulate(replace(beside.scenario, co_scheduled_jobs=())))
    _, latency, moves = message(beside)
    assert latency == idle
    assert moves == pytest.approx((1 + many) * alone, rel=1e-9)
    assert beside.step_time == pytest.approx(beside.co_located_jobs[0].step_times[0], rel=1e-12)


def test_a_shorter_message_shares_a_link_and_leaves_it_to_one_of_twice_its_bytes() -> None:
    """Both begin to move at once, and the link is full until both have, so the longer takes their time alone in all.

    They have equal parts in bytes per second; of a message's time alone a little is for filling its pipeline.
    """
    longer = {**STAGES, "training": {"sequence": 2048, "global_batch": 1}}
    both = on([0, 2], STAGES, UNITS), on([1, 3], longer, UNITS)
    (start, idle, short), (later, latency, long) = (message(simulate(Scenario.from_mapping(item))) for item in both)
    begins = start + idle - later - latency
    assert begins < 0.0  # it computes longer before it sends
    part = short / (short + long / 2)  # of a second of its work per second
    assert part == pytest.approx(0.5, rel=0.05)
    for mine, other, first, moves in ((*both, begins, short / part), (*reversed(both), -begins, short + long)):
        beside = result(mine, other, start=f"{first!r} s")
        assert message(beside)[2] == pytest.approx(moves, rel=1e-6)


@pytest.mark.parametrize("coalesce", [True, False])
def test_equal_jobs_whose_layers_communicate_at_once_take_twice_as_long_to_move_bytes(coalesce: bool) -> None:
    """Nothing hides exchanges inside blocks; both jobs are in step, so all of each moves at half the link's pace."""
    wide = {**STAGES, "layout": {"tp": 2, "backward_overlap": False}, "cost": {"coalesce": coalesce}}
    beside = result(on([0, 2], wide, UNITS), on([1, 3], wide, UNITS))
    shares = build_simulation(replace(beside.scenario, co_scheduled_jobs=())).contention
    assert shares is not None
    blocks = [task.segment for task in beside.program.programs[0].tasks if isinstance(task, ComputeTask)]
    moves = sum(float(shares.link_demand(comm_op).transfer[0]) for block in blocks for comm_op in block.comm_ops)
    assert beside.isolated_step_time is not None
    assert beside.step_time - beside.isolated_step_time == pytest.approx(moves, rel=1e-9)
    assert beside.step_time == pytest.approx(float(beside.co_located_jobs[0].step_times[0]), rel=1e-12)


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("overlap", [True, False])
def test_whichever_of_two_is_this_job_steps_take_as_long(batch: int, overlap: bool) -> None:
    """Up to the end of the first of them, and all ranks of a job end at once here."""
    short = {**REPLICAS, "layout": {"tp": 1, "dp": 2, "data": {"ddp": {"overlap": overlap}}}}
    long = {**REPLICAS, "training": {"sequence": 1024, "global_batch": batch}}
    one, other = on([0, 2], short, UNITS), on([1, 3], long, UNITS)
    mine, theirs = result(one, other), result(other, one)
    (left,), (right,) = mine.co_located_jobs, theirs.co_located_jobs
    assert (mine.isolated_step_time, theirs.isolated_step_time) == (
        right.isolated_step_times[0],
        left.isolated_step_times[0],
    )
    assert felt(mine)
    assert felt(theirs)
    if left.step_times[0] <= mine.step_time:
        assert left.step_times[0] == theirs.step_time
    else:
        assert right.step_times[0] == mine.step_time
    if batch == 2 and overlap:
        assert mine.step_time == theirs.step_time == left.step_times[0]


def test_others_go_on_until_this_job_is_done() -> None:
    """Step after step; their steps fill the time, up to the one in which this job ends."""
    long = {**REPLICAS, "training": {"sequence": 1024, "global_batch": 48}}
    beside = result(on([0, 2], long, UNITS), on([1, 3], REPLICAS, UNITS))
    (other,) = beside.co_located_jobs
    assert other.ended_steps == len(other.step_times) == len(other.isolated_step_times) > 2
    assert float(other.step_times.sum()) <= beside.step_time
    assert other.trace_table.trace.makespan >= beside.step_time * (1 - 1e-9)
    assert other.slowdown > 0.0


def test_links_carry_what_all_jobs_put_on_them() -> None:
    """As much as alone where only another job is, which ends with this one; both jobs' where both are."""
    beside = result(on([0, 2], REPLICAS, UNITS), on([1, 3], REPLICAS, UNITS))
    alone = simulate(replace(beside.scenario, co_scheduled_jobs=()))
    (mine, theirs), up = (("nic0.0", "leaf0.0"), ("nic1.0", "leaf0.0")), ("leaf0.0", "spine0.0")
    carried = beside.link_loads(mine, theirs, up, bins=7).total_bytes
    own = alone.link_loads(mine, theirs, up, bins=7).total_bytes
    assert own[1] == 0.0 < own[0]
    assert carried == pytest.approx([own[0], own[0], 2 * own[2]], rel=1e-9)
    later = result(on([0, 2], REPLICAS, UNITS), on([1, 3], REPLICAS, UNITS), start="10 s")
    assert later.link_loads(mine, theirs, bins=7).total_bytes == pytest.approx([own[0], 0.0], rel=1e-9)


@given(crowds(), st.sampled_from([lambda _: 1, lambda steps: steps + 2]))
@examples(20)
def test_it_does_not_matter_how_many_steps_of_others_are_tried_first(
    scenario: Scenario, tried: Callable[[int], int]
) -> None:
    """Too few are run again with more; more than needed come behind this job's end."""
    usual, guess = simulate(scenario), simulation._estimate_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "_estimate_steps", lambda *each: tried(guess(*each)))
        found = simulate(scenario)
    same(found.trace, usual.trace)
    (mine,), (other,) = found.co_located_jobs, usual.co_located_jobs
    steps = min(mine.trace_table.step_count, other.trace_table.step_count)
    event(f"as many: {mine.trace_table.step_count == other.trace_table.step_count}")
    event(f"several: {steps > 1}")
    assert mine.ended_steps == other.ended_steps
    if other.ended_steps:
        assert mine.step_times.tolist() == other.step_times.tolist()


@pytest.mark.parametrize("data", ["zero1", "fsdp"])
def test_no_rank_wants_for_a_further_step_before_a_job_is_said_to_last(data: str) -> None:
    """The first to be done gathers parameters of the next step then, while others are far from it."""
    staged = {**STAGES, "layout": {"tp": 1, "pp": 2, "dp": 2, "data": data}, "cluster": {"name": "dgx-h100", "gpus": 4}}
    training = {"sequence": 1024, "global_batch": 4, "gradient_clipping": False}  # at which all ranks would meet
    once, twice = (
        simulate(Scenario.from_mapping({**staged, "training": training, "steps": steps})) for steps in (1, 2)
    )
    later = twice.trace_table.tasks.step[twice.trace_table.entry] == 1
    begins = float(twice.trace.start[later & (twice.trace.stream != Stream.RECEIVE)].min())
    until = last_full_load_time(once.trace, once.program)
    assert until < once.step_time * (1 - 1e-3)
    assert until <= begins * (1 + 1e-12)
    assert begins < once.step_time * (1 - 1e-3)
