"""Invariants of background traffic and of links that are degraded for part of the time."""

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim import RenderedResult, Scenario, simulate
from clustersim.build import build_simulation
from clustersim.program.task import CollectiveTask, SendTask
from tests.conftest import examples
from tests.laws.test_shared_network import contended_scenarios
from tests.laws.timelines import assert_same_trace

TENSOR_PARALLEL: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 8, "dp": 2, "sequence_parallel": True},
    "training": {"sequence": 1024, "global_batch": 2},
}
TWO_STAGES = {**TENSOR_PARALLEL, "layout": {"tp": 8, "pp": 2, "dp": 1, "sequence_parallel": True}}
NIC_PORT = ("nic0.0", "leaf0.0")


def simulate_degraded(mapping: dict[str, Any] = TENSOR_PARALLEL, **degradations: Any) -> RenderedResult:
    return simulate(Scenario.from_mapping({**mapping, "degradations": degradations}))


def slow_link(bandwidth_fraction: float, start: float, end: float) -> dict[str, Any]:
    """A degradation of the first GPU's NIC port between two times in seconds."""
    return {"between": list(NIC_PORT), "bandwidth": bandwidth_fraction, "during": [f"{start!r} s", f"{end!r} s"]}


@st.composite
def degraded_scenarios(draw: st.DrawFn) -> Scenario:
    """Training steps with periodic background traffic and one link that is slow for part of the step."""
    scenario = draw(contended_scenarios())
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
    return Scenario.from_mapping({**scenario.raw_mapping, "degradations": {"traffic": traffic, "links": change}})


@given(degraded_scenarios())
@examples(120)
def test_folded_equals_unfolded_with_background_traffic(scenario: Scenario) -> None:
    folded, unfolded_result = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    event(f"{folded.rank_count} ranks in {folded.simulated_rank_count} classes")
    assert_same_trace(folded.trace, unfolded_result.trace, relative=1e-9)


@given(degraded_scenarios())
@examples(60)
def test_coalesced_equals_fine_grained_with_background_traffic(scenario: Scenario) -> None:
    coalesced, fine_grained = simulate(scenario), simulate(scenario.with_overrides("cost.coalesce=false"))
    assert_same_trace(coalesced.trace, fine_grained.trace, relative=1e-9)


def test_background_traffic_on_unused_nodes_changes_nothing() -> None:
    spare = {**TENSOR_PARALLEL, "cluster": {**TENSOR_PARALLEL["cluster"], "placement": {"spare": 2}}}
    isolated = simulate_degraded(spare)
    with_traffic = simulate_degraded(
        spare,
        traffic=[
            {"gpus": ["16-31"], "collective": "all_reduce", "bytes": "1 GB", "every": "1 ms"},
            {"gpus": [31, 16], "bytes": "1 GB", "every": "1 us"},
        ],
    )
    assert with_traffic.scenario.background_traffic
    assert_same_trace(with_traffic.trace, isolated.trace)


@pytest.mark.parametrize("when", [{"start": "10 s"}, {"start": "0 s", "until": "0 s", "bytes": "1 B"}])
def test_background_traffic_after_the_step_or_empty_changes_nothing(when: dict[str, str]) -> None:
    with_traffic = simulate_degraded(traffic={"gpus": [0, 8], "bytes": "1 GB", "every": "1 ms", **when})
    assert_same_trace(with_traffic.trace, simulate_degraded().trace, relative=1e-12)


def trace_events_of(result: RenderedResult, kind: type[CollectiveTask | SendTask]) -> list[int]:
    """Indices of the first rank's trace events of collectives or sends, sorted by duration, longest last."""
    trace, tasks = result.trace, result.program.programs[0].tasks
    events = [
        event_index
        for event_index in trace.rank_events(0).tolist()
        if isinstance(tasks[int(trace.task[event_index])], kind)
    ]
    return sorted(events, key=lambda event_index: float(trace.end[event_index] - trace.start[event_index]))


def first_message(result: RenderedResult) -> tuple[float, float]:
    """Start and duration in seconds of the first rank's first send."""
    trace = result.trace
    event_index = min(trace_events_of(result, SendTask), key=lambda candidate: float(trace.start[candidate]))
    return float(trace.start[event_index]), float(trace.end[event_index] - trace.start[event_index])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_concurrent_messages_get_equal_shares_of_a_link(count: int) -> None:
    """With n further messages starting at the same time, the transfer takes 1 + n times as long."""
    isolated = simulate_degraded(TWO_STAGES)
    start, isolated_seconds = first_message(isolated)
    message = next(task for task in isolated.program.programs[0].tasks if isinstance(task, SendTask))
    shares = build_simulation(isolated.scenario).contention
    assert shares is not None
    latency = float(shares.link_demand(message.comm_op).latency[0])
    traffic = {
        "gpus": [0, 8],
        "bytes": f"{message.comm_op.payload!r} B",
        "start": f"{start!r} s",
    }
    _, shared_seconds = first_message(simulate_degraded(TWO_STAGES, traffic=[traffic] * count))
    assert isolated_seconds > latency
    assert shared_seconds - latency == pytest.approx((1 + count) * (isolated_seconds - latency), rel=1e-9)


@given(st.integers(0, 7), st.floats(0.0, 0.03), st.sampled_from(["100 kB", "10 MB", "1 GB"]))
@examples(30)
def test_background_traffic_never_makes_a_step_faster(gpu: int, start: float, size: str) -> None:
    """One stream computes and one reduces gradients concurrently, so no task overtakes another."""
    isolated_step = simulate_degraded().step_time
    with_traffic = simulate_degraded(
        traffic={"gpus": [gpu, 8 + gpu], "bytes": size, "start": f"{start!r} s", "every": "2 ms"}
    )
    assert with_traffic.step_time >= isolated_step * (1 - 1e-12)
    if size == "1 GB":
        assert with_traffic.step_time > isolated_step


def test_a_link_degraded_for_a_full_step_equals_a_slow_link() -> None:
    always = simulate_degraded(TWO_STAGES, links={"between": list(NIC_PORT), "bandwidth": "50 %"})
    while_it_runs = simulate_degraded(TWO_STAGES, links=slow_link(0.5, 0.0, 100.0))
    assert while_it_runs.step_time > simulate_degraded(TWO_STAGES).step_time
    assert_same_trace(while_it_runs.trace, always.trace, relative=1e-12)


def test_a_slow_link_during_the_all_reduce_costs_its_missing_bandwidth() -> None:
    """All ranks wait for the all-reduce, whose slowest flow moves at the link's rate: the missing bandwidth adds up."""
    isolated = simulate_degraded()
    longest = trace_events_of(isolated, CollectiveTask)[-1]
    start, end = float(isolated.trace.start[longest]), float(isolated.trace.end[longest])
    for bandwidth_fraction in (0.01, 0.5, 0.9):
        middle, length = (start + end) / 2, (end - start) / 10
        degraded = simulate_degraded(links=slow_link(bandwidth_fraction, middle, middle + length))
        assert degraded.step_time - isolated.step_time == pytest.approx((1 - bandwidth_fraction) * length, rel=1e-3)
    assert_same_trace(simulate_degraded(links=slow_link(0.5, 10.0, 11.0)).trace, isolated.trace, relative=1e-12)
