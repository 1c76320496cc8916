"""Segment actions: segments of kernels and communication with collectives that begin and end during them."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clustersim.common.arrays import FloatArray
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.scalar.segment_action import ProgressCurves, SegmentAction, progress_curves

Changes = Sequence[tuple[float, int]]
"""(time, interference level from then on)."""


def equal_slowdown(*operations: tuple[float, float], slowdown: float) -> ProgressCurves:
    """Progress curves of operations, (kernel seconds, other seconds) each, whose kernels a collective slows equally."""
    return slowed_curves(operations, np.full((1, len(operations)), slowdown))


def slowed_curves(operations: Sequence[tuple[float, float]], slowdown: FloatArray) -> ProgressCurves:
    """The same for several kinds of collectives: [kinds, operations]."""
    kernels, fixed = np.array(operations, dtype=float).reshape(-1, 2).T
    return progress_curves(kernels, fixed, slowdown)


def action_end(curves: ProgressCurves, changes: Changes = (), *, initial_level: int = 0, last: bool = False) -> float:
    """End of an action that begins at 0.

    last: a change is processed after all other events of its instant; by default before.
    """
    environment, ends = SimEnvironment(), []
    actions: list[SegmentAction] = []

    def start_action() -> None:
        actions.append(SegmentAction(environment, curves, initial_level))
        actions[0].done.callbacks.append(lambda _: ends.append(environment.now))

    def schedule_changes() -> None:
        for when, level in changes:
            environment.timeout(when).callbacks.append(partial(change, level))

    def change(level: int, _: simpy.Event) -> None:
        actions[0].set_level(level)

    for step in (start_action, schedule_changes) if last else (schedule_changes, start_action):
        step()
    environment.run()
    (ended,) = ends
    return float(ended)


def closed_form_end(kernel: float, since: float, until: float, slowdown: float) -> float:
    """End of a kernel that overlaps a collective from `since` to `until`.

    At rate 1 until a; then at 1/(1 + φ): of k - a left it needs (k - a)(1 + φ) s, if the collective lasts that
    long; else (b - a)/(1 + φ) are done by b, and b + k - a - (b - a)/(1 + φ) = k + (b - a) φ/(1 + φ) is the end.
    """
    if kernel <= since:
        return kernel
    slow = since + (kernel - since) * (1 + slowdown)
    return slow if slow <= until else kernel + (until - since) * slowdown / (1 + slowdown)


COLLECTIVE_SPANS = [
    (1.0, 2.0),
    (0.0, 1.0),
    (0.0, 100.0),
    (1.0, 100.0),
    (3.0, 4.0),
    (0.0, 8.0),
    (2.0, 6.0),
    (4.0, 5.0),
    (9.0, 9.5),
]


@pytest.mark.parametrize(("since", "until"), COLLECTIVE_SPANS)
@pytest.mark.parametrize("slowdown", [0.25, 1.0])
@pytest.mark.parametrize("last", [False, True])
def test_a_kernel_overlapping_a_collective(since: float, until: float, slowdown: float, last: bool) -> None:
    """Of 4 s. The collective begins or ends inside, with it, at its very end, or after it."""
    curves = equal_slowdown((4.0, 0.0), slowdown=slowdown)
    assert action_end(curves, [(since, True), (until, False)], last=last) == pytest.approx(
        closed_form_end(4.0, since, until, slowdown)
    )


@pytest.mark.parametrize("last", [False, True])
def test_a_collective_starting_at_the_end_has_no_effect(last: bool) -> None:
    """Whichever of the two events is processed first."""
    curves = equal_slowdown((1.0, 0.0), (3.0, 0.0), slowdown=1.0)
    assert action_end(curves, [(4.0, True)], last=last) == 4.0
    assert action_end(curves, [(8.0, False)], initial_level=True, last=last) == 8.0
    assert action_end(curves, [(4.0, True), (4.0, False), (4.0, True)], last=last) == 4.0


def test_comm_ops_inside_a_segment_are_not_slowed() -> None:
    """Kernel, communication and kernel of 2 s each, overlapping a collective from 1 to 5.

    The first ends at 3, the communication at 5 without slowdown, the last at 7.
    """
    curves = equal_slowdown((2.0, 0.0), (0.0, 2.0), (2.0, 0.0), slowdown=1.0)
    assert action_end(curves, [(1.0, True), (5.0, False)]) == 7.0
    assert action_end(curves, [(2.0, True), (4.0, False)]) == 6.0, "only the exchange is beside it"
    assert action_end(curves, [(3.0, True)]) == 8.0


def test_only_the_kernel_share_of_an_overlap_is_slowed() -> None:
    """Of 4 s three are the kernel's: fully overlapped they are 6, so half of them take 3 + 0.5."""
    curves = equal_slowdown((3.0, 1.0), slowdown=1.0)
    assert action_end(curves, initial_level=True) == 7.0
    assert action_end(curves, [(2.0, True)]) == 2.0 + 3.5


