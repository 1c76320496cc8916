"""Stretches of kernels and exchanges with collectives that begin and end beside them."""

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
from clustersim.engine.scalar.fluid_action import FluidAction, ProgressCurves, progress_curves

Changes = Sequence[tuple[float, int]]
"""(when, at which pace from then on)."""


def of(*operations: tuple[float, float], slowdown: float) -> ProgressCurves:
    """Paces of operations, (kernel seconds, other seconds) each, of which a collective slows the kernels alike."""
    return slowed(operations, np.full((1, len(operations)), slowdown))


def slowed(operations: Sequence[tuple[float, float]], slowing: FloatArray) -> ProgressCurves:
    """The same beside collectives of several kinds: [kinds, operations]."""
    kernels, rest = np.array(operations, dtype=float).reshape(-1, 2).T
    return progress_curves(kernels, rest, slowing)


def end(own: ProgressCurves, changes: Changes = (), *, beside: int = 0, last: bool = False) -> float:
    """When a stretch that begins at 0 is done.

    last: a change is processed after all else that happens in its instant; by
    default before.
    """
    environment, ends = SimEnvironment(), []
    stretches: list[FluidAction] = []

    def begin() -> None:
        stretches.append(FluidAction(environment, own, beside))
        stretches[0].done.callbacks.append(lambda _: ends.append(environment.now))

    def plan() -> None:
        for when, becomes in changes:
            environment.timeout(when).callbacks.append(partial(change, becomes))

    def change(becomes: int, _: simpy.Event) -> None:
        stretches[0].set_level(becomes)

    for item in (begin, plan) if last else (plan, begin):
        item()
    environment.run_all()
    (ended,) = ends
    return float(ended)


def two_rates(kernel: float, since: float, until: float, slowdown: float) -> float:
    """End of a kernel beside a collective from `since` to `until`.

    At pace 1 until a; then at 1/(1 + φ): of k - a left it needs (k - a)(1 + φ) s, if the collective lasts that long;
    else (b - a)/(1 + φ) are done by b, and b + k - a - (b - a)/(1 + φ) = k + (b - a) φ/(1 + φ) is the end.
    """
    if kernel <= since:
        return kernel
    slow = since + (kernel - since) * (1 + slowdown)
    return slow if slow <= until else kernel + (until - since) * slowdown / (1 + slowdown)


SPANS = [(1.0, 2.0), (0.0, 1.0), (0.0, 100.0), (1.0, 100.0), (3.0, 4.0), (0.0, 8.0), (2.0, 6.0), (4.0, 5.0), (9.0, 9.5)]


@pytest.mark.parametrize(("since", "until"), SPANS)
@pytest.mark.parametrize("slowdown", [0.25, 1.0])
@pytest.mark.parametrize("last", [False, True])
def test_a_kernel_beside_a_collective(since: float, until: float, slowdown: float, last: bool) -> None:
    """Of 4 s. The collective begins or ends inside, with it, at its very end, or after it."""
    own = of((4.0, 0.0), slowdown=slowdown)
    assert end(own, [(since, True), (until, False)], last=last) == pytest.approx(two_rates(4.0, since, until, slowdown))


def test_a_stretch_that_begins_beside_a_collective() -> None:
    """At half pace until 2, 1 of 4 s is done, and 3 are left."""
    own = of((4.0, 0.0), slowdown=1.0)
    assert end(own, beside=True) == 8.0
    assert end(own, [(2.0, False)], beside=True) == 5.0
    assert end(own, [(0.0, False)], beside=True) == 4.0, "ends in the instant in which the stretch begins"


@pytest.mark.parametrize("last", [False, True])
def test_a_collective_that_begins_when_the_stretch_ends_leaves_it(last: bool) -> None:
    """Whichever of the two the clock processes first."""
    own = of((1.0, 0.0), (3.0, 0.0), slowdown=1.0)
    assert end(own, [(4.0, True)], last=last) == 4.0
    assert end(own, [(8.0, False)], beside=True, last=last) == 8.0
    assert end(own, [(4.0, True), (4.0, False), (4.0, True)], last=last) == 4.0


def test_several_collectives_add_up() -> None:
    """Half a second each for [1, 2] and [3, 4], and one for [4, 6]: the two adjacent ones act as one."""
    own = of((10.0, 0.0), slowdown=1.0)
    changes = [(1.0, True), (2.0, False), (3.0, True), (4.0, False), (4.0, True), (6.0, False)]
    assert end(own, changes) == 12.0


def test_the_timer_of_an_earlier_pace_ends_nothing() -> None:
    """Due at 2 alone, at 3 since a collective came at 1, at 2.5 since it left at 2."""
    own = of((2.0, 0.0), slowdown=1.0)
    assert end(own, [(1.0, True)]) == 3.0
    assert end(own, [(1.0, True), (2.0, False)], last=True) == 2.5


def test_exchanges_inside_are_not_slowed() -> None:
    """Kernel, exchange and kernel of 2 s each, beside a collective from 1 to 5.

    The first ends at 3, the exchange at 5 as if nobody were there, the last at 7.
    """
    own = of((2.0, 0.0), (0.0, 2.0), (2.0, 0.0), slowdown=1.0)
    assert end(own, [(1.0, True), (5.0, False)]) == 7.0
    assert end(own, [(2.0, True), (4.0, False)]) == 6.0, "only the exchange is beside it"
    assert end(own, [(3.0, True)]) == 8.0


