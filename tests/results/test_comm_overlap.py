"""Which communication is hidden behind which work, by hand and against the breakdown."""

import numpy as np
import pytest
from hypothesis import given

from clustersim import Scenario, simulate
from clustersim.cost.segment import OverlapModel
from clustersim.parallel import mesh
from clustersim.parallel.mesh import COMM_AXES, DENSE_AXIS_NAMES
from clustersim.program.task import CommOverlap as Beside
from clustersim.program.task import ComputeTask, Operation, Segment, Stream, WorkType
from clustersim.results.comm_overlap import AxisOverlap, compute_overlap
from clustersim.results.intervals import Intervals, intersect
from clustersim.results.time_breakdown import compute_breakdown
from clustersim.results.time_categories import EXPOSED_CATEGORIES
from clustersim.results.trace_table import build_trace_table
from tests.conftest import examples
from tests.results.random_trace_cases import trace_cases
from tests.results.trace_cases import (
    BACKWARD,
    FORWARD,
    KERNEL,
    OPTIMIZER_STEP,
    SpanEvent,
    TraceCase,
    build_timing,
    collective_task,
    comm_op,
    receive_task,
    send_task,
)
from tests.strategies import scenarios

DATA, SEND, RECEIVE = Stream.DP, Stream.SEND_NEXT, Stream.RECEIVE
OVERLAP_FIELDS = ("no_overlap", "hidden", "exposed", "during_idle")


def axis_overlap(case: TraceCase) -> AxisOverlap:
    return compute_overlap(
        case.trace_table, case.segment_timing, compute_breakdown(case.trace_table, case.segment_timing)
    )


def axis_seconds(case: TraceCase, axis: str, rank_class: int = 0) -> dict[str, float]:
    overlap = axis_overlap(case)
    values = {kind: float(getattr(overlap, kind)[rank_class, DENSE_AXIS_NAMES.index(axis)]) for kind in OVERLAP_FIELDS}
    values["neither"] = overlap.step_time - sum(values.values())
    return {kind: seconds for kind, seconds in values.items() if abs(seconds) > 1e-12}


def check_overlap(overlap: AxisOverlap, step_time: float) -> None:
    """No kind is negative, and together they do not exceed the step."""
    kinds = np.array([getattr(overlap, kind) for kind in OVERLAP_FIELDS])
    assert (kinds >= -1e-9 * (1 + step_time)).all()
    assert (kinds.sum(axis=0) <= step_time * (1 + 1e-9) + 1e-12).all()
    assert overlap.step_time == pytest.approx(step_time)


@given(trace_cases())
def test_overlap_kinds_fit_into_the_step_and_exposed_matches_the_breakdown(case: TraceCase) -> None:
    overlap, breakdown = axis_overlap(case), compute_breakdown(case.trace_table, case.segment_timing)
    check_overlap(overlap, case.trace.makespan)
    assert overlap.exposed == pytest.approx(
        breakdown.seconds[:, [category.index for category in EXPOSED_CATEGORIES.values()]]
    )


@given(trace_cases())
def test_dp_transfer_time_is_the_duration_of_its_events(case: TraceCase) -> None:
    """Events of the DP stream do not overlap, so their seconds add up; those of the compute stream may coincide."""
    trace, trace_table = case.trace, case.trace_table
    transfer_time = axis_overlap(case).transfer_time[:, DENSE_AXIS_NAMES.index("dp")]
    for rank_class, rank in enumerate(trace_table.ranks.tolist()):
        is_rank_event = (trace.rank == rank) & (
            trace_table.tasks.category[trace_table.entries_of(slice(None))] == EXPOSED_CATEGORIES[mesh.DATA].index
        )
        dp_stream_seconds = (trace.end - trace.start)[is_rank_event & (trace.stream == DATA)].sum()
        all_streams_seconds = (trace.end - trace.start)[is_rank_event].sum()
        assert dp_stream_seconds - 1e-9 <= transfer_time[rank_class] <= all_streams_seconds + 1e-9


@given(scenarios())
@examples(12)
def test_overlap_kinds_fit_into_the_step_of_any_scenario(scenario: Scenario) -> None:
    result = simulate(scenario)
    trace_table = build_trace_table(result.trace, result.program, scenario.steps)
    check_overlap(compute_overlap(trace_table, result.cost.time_segment, result.breakdown), result.step_time)


def test_ddp_hides_communication_overlapped_by_backward() -> None:
    """Backward from 2 to 6; the reduction from 4 to 7, which the optimizer waits for."""
    case = TraceCase(
        (
            SpanEvent(FORWARD, 0, 2),
            SpanEvent(BACKWARD, 2, 6),
            SpanEvent(collective_task("dp"), 4, 7, 0, DATA),
            SpanEvent(OPTIMIZER_STEP, 7, 8, 2),
        )
    )
    assert axis_seconds(case, "dp") == {"no_overlap": 5.0, "hidden": 2.0, "exposed": 1.0}
    assert axis_seconds(case, "tp") == {"no_overlap": 7.0, "neither": 1.0}


