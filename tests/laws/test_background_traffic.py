"""Laws of what else is on links: traffic of others, and links that are slow for a while."""

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim import RenderedResult, Scenario, simulate
from clustersim.build import build_simulation
from clustersim.program.task import CollectiveTask, SendTask
from tests.conftest import examples
from tests.laws.test_shared_network import crowded
from tests.laws.timelines import same

WIDE: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 8, "dp": 2, "sequence_parallel": True},
    "training": {"sequence": 1024, "global_batch": 2},
}
STAGES = {**WIDE, "layout": {"tp": 8, "pp": 2, "dp": 1, "sequence_parallel": True}}
OUT = ("nic0.0", "leaf0.0")


def result(given: dict[str, Any] = WIDE, **disturbances: Any) -> RenderedResult:
    return simulate(Scenario.from_mapping({**given, "disturbances": disturbances}))


def slow(left: float, start: float, end: float) -> dict[str, Any]:
    """The port of the first GPU's NIC, for a while."""
    return {"between": list(OUT), "bandwidth": left, "during": [f"{start!r} s", f"{end!r} s"]}


@st.composite
def disturbed(draw: st.DrawFn) -> Scenario:
    """Training steps beside traffic of others and a link that is slow for a while."""
    scenario = draw(crowded())
    gpus = scenario.cluster.machine.gpu_count
    order = draw(st.permutations(range(gpus)))
    kind = draw(st.sampled_from(["send_recv", "all_reduce", "all_to_all"])) if gpus > 2 else "send_recv"
    count = 2 if kind == "send_recv" else draw(st.integers(2, gpus))
    step = simulate(scenario).step_time
    traffic = {
        "gpus": list(order[:count]),
        "collective": kind,
        "bytes": draw(st.sampled_from(["1 kB", "100 kB", "3 MB"])),
        "start": f"{draw(st.floats(0.0, 1.0)) * step!r} s",
        "every": f"{draw(st.floats(0.02, 0.5)) * step!r} s",
    }
    link = scenario.cluster.machine.link_info(draw(st.integers(0, len(scenario.cluster.machine.links.kind) - 1)))
    start, length = draw(st.floats(0.0, 0.9)) * step, draw(st.floats(0.05, 1.0)) * step
    change = {
        "from": link.source,
        "to": link.target,
        "bandwidth": draw(st.sampled_from([0.01, 0.5, 0.9])),
        "during": [f"{start!r} s", f"{start + length!r} s"],
    }
    return Scenario.from_mapping({**scenario.raw_mapping, "disturbances": {"traffic": traffic, "links": change}})


@given(disturbed())
@examples(120)
def test_folded_is_unfolded_beside_others(scenario: Scenario) -> None:
    folded, every = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    event(f"{folded.rank_count} ranks in {folded.simulated_rank_count} classes")
    same(folded.trace, every.trace, relative=1e-9)


@given(disturbed())
@examples(60)
def test_coalesced_is_fine_grained_beside_others(scenario: Scenario) -> None:
    whole, single = simulate(scenario), simulate(scenario.with_overrides("cost.coalesce=false"))
    same(whole.trace, single.trace, relative=1e-9)


def test_what_others_do_elsewhere_changes_nothing() -> None:
    spare = {**WIDE, "cluster": {**WIDE["cluster"], "placement": {"spare": 2}}}
    alone = result(spare)
    beside = result(
        spare,
        traffic=[
            {"gpus": ["16-31"], "collective": "all_reduce", "bytes": "1 GB", "every": "1 ms"},
            {"gpus": [31, 16], "bytes": "1 GB", "every": "1 us"},
        ],
    )
    assert beside.scenario.background_traffic
    same(beside.trace, alone.trace)


@pytest.mark.parametrize("when", [{"start": "10 s"}, {"start": "0 s", "until": "0 s", "bytes": "1 B"}])
def test_what_comes_later_or_is_nothing_changes_nothing(when: dict[str, str]) -> None:
    beside = result(traffic={"gpus": [0, 8], "bytes": "1 GB", "every": "1 ms", **when})
    same(beside.trace, result().trace, relative=1e-12)


def rows_of(found: RenderedResult, kind: type[CollectiveTask | SendTask]) -> list[int]:
    """Trace rows of the first rank's collectives or messages, longest last."""
    trace, tasks = found.trace, found.program.programs[0].tasks
    rows = [row for row in trace.rank_events(0).tolist() if isinstance(tasks[int(trace.task[row])], kind)]
    return sorted(rows, key=lambda row: float(trace.end[row] - trace.start[row]))


def first_message(found: RenderedResult) -> tuple[float, float]:
    """When the first rank's first one begins, and how long it takes."""
    trace = found.trace
    row = min(rows_of(found, SendTask), key=lambda each: float(trace.start[each]))
    return float(trace.start[row]), float(trace.end[row] - trace.start[row])


@pytest.mark.parametrize("many", [1, 2, 5])
def test_equal_messages_that_share_a_link_alike_have_equal_parts_of_it(many: int) -> None:
    """As many more as begin with the first one, so many times longer it moves."""
    alone = result(STAGES)
    start, before = first_message(alone)
    message = next(task for task in alone.program.programs[0].tasks if isinstance(task, SendTask))
    shares = build_simulation(alone.scenario).contention
    assert shares is not None
    idle = float(shares.link_demand(message.comm_op).latency[0])
    other = {
        "gpus": [0, 8],
        "bytes": f"{message.comm_op.payload!r} B",
        "start": f"{start!r} s",
    }
    _, shared = first_message(result(STAGES, traffic=[other] * many))
    assert before > idle
    assert shared - idle == pytest.approx((1 + many) * (before - idle), rel=1e-9)


@given(st.integers(0, 7), st.floats(0.0, 0.03), st.sampled_from(["100 kB", "10 MB", "1 GB"]))
@examples(30)
def test_others_on_a_shared_link_never_make_such_a_step_faster(gpu: int, start: float, size: str) -> None:
    """One stream computes and one sums gradients behind it, so nobody overtakes."""
    alone = result().step_time
    beside = result(traffic={"gpus": [gpu, 8 + gpu], "bytes": size, "start": f"{start!r} s", "every": "2 ms"})
    assert beside.step_time >= alone * (1 - 1e-12)
    if size == "1 GB":
        assert beside.step_time > alone


def test_a_link_that_is_slow_all_the_time_is_a_slow_link() -> None:
    always = result(STAGES, links={"between": list(OUT), "bandwidth": "50 %"})
    while_it_runs = result(STAGES, links=slow(0.5, 0.0, 100.0))
    assert while_it_runs.step_time > result(STAGES).step_time
    same(while_it_runs.trace, always.trace, relative=1e-12)


def test_a_link_that_is_slow_while_gradients_are_summed_costs_what_it_lacks_meanwhile() -> None:
    """All ranks wait for the sum, whose slowest flow moves at the link's pace: what it lacks comes on top."""
    alone = result()
    longest = rows_of(alone, CollectiveTask)[-1]
    start, end = float(alone.trace.start[longest]), float(alone.trace.end[longest])
    for left in (0.01, 0.5, 0.9):
        middle, length = (start + end) / 2, (end - start) / 10
        found = result(links=slow(left, middle, middle + length))
        assert found.step_time - alone.step_time == pytest.approx((1 - left) * length, rel=1e-3)
    same(result(links=slow(0.5, 10.0, 11.0)).trace, alone.trace, relative=1e-12)