def test_of_a_kernel_and_an_exchange_side_by_side_the_kernel_s_part_is_slowed() -> None:
    """Of 4 s three are the kernel's: beside a collective all the way they are 6, so half of them take 3 + 0.5."""
    own = of((3.0, 1.0), slowdown=1.0)
    assert end(own, beside=True) == 7.0
    assert end(own, [(2.0, True)]) == 2.0 + 3.5


def test_operations_of_no_seconds_are_passed_over() -> None:
    own = of((0.0, 0.0), (2.0, 0.0), (0.0, 0.0), (0.0, 1.0), (0.0, 0.0), slowdown=1.0)
    assert end(own, [(0.0, True), (2.0, False)]) == 4.0
    assert end(own, [(2.0, True)]) == 3.0
    assert end(of(slowdown=1.0), [(0.0, True)]) == 0.0


@pytest.mark.parametrize(("operations", "slowdown"), [([(3.0, 1.0)], 0.0), ([(0.0, 2.0), (0.0, 1.0)], 1.0)])
def test_where_nothing_is_slowed_the_paces_are_one(operations: list[tuple[float, float]], slowdown: float) -> None:
    own = of(*operations, slowdown=slowdown)
    assert own.is_unaffected
    assert own.slice_operations(0, 1).is_unaffected
    assert end(own, [(0.5, True)]) == sum(sum(operation) for operation in operations)


def test_some_operations_of_a_stretch_have_its_paces() -> None:
    own = of((2.0, 0.0), (1.0, 3.0), slowdown=0.5)
    assert own.slice_operations(0, 1).end_times == ([0.0, 2.0], [0.0, 3.0])
    assert own.slice_operations(1, 2).end_times == ([0.0, 4.0], [0.0, 4.5])
    assert own.slice_operations(0, 2).end_times == own.end_times
    assert not own.slice_operations(1, 2).is_unaffected


def test_whether_a_stretch_was_disturbed() -> None:
    environment = SimEnvironment()
    own = of((4.0, 0.0), slowdown=1.0)
    alone, beside, changed = (FluidAction(environment, own, item) for item in (False, True, False))
    changed.set_level(False)
    assert (alone.was_slowed, beside.was_slowed, changed.was_slowed) == (False, True, False)
    changed.set_level(True)
    changed.set_level(False)
    assert changed.was_slowed
    environment.run_all()
    alone.set_level(True)
    assert not alone.was_slowed, "it was over"


@st.composite
def _changes(draw: st.DrawFn) -> list[tuple[float, int]]:
    times = sorted(draw(st.lists(st.integers(0, 24), max_size=6)))
    return [(time / 2, draw(st.integers(0, 2))) for time in times]


def walked(operations: Sequence[tuple[float, float]], changes: Changes, slowing: FloatArray) -> float:
    """The end by walking through operations and changes, with the part of the operation under way that is done."""
    now, beside, waiting = 0.0, 0, list(changes)
    for place, (kernel, rest) in enumerate(operations):
        done = 0.0
        while done < 1.0:
            while waiting and waiting[0][0] <= now:
                beside = waiting.pop(0)[1]
            whole = kernel * (1 + (slowing[beside - 1, place] if beside else 0.0)) + rest
            due = now + whole * (1 - done)
            if not waiting or due <= waiting[0][0]:
                now, done = due, 1.0
            else:
                done, now = done + (waiting[0][0] - now) / whole, waiting[0][0]
    return now


PIECES = st.tuples(st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.0, 0.5, 2.0]))


@given(st.lists(PIECES, max_size=5), _changes(), st.data(), st.booleans())
def test_any_stretch_is_what_walking_through_it_gives(
    operations: list[tuple[float, float]], changes: list[tuple[float, int]], data: st.DataObject, last: bool
) -> None:
    """Beside collectives of two kinds, which slow every kernel by a part of its own."""
    parts = hnp.arrays(float, (2, len(operations)), elements=st.sampled_from([0.0, 0.25, 1.0]))
    slowing = data.draw(parts)
    expected = walked(operations, changes, slowing)
    assert end(slowed(operations, slowing), changes, last=last) == pytest.approx(expected, rel=1e-12)


@given(st.lists(PIECES, min_size=1, max_size=5), _changes(), st.data(), st.integers(0, 2))
def test_operations_of_a_stretch_end_where_walking_through_them_ends(
    operations: list[tuple[float, float]], changes: list[tuple[float, int]], data: st.DataObject, beside: int
) -> None:
    """Each as if it were the last one; all of it begins at 2 s."""
    slowing = data.draw(hnp.arrays(float, (2, len(operations)), elements=st.sampled_from([0.0, 0.25, 1.0])))
    own, environment = slowed(operations, slowing), SimEnvironment(2.0)
    stretch = FluidAction(environment, own, beside)
    for when, becomes in changes:
        environment.event_at(2.0 + when).callbacks.append(lambda _, becomes=becomes: stretch.set_level(becomes))
    environment.run_all()
    every = [(0.0, beside), *changes]
    expected = [walked(operations[:count], every, slowing) for count in range(len(operations) + 1)]
    reached = stretch.end_times().operation_times(np.array([2.0, 7.0]), 4, 4 + len(operations))
    assert reached[0] - 2.0 == pytest.approx(expected, rel=1e-12)
    assert reached[1] - 7.0 == pytest.approx(expected, rel=1e-12)