def test_transfers_during_idle_time_are_neither_hidden_nor_exposed() -> None:
    """Idle from 1 to 4 for a message transferred from 3 to 4; a collective is transferred from 0.5 to 2."""
    case = TraceCase(
        (
            SpanEvent(FORWARD, 0, 1),
            SpanEvent(collective_task("dp"), 0.5, 2, 0, DATA),
            SpanEvent(receive_task(), 3, 4, -1, RECEIVE),
            SpanEvent(BACKWARD, 4, 6, 2),
        ),
        has_pipeline=True,
    )
    assert axis_seconds(case, "dp") == {"no_overlap": 2.5, "hidden": 0.5, "during_idle": 1.0, "neither": 2.0}
    assert axis_seconds(case, "pp") == {"no_overlap": 3.0, "exposed": 1.0, "neither": 2.0}


def test_concurrent_messages_count_once() -> None:
    """One is sent from 0 to 2, one is received from 1 to 3, both during a segment of 4 s."""
    case = TraceCase(
        (
            SpanEvent(FORWARD, 0, 4),
            SpanEvent(send_task(), 0, 2, -1, SEND),
            SpanEvent(receive_task(), 1, 3, -1, RECEIVE),
        ),
        has_pipeline=True,
    )
    assert axis_seconds(case, "pp") == {"no_overlap": 1.0, "hidden": 3.0}


def test_a_comm_overlap_operation_is_hidden_except_for_its_exposed_seconds() -> None:
    """A kernel of 5 s overlaps 3 s of communication, of which 1 s is exposed; then 2 s without overlap."""
    overlap_operation = Beside(comm_op("tp"), KERNEL, 3)
    layer = Segment(
        "layer", (Operation(overlap_operation, WorkType.FORWARD), Operation(comm_op("tp"), WorkType.FORWARD))
    )
    timing = build_timing((6.0, 1.0), (2.0, 2.0))
    overlapped_timing = type(timing)(
        timing.durations,
        timing.offsets,
        timing.exposed_comm,
        timing.overlap_delay,
        timing.launch_stalls,
        {0: OverlapModel(overlap_operation, 3.0, 0.0)},
        timing.provenance,
        timing.bottleneck,
        timing.error,
        timing.in_situ_slowdown,
    )
    case = TraceCase(
        (SpanEvent(ComputeTask(layer), 0, 8), SpanEvent(ComputeTask(layer), 8, 16, 0)),
        timings={layer: overlapped_timing},
    )
    assert axis_seconds(case, "tp") == {"no_overlap": 6.0, "hidden": 4.0, "exposed": 6.0}


def test_waiting_for_a_group_member_is_no_transfer_time() -> None:
    """A segment waits 3 s for other ranks; a collective starts when its last member arrives."""
    case = TraceCase(
        (SpanEvent(FORWARD, 0, 5, waited=3.0), SpanEvent(collective_task("dp"), 7, 8, 0, DATA)),
        timings={FORWARD.segment: build_timing((2.0, 0.0))},
    )
    assert axis_seconds(case, "dp") == {"no_overlap": 5.0, "exposed": 1.0, "neither": 2.0}


def test_a_stage_is_the_mean_of_its_ranks() -> None:
    """Three ranks of a class that computes for 1 s, one of a class that computes for 5 s."""
    case = TraceCase((SpanEvent(FORWARD, 0, 1), SpanEvent(FORWARD, 0, 5, rank=1)), (0, 1, 0, 0))
    mean = axis_overlap(case).group_mean(np.array([0, 0]), case.trace_table.weights)
    assert mean.no_overlap[0].tolist() == [2.0] * len(COMM_AXES)


def test_adjacent_intervals_of_one_key_are_merged() -> None:
    intervals = Intervals(np.array([1, 0, 0, 0]), np.array([2.0, 0, 1, 5]), np.array([3.0, 1, 2, 5]))
    merged = intervals.merge_overlapping()
    assert (merged.key.tolist(), merged.start.tolist(), merged.end.tolist()) == (
        [0, 0, 1],
        [0.0, 5.0, 2.0],
        [2.0, 5.0, 3.0],
    )


def test_intersections_are_of_equal_keys() -> None:
    left = Intervals(np.array([0, 1]), np.array([0.0, 0.0]), np.array([4.0, 9.0]))
    right = Intervals(np.array([0, 0, 2]), np.array([1.0, 3.0, 0.0]), np.array([2.0, 6.0, 9.0]))
    left_indices, right_indices, common = intersect(left, right)
    assert (left_indices.tolist(), right_indices.tolist(), common.seconds.tolist()) == ([0, 0], [0, 1], [1.0, 1.0])
