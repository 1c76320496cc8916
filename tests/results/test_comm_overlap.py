"""What hides behind what, by hand and against the breakdown."""

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
from tests.results.random_trace_cases import cases
from tests.results.trace_cases import (
    BACKWARD,
    FORWARD,
    KERNEL,
    STEP,
    Case,
    Row,
    collective,
    exchange,
    receive,
    send,
    timing,
)
from tests.strategies import scenarios

DATA, SEND, RECEIVE = Stream.DP, Stream.SEND_NEXT, Stream.RECEIVE
KINDS = ("alone", "hidden", "exposed", "beside")


def folded(case: Case) -> AxisOverlap:
    return compute_overlap(case.joined, case.timing_of, compute_breakdown(case.joined, case.timing_of))


def of_axis(case: Case, axis: str, row: int = 0) -> dict[str, float]:
    found = folded(case)
    values = {kind: float(getattr(found, kind)[row, DENSE_AXIS_NAMES.index(axis)]) for kind in KINDS}
    values["neither"] = found.step_time - sum(values.values())
    return {kind: seconds for kind, seconds in values.items() if abs(seconds) > 1e-12}


def check(found: AxisOverlap, step: float) -> None:
    """Nothing is negative and the kinds are no more than the step."""
    kinds = np.array([getattr(found, kind) for kind in KINDS])
    assert (kinds >= -1e-9 * (1 + step)).all()
    assert (kinds.sum(axis=0) <= step * (1 + 1e-9) + 1e-12).all()
    assert found.step_time == pytest.approx(step)


@given(cases())
def test_kinds_fit_into_the_step_and_exposed_is_the_breakdowns(case: Case) -> None:
    found, known = folded(case), compute_breakdown(case.joined, case.timing_of)
    check(found, case.trace.makespan)
    assert found.exposed == pytest.approx(known.seconds[:, [part.index for part in EXPOSED_CATEGORIES.values()]])


@given(cases())
def test_data_moves_as_long_as_its_rows_last(case: Case) -> None:
    """The data stream's rows follow each other, so their seconds add up; those of the compute stream may coincide."""
    trace, rows = case.trace, case.joined
    moving = folded(case).transfer_time[:, DENSE_AXIS_NAMES.index("dp")]
    for place, rank in enumerate(rows.ranks.tolist()):
        of_rank = (trace.rank == rank) & (rows.tasks.category[rows.entry] == EXPOSED_CATEGORIES[mesh.DATA].index)
        data = (trace.end - trace.start)[of_rank & (trace.stream == DATA)].sum()
        every = (trace.end - trace.start)[of_rank].sum()
        assert data - 1e-9 <= moving[place] <= every + 1e-9


@given(scenarios())
@examples(12)
def test_kinds_fit_into_the_step_in_training(scenario: Scenario) -> None:
    result = simulate(scenario)
    rows = build_trace_table(result.trace, result.program, scenario.steps)
    check(compute_overlap(rows, result.cost.time_segment, result.breakdown), result.step_time)


def test_ddp_hides_what_is_beside_backward() -> None:
    """Backward from 2 to 6; the reduction from 4 to 7, which the optimizer waits for."""
    case = Case((Row(FORWARD, 0, 2), Row(BACKWARD, 2, 6), Row(collective("dp"), 4, 7, 0, DATA), Row(STEP, 7, 8, 2)))
    assert of_axis(case, "dp") == {"alone": 5.0, "hidden": 2.0, "exposed": 1.0}
    assert of_axis(case, "tp") == {"alone": 7.0, "neither": 1.0}


def test_what_moves_while_something_else_is_awaited_is_neither_hidden_nor_exposed() -> None:
    """Idle from 1 to 4 for a message that moves from 3 to 4; a collective moves from 0.5 to 2."""
    case = Case(
        (
            Row(FORWARD, 0, 1), Row(collective("dp"), 0.5, 2, 0, DATA), Row(receive(), 3, 4, -1, RECEIVE),
            Row(BACKWARD, 4, 6, 2),
        ),
        staged=True,
    )  # fmt: skip
    assert of_axis(case, "dp") == {"alone": 2.5, "hidden": 0.5, "beside": 1.0, "neither": 2.0}
    assert of_axis(case, "pp") == {"alone": 3.0, "exposed": 1.0, "neither": 2.0}


def test_two_messages_at_once_count_once() -> None:
    """One goes from 0 to 2, one comes from 1 to 3, beside a block of 4 s."""
    case = Case((Row(FORWARD, 0, 4), Row(send(), 0, 2, -1, SEND), Row(receive(), 1, 3, -1, RECEIVE)), staged=True)
    assert of_axis(case, "pp") == {"alone": 1.0, "hidden": 3.0}


def test_an_exchange_beside_a_kernel_of_its_operation_hides_but_for_what_is_exposed() -> None:
    """5 s of a kernel beside 3 s of an exchange, of which 1 s is exposed; then 2 s of an exchange alone."""
    both = Beside(exchange("tp"), KERNEL, 3)
    layer = Segment("layer", (Operation(both, WorkType.FORWARD), Operation(exchange("tp"), WorkType.FORWARD)))
    own = timing((6.0, 1.0), (2.0, 2.0))
    known = type(own)(
        own.durations, own.offsets, own.exposed_comm, own.overlap_delay, own.launch_stalls, {0: OverlapModel(both, 3.0, 0.0)},
        own.provenance, own.bottleneck, own.error, own.in_situ_slowdown,
    )  # fmt: skip
    case = Case((Row(ComputeTask(layer), 0, 8), Row(ComputeTask(layer), 8, 16, 0)), timings={layer: known})
    assert of_axis(case, "tp") == {"alone": 6.0, "hidden": 4.0, "exposed": 6.0}


def test_waiting_for_a_member_is_not_moving() -> None:
    """A block waits 3 s for others; a collective begins when its last member has come."""
    case = Case(
        (Row(FORWARD, 0, 5, waited=3.0), Row(collective("dp"), 7, 8, 0, DATA)),
        timings={FORWARD.segment: timing((2.0, 0.0))},
    )
    assert of_axis(case, "dp") == {"alone": 5.0, "exposed": 1.0, "neither": 2.0}


def test_stages_are_means_of_their_ranks() -> None:
    """Three ranks of a class that computes for 1 s, one of a class that computes for 5 s."""
    case = Case((Row(FORWARD, 0, 1), Row(FORWARD, 0, 5, rank=1)), (0, 1, 0, 0))
    mean = folded(case).group_mean(np.array([0, 0]), case.joined.weights)
    assert mean.no_overlap[0].tolist() == [2.0] * len(COMM_AXES)


def test_intervals_that_touch_are_one_and_keys_stay_apart() -> None:
    some = Intervals(np.array([1, 0, 0, 0]), np.array([2.0, 0, 1, 5]), np.array([3.0, 1, 2, 5]))
    one = some.merge_overlapping()
    assert (one.key.tolist(), one.start.tolist(), one.end.tolist()) == ([0, 0, 1], [0.0, 5.0, 2.0], [2.0, 5.0, 3.0])


def test_common_time_is_that_of_equal_keys() -> None:
    some = Intervals(np.array([0, 1]), np.array([0.0, 0.0]), np.array([4.0, 9.0]))
    others = Intervals(np.array([0, 0, 2]), np.array([1.0, 3.0, 0.0]), np.array([2.0, 6.0, 9.0]))
    one, other, both = intersect(some, others)
    assert (one.tolist(), other.tolist(), both.seconds.tolist()) == ([0, 0], [0, 1], [1.0, 1.0])
