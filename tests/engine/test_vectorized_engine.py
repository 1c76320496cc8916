"""Ranks of a kind run as arrays: what can be, what each of them waits for, and what is left to a clock.

That cohorts give what ranks give one by one is a law (tests/laws/test_cohorts.py); here it is known what they give.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from clustersim.cost.device_models import DeviceModel, DeviceModels, ThrottledKernels
from clustersim.cost.interference import Interference, KernelClass
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import DeadlockError, simulate_program, simulate_scalar
from clustersim.engine.vectorized.engine import VectorizedEngine, can_vectorize
from clustersim.engine.vectorized.segment_durations import DRAW_SIZE
from clustersim.program.program import Program
from clustersim.program.task import CollectiveTask, CollectiveType, Stream
from clustersim.symmetry.refinement import singleton_classes
from clustersim.trace.trace import Trace
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import (
    NEXT,
    Step,
    cause_of,
    compute,
    exchange,
    meet,
    program,
    receive,
    replicated,
    row_of,
    send,
    waits,
)

HALF = 0.5


def kinds(steps: Sequence[Sequence[Step]], replicas: int, groups: Mapping[str, list[list[int]]]) -> Program:
    """A program for every kind of rank. Rank = replica * kinds + kind."""
    one = program(steps, groups)
    return Program(one.programs, np.tile(np.arange(len(steps)), replicas), one.groups)


def cost(made: Program, speeds: Mapping[int, float] | None = None, interference: float = 0.0) -> SegmentCost:
    """Unit costs; some ranks at other speeds."""
    unit, of = UnitCost(made), np.zeros(made.world_size, dtype=np.int64)
    machines = [DeviceModel(unit, Interference.uniform(interference))]
    for rank, speed in (speeds or {}).items():
        of[rank] = len(machines)
        machines.append(DeviceModel(ThrottledKernels(unit, speed), Interference.uniform(interference)))
    return SegmentCost(made, DeviceModels(tuple(machines), of), unit)


def ran(made: Program, blocks: SegmentCost) -> Trace:
    assert can_vectorize(made)
    trace = VectorizedEngine(made, singleton_classes(made), blocks, None).simulate_all()
    assert trace is not None
    return trace


def ends(trace: Trace, task: int) -> list[float]:
    """Of one task on all ranks."""
    ranks = trace.simulated_ranks.tolist()
    return [float(trace.end[row_of(trace, rank, task)]) for rank in ranks]


def lost(trace: Trace, rank: int, task: int) -> tuple[float, float]:
    """Seconds waited and slowed inside a block."""
    row = row_of(trace, rank, task)
    return float(trace.waited[row]), float(trace.slowed[row])


def test_a_collective_starts_when_its_slowest_member_has_come_and_says_who_it_was() -> None:
    """At speeds 1, 1/2, 1, 1/4 a kernel of 1 s takes 1, 2, 1, 4 s; pairs (0, 1) and (2, 3) reduce for 3 s."""
    made = replicated([compute(1.0), meet(3.0, after=(0,))], 4, {"dp": [[0, 1], [2, 3]]})
    trace = ran(made, cost(made, {1: 0.5, 3: 0.25}))
    assert ends(trace, 1) == [5.0, 5.0, 7.0, 7.0]
    assert waits(trace, 2, 1) == (0.0, 1.0, 4.0, 7.0)
    assert [cause_of(trace, rank, 1) for rank in range(4)] == [(1, 0), (1, 0), (3, 0), (3, 0)]


def test_a_slow_rank_is_waited_for_inside_blocks() -> None:
    """Kernels of 1 s around an exchange of 2 s: the partner of a GPU at half speed waits 1 s, and ends 1 s earlier."""
    made = replicated([compute(1.0, exchange("tp", 2.0), 1.0)], 4, {"tp": [[0, 2], [1, 3]]})
    trace = ran(made, cost(made, {2: HALF}))
    assert ends(trace, 0) == [5.0, 4.0, 6.0, 4.0]
    assert [lost(trace, rank, 0) for rank in range(4)] == [(1.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]


def test_collectives_join_kinds() -> None:
    """Kinds of 1 and 5 s in each of two replicas, one of which has a GPU at half speed: they meet at 5 and at 10."""
    steps = [[compute(seconds), meet(1.0, role="model", after=(0,))] for seconds in (1.0, 5.0)]
    made = kinds(steps, 2, {"model": [[0, 1], [2, 3]]})
    trace = ran(made, cost(made, {3: HALF}))
    assert ends(trace, 1) == [6.0, 6.0, 11.0, 11.0]
    assert cause_of(trace, 2, 1) == (3, 0)


def test_messages_go_to_the_rank_s_own_receiver() -> None:
    """Senders 0, 2 and 4 at speeds 1, 1/2, 1/4; receivers crosswise."""
    made = kinds([[compute(1.0), send(2.0, after=(0,))], [receive(2.0), compute(1.0, after=(0,))]],
                 3, {NEXT: [[0, 5], [2, 1], [4, 3]]})  # fmt: skip
    trace = ran(made, cost(made, {2: 0.5, 4: 0.25}))
    assert [waits(trace, rank, 0)[2:] for rank in (5, 1, 3)] == [(1.0, 3.0), (2.0, 4.0), (4.0, 6.0)]
    assert [waits(trace, rank, 1)[-1] for rank in (5, 1, 3)] == [4.0, 5.0, 7.0]
    assert cause_of(trace, 3, 0) == (4, 0)


def test_a_collective_slows_blocks_while_it_moves_and_not_while_it_waits() -> None:
    """Two ranks reduce for 2 s beside a block of 4 s; the second comes 1 s later, because it computes 1 s before.

    With φ = 1: data move from 1 to 3, and both lose 1 s.
    """
    first = [compute(0.0), compute(4.0), meet(2.0, after=(0,))]
    made = replicated(first, 2, {"dp": [[0, 1]]})
    trace = ran(made, cost(made, interference=1.0))
    assert ends(trace, 1) == [5.0, 5.0]
    later = kinds([first, [compute(1.0), compute(4.0), meet(2.0, after=(0,))]], 1, {"dp": [[0, 1]]})
    trace = ran(later, cost(later, interference=1.0))
    assert ends(trace, 1) == [5.0, 6.0]
    assert [lost(trace, rank, 1) for rank in (0, 1)] == [(0.0, 1.0), (0.0, 1.0)]


def test_several_collectives_beside_one_block() -> None:
    """Two of 1 s, one behind the other, then one that waits for the block: 1 s of 4 is lost, nothing to the last."""
    made = replicated([meet(1.0), meet(1.0), compute(4.0), meet(8.0, after=(2,)), compute(1.0)], 2, {"dp": [[0, 1]]})
    trace = ran(made, cost(made, interference=1.0))
    assert ends(trace, 2) == [5.0, 5.0]
    assert ends(trace, 4) == [7.0, 7.0], "the last kernel of 1 s takes 2 s beside it"


CIRCLE = kinds(
    [[meet(1.0, role="model"), compute(2.0), send(0.5, after=(1,)), compute(4.0)],
     [receive(0.5), compute(1.0, after=(0,)), meet(1.0, role="model", after=(1,))]],
    3, {"model": [[0, 1], [2, 3], [4, 5]], NEXT: [[0, 1], [2, 3], [4, 5]]},
)  # fmt: skip
"""The first kind launches a collective that starts when the second has computed what the first sends it."""


def test_what_only_a_clock_can_run_is_left_to_it() -> None:
    """Where collectives slow kernels (φ = 1), if the first block is slowed depends on a collective that it precedes.

    It is not: it takes 2 s, the message 0.5, the other block 1; the collective runs from 3.5, beside the block of 4 s.
    """
    blocks = cost(CIRCLE, interference=1.0)
    assert can_vectorize(CIRCLE)
    assert VectorizedEngine(CIRCLE, singleton_classes(CIRCLE), blocks, None).simulate_all() is None
    trace, _ = simulate_program(CIRCLE, singleton_classes(CIRCLE), blocks)
    assert waits(trace, 0, 1) == (0.0, 0.0, 0.0, 2.0)
    assert waits(trace, 4, 0) == (0.0, 0.0, 3.5, 4.5)
    assert waits(trace, 0, 3)[-1] == 6.5


def test_without_interference_there_is_no_circle() -> None:
    trace = ran(CIRCLE, cost(CIRCLE))
    assert waits(trace, 2, 1)[-1] == 2.0
    assert waits(trace, 4, 0) == (0.0, 0.0, 3.5, 4.5)
    assert waits(trace, 0, 3)[-1] == 6.0


def test_a_deadlock_is_found_whoever_runs_the_ranks() -> None:
    """Six ranks of two kinds come to the collectives of two roles in opposite orders."""
    first, second = meet(1.0), meet(1.0, role="model")
    groups = {"dp": [[0, 1], [2, 3], [4, 5]], "model": [[0, 1], [2, 3], [4, 5]]}
    made = kinds([[first, second], [second, first]], 3, groups)
    assert VectorizedEngine(made, singleton_classes(made), cost(made), None).simulate_all() is None
    with pytest.raises(DeadlockError, match="never finished task 0 of 2"):
        simulate_program(made, singleton_classes(made), cost(made))


INSIDE = [compute(exchange("tp", 1.0))]
UNABLE = {
    "kinds meet inside a block": kinds([INSIDE, INSIDE], 2, {"tp": [[0, 1], [2, 3]]}),
    "some of a kind send": Program(
        program([[send(1.0)], [receive(1.0)]]).programs, np.array([0, 1, 0]), program([[]], {NEXT: [[0, 1]]}).groups
    ),
    "a kind sends to two kinds": Program(
        program([[send(1.0)], [receive(1.0)], [receive(1.0)]]).programs,
        np.array([0, 1, 2, 0, 1, 2]),
        program([[]], {NEXT: [[0, 1], [3, 5]]}).groups,
    ),
}


@pytest.mark.parametrize("why", UNABLE)
def test_what_cohorts_cannot_run(why: str) -> None:
    assert not can_vectorize(UNABLE[why])


def test_what_cohorts_can_run() -> None:
    assert can_vectorize(kinds([INSIDE, INSIDE], 2, {"tp": [[0, 2], [1, 3]]}))
    assert can_vectorize(CIRCLE)


def travel(seconds: float, *, after: tuple[int, ...] = ()) -> Step:
    return Stream.EP, CollectiveTask(exchange("ep", seconds, CollectiveType.ALL_TO_ALL), after)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_group_that_meets_inside_blocks_and_beside_them_meets_for_the_same(one_by_one: bool) -> None:
    """Rank 0 can send beside its block from 1 s, before it meets inside it at 2 s; rank 1 from 4 s, behind that."""
    steps = [meet(1.0), travel(1.0, after=(0,)), compute(1.0, 1.0, exchange("ep", 1.0))]
    made = replicated(steps, 2, {"dp": [[0], [1]], "ep": [[0, 1]]})
    blocks = UnitCost(made, {"dp": [1.0, 4.0]}).blocks
    trace = simulate_scalar(made, singleton_classes(made), blocks)[0] if one_by_one else ran(made, blocks)
    assert ends(trace, 1) == [5.0, 5.0]
    assert ends(trace, 2) == [3.0, 3.0]


def test_of_collectives_of_two_streams_the_slower_pace_counts() -> None:
    """Beside the all-reduce (0 to 8 s) kernels take twice as long, beside the all-to-all (2 to 6 s) four times.

    The first of 1 s ends at 2; of three of 4 s, 1 s is done at 6, another at 8, and the other 10 s are alone.
    """
    slowed = {
        (CollectiveType.ALL_REDUCE, KernelClass.COMPUTE): 1.0,
        (CollectiveType.ALL_TO_ALL, KernelClass.COMPUTE): 3.0,
    }
    steps = [meet(8.0), compute(1.0), travel(4.0, after=(1,)), compute(4.0, 4.0, 4.0)]
    made = replicated(steps, 4, {"dp": [[0, 1], [2, 3]], "ep": [[0, 2], [1, 3]]})
    unit = UnitCost(made)
    trace = ran(
        made,
        SegmentCost(made, DeviceModels.uniform(DeviceModel(unit, Interference.from_measurements(slowed, {})), 4), unit),
    )
    assert ends(trace, 1) == [2.0] * 4
    assert ends(trace, 3) == [18.0] * 4
    assert lost(trace, 3, 3) == (0.0, 4.0)


def test_factors_follow_each_other_however_many_are_drawn_at_once() -> None:
    """Ranks that meet nobody work the sum of their kernels: blocks of 1, 2 and more operations than are drawn ahead."""
    jitter, sizes = Jitter(0.1, seed=6), [1, 2, DRAW_SIZE - 2, 3, DRAW_SIZE + 5, 1, 2 * DRAW_SIZE, 4]
    made = replicated([compute(*[1.0] * size) for size in sizes], 3, {})
    trace = VectorizedEngine(made, singleton_classes(made), cost(made), jitter).simulate_all()
    assert trace is not None
    for rank in range(3):
        worked = np.cumsum(jitter.rank_factors(rank, sum(sizes)))[np.cumsum(sizes) - 1]
        assert [ends(trace, task)[rank] for task in range(len(sizes))] == pytest.approx(worked.tolist())


@pytest.mark.parametrize("slow", range(4))
def test_whoever_runs_the_ranks_all_wait_for_the_slow_one(slow: int) -> None:
    """Ranks that meet in rows and in columns: the one at half speed is whom all others' spans name."""
    made = replicated(
        [compute(1.0, exchange("tp", 1.0), exchange("cp", 1.0))],
        4, {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]]},
    )  # fmt: skip
    blocks = cost(made, {slow: HALF})
    for trace in (ran(made, blocks), simulate_scalar(made, singleton_classes(made), blocks)[0]):
        assert trace.rank[trace.blocking_event].tolist() == [slow] * 4