def test_zero_length_operations_are_skipped() -> None:
    curves = equal_slowdown((0.0, 0.0), (2.0, 0.0), (0.0, 0.0), (0.0, 1.0), (0.0, 0.0), slowdown=1.0)
    assert action_end(curves, [(0.0, True), (2.0, False)]) == 4.0
    assert action_end(curves, [(2.0, True)]) == 3.0
    assert action_end(equal_slowdown(slowdown=1.0), [(0.0, True)]) == 0.0


@pytest.mark.parametrize(("operations", "slowdown"), [([(3.0, 1.0)], 0.0), ([(0.0, 2.0), (0.0, 1.0)], 1.0)])
def test_without_slowdown_all_curves_are_equal(operations: list[tuple[float, float]], slowdown: float) -> None:
    curves = equal_slowdown(*operations, slowdown=slowdown)
    assert curves.is_unaffected
    assert curves.slice_operations(0, 1).is_unaffected
    assert action_end(curves, [(0.5, True)]) == sum(sum(operation) for operation in operations)


def test_a_slice_of_operations_keeps_the_curves() -> None:
    curves = equal_slowdown((2.0, 0.0), (1.0, 3.0), slowdown=0.5)
    assert curves.slice_operations(0, 1).end_times == ([0.0, 2.0], [0.0, 3.0])
    assert curves.slice_operations(1, 2).end_times == ([0.0, 4.0], [0.0, 4.5])
    assert curves.slice_operations(0, 2).end_times == curves.end_times
    assert not curves.slice_operations(1, 2).is_unaffected


def test_overlap_of_an_action_is_recorded() -> None:
    environment = SimEnvironment()
    curves = equal_slowdown((4.0, 0.0), slowdown=1.0)
    unaffected, overlapped, changed = (SegmentAction(environment, curves, level) for level in (False, True, False))
    changed.set_level(False)
    assert (unaffected.was_slowed, overlapped.was_slowed, changed.was_slowed) == (False, True, False)
    changed.set_level(True)
    changed.set_level(False)
    assert changed.was_slowed
    environment.run()
    unaffected.set_level(True)
    assert not unaffected.was_slowed, "it was over"


@st.composite
def _changes(draw: st.DrawFn) -> list[tuple[float, int]]:
    times = sorted(draw(st.lists(st.integers(0, 24), max_size=6)))
    return [(time / 2, draw(st.integers(0, 2))) for time in times]


def reference_end(operations: Sequence[tuple[float, float]], changes: Changes, slowdown: FloatArray) -> float:
    """The end by stepping through operations and changes, tracking the completed fraction of the current operation."""
    now, level, pending = 0.0, 0, list(changes)
    for index, (kernel, fixed) in enumerate(operations):
        done_fraction = 0.0
        while done_fraction < 1.0:
            while pending and pending[0][0] <= now:
                level = pending.pop(0)[1]
            duration = kernel * (1 + (slowdown[level - 1, index] if level else 0.0)) + fixed
            due = now + duration * (1 - done_fraction)
            if not pending or due <= pending[0][0]:
                now, done_fraction = due, 1.0
            else:
                done_fraction, now = done_fraction + (pending[0][0] - now) / duration, pending[0][0]
    return now


OPERATIONS = st.tuples(st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.0, 0.5, 2.0]))


@given(st.lists(OPERATIONS, max_size=5), _changes(), st.data(), st.booleans())
def test_an_action_equals_the_step_by_step_reference(
    operations: list[tuple[float, float]], changes: list[tuple[float, int]], data: st.DataObject, last: bool
) -> None:
    """During collectives of two kinds, which slow every kernel by its own fraction."""
    slowdowns = hnp.arrays(float, (2, len(operations)), elements=st.sampled_from([0.0, 0.25, 1.0]))
    slowdown = data.draw(slowdowns)
    expected = reference_end(operations, changes, slowdown)
    assert action_end(slowed_curves(operations, slowdown), changes, last=last) == pytest.approx(expected, rel=1e-12)


@given(st.lists(OPERATIONS, min_size=1, max_size=5), _changes(), st.data(), st.integers(0, 2))
def test_operation_ends_equal_the_step_by_step_reference(
    operations: list[tuple[float, float]], changes: list[tuple[float, int]], data: st.DataObject, initial_level: int
) -> None:
    """Each as if it were the last one; all of it begins at 2 s."""
    slowdown = data.draw(hnp.arrays(float, (2, len(operations)), elements=st.sampled_from([0.0, 0.25, 1.0])))
    curves, environment = slowed_curves(operations, slowdown), SimEnvironment(2.0)
    action = SegmentAction(environment, curves, initial_level)
    for when, level in changes:
        environment.event_at(2.0 + when).callbacks.append(lambda _, level=level: action.set_level(level))
    environment.run()
    all_changes = [(0.0, initial_level), *changes]
    expected = [reference_end(operations[:count], all_changes, slowdown) for count in range(len(operations) + 1)]
    end_times = action.end_times().operation_times(np.array([2.0, 7.0]), 4, 4 + len(operations))
    assert end_times[0] - 2.0 == pytest.approx(expected, rel=1e-12)
    assert end_times[1] - 7.0 == pytest.approx(expected, rel=1e-12)
