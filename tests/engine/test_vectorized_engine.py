"""Vectorized engine: supported programs, waiting of each rank, and the fallback to the scalar engine.

That both engines agree is a property test (tests/laws); here the expected times are known.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from clustersim.cost.device_models import DeviceModel, DeviceModels, ThrottledKernels
from clustersim.cost.interference import Interference, KernelClass
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program, simulate_scalar
from clustersim.engine.execution_strategies import DeadlockError
from clustersim.engine.vectorized.engine import VectorizedEngine, can_vectorize
from clustersim.engine.vectorized.segment_durations import DRAW_SIZE
from clustersim.program.program import Program
from clustersim.program.task import CollectiveTask, CollectiveType, Stream
from clustersim.symmetry.refinement import singleton_classes
from clustersim.trace.trace import Trace
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import (
    PP_NEXT,
    StreamTask,
    all_reduce,
    cause_task,
    compute,
    event_index,
    make_comm_op,
    make_program,
    make_replicated_program,
    receive,
    send,
    task_times,
)

HALF_SPEED = 0.5


def make_replicated_programs(
    steps: Sequence[Sequence[StreamTask]], replicas: int, groups: Mapping[str, list[list[int]]]
) -> Program:
    """Each replica runs the same list of programs. Rank = replica * programs + program index."""
    single = make_program(steps, groups)
    return Program(single.programs, np.tile(np.arange(len(steps)), replicas), single.groups)


def make_cost(program: Program, speeds: Mapping[int, float] | None = None, interference: float = 0.0) -> SegmentCost:
    """Unit costs; some ranks at other speeds."""
    unit_cost, device_index = UnitCost(program), np.zeros(program.world_size, dtype=np.int64)
    machines = [DeviceModel(unit_cost, Interference.uniform(interference))]
    for rank, speed in (speeds or {}).items():
        device_index[rank] = len(machines)
        machines.append(DeviceModel(ThrottledKernels(unit_cost, speed), Interference.uniform(interference)))
    return SegmentCost(program, DeviceModels(tuple(machines), device_index), unit_cost)


def run_vectorized(program: Program, segment_cost: SegmentCost) -> Trace:
    assert can_vectorize(program)
    trace = VectorizedEngine(program, singleton_classes(program), segment_cost, None).simulate_all()
    assert trace is not None
    return trace


def task_ends(trace: Trace, task: int) -> list[float]:
    """End of one task on all ranks."""
    ranks = trace.simulated_ranks.tolist()
    return [float(trace.end[event_index(trace, rank, task)]) for rank in ranks]


def lost_seconds(trace: Trace, rank: int, task: int) -> tuple[float, float]:
    """Seconds waited and slowed inside a segment."""
    event = event_index(trace, rank, task)
    return float(trace.waited[event]), float(trace.slowed[event])


def test_a_collective_starts_with_its_slowest_member_and_names_it() -> None:
    """At speeds 1, 1/2, 1, 1/4 a kernel of 1 s takes 1, 2, 1, 4 s; pairs (0, 1) and (2, 3) reduce for 3 s."""
    program = make_replicated_program([compute(1.0), all_reduce(3.0, depends_on=(0,))], 4, {"dp": [[0, 1], [2, 3]]})
    trace = run_vectorized(program, make_cost(program, {1: 0.5, 3: 0.25}))
    assert task_ends(trace, 1) == [5.0, 5.0, 7.0, 7.0]
    assert task_times(trace, 2, 1) == (0.0, 1.0, 4.0, 7.0)
    assert [cause_task(trace, rank, 1) for rank in range(4)] == [(1, 0), (1, 0), (3, 0), (3, 0)]


def test_ranks_wait_for_a_slow_rank_inside_segments() -> None:
    """Kernels of 1 s around a collective of 2 s: the peer of a GPU at half speed waits 1 s, and ends 1 s earlier."""
    program = make_replicated_program([compute(1.0, make_comm_op("tp", 2.0), 1.0)], 4, {"tp": [[0, 2], [1, 3]]})
    trace = run_vectorized(program, make_cost(program, {2: HALF_SPEED}))
    assert task_ends(trace, 0) == [5.0, 4.0, 6.0, 4.0]
    assert [lost_seconds(trace, rank, 0) for rank in range(4)] == [(1.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]


def test_collectives_synchronize_ranks_of_different_programs() -> None:
    """Programs of 1 and 5 s in each of two replicas, one with a GPU at half speed: they synchronize at 5 and 10."""
    steps = [[compute(seconds), all_reduce(1.0, comm_group="model", depends_on=(0,))] for seconds in (1.0, 5.0)]
    program = make_replicated_programs(steps, 2, {"model": [[0, 1], [2, 3]]})
    trace = run_vectorized(program, make_cost(program, {3: HALF_SPEED}))
    assert task_ends(trace, 1) == [6.0, 6.0, 11.0, 11.0]
    assert cause_task(trace, 2, 1) == (3, 0)


def test_messages_go_to_the_paired_receiver() -> None:
    """Senders 0, 2 and 4 at speeds 1, 1/2, 1/4; receivers crosswise."""
    program = make_replicated_programs(
        [[compute(1.0), send(2.0, depends_on=(0,))], [receive(2.0), compute(1.0, depends_on=(0,))]],
        3,
        {PP_NEXT: [[0, 5], [2, 1], [4, 3]]},
    )
    trace = run_vectorized(program, make_cost(program, {2: 0.5, 4: 0.25}))
    assert [task_times(trace, rank, 0)[2:] for rank in (5, 1, 3)] == [(1.0, 3.0), (2.0, 4.0), (4.0, 6.0)]
    assert [task_times(trace, rank, 1)[-1] for rank in (5, 1, 3)] == [4.0, 5.0, 7.0]
    assert cause_task(trace, 3, 0) == (4, 0)


def test_a_collective_slows_segments_only_while_data_moves() -> None:
    """Two ranks reduce for 2 s during a segment of 4 s; the second arrives 1 s later, as it computes 1 s before.

    With φ = 1: data move from 1 to 3, and both lose 1 s.
    """
    steps = [compute(0.0), compute(4.0), all_reduce(2.0, depends_on=(0,))]
    program = make_replicated_program(steps, 2, {"dp": [[0, 1]]})
    trace = run_vectorized(program, make_cost(program, interference=1.0))
    assert task_ends(trace, 1) == [5.0, 5.0]
    delayed_program = make_replicated_programs(
        [steps, [compute(1.0), compute(4.0), all_reduce(2.0, depends_on=(0,))]], 1, {"dp": [[0, 1]]}
    )
    trace = run_vectorized(delayed_program, make_cost(delayed_program, interference=1.0))
    assert task_ends(trace, 1) == [5.0, 6.0]
    assert [lost_seconds(trace, rank, 1) for rank in (0, 1)] == [(0.0, 1.0), (0.0, 1.0)]


def test_several_collectives_overlap_one_segment() -> None:
    """Two of 1 s in sequence, then one that waits for the segment: 1 s of 4 is lost, nothing to the last."""
    program = make_replicated_program(
        [all_reduce(1.0), all_reduce(1.0), compute(4.0), all_reduce(8.0, depends_on=(2,)), compute(1.0)],
        2,
        {"dp": [[0, 1]]},
    )
    trace = run_vectorized(program, make_cost(program, interference=1.0))
    assert task_ends(trace, 2) == [5.0, 5.0]
    assert task_ends(trace, 4) == [7.0, 7.0], "the last kernel of 1 s takes 2 s beside it"


CIRCULAR_PROGRAM = make_replicated_programs(
    [[all_reduce(1.0, comm_group="model"), compute(2.0), send(0.5, depends_on=(1,)), compute(4.0)],
     [receive(0.5), compute(1.0, depends_on=(0,)), all_reduce(1.0, comm_group="model", depends_on=(1,))]],
    3, {"model": [[0, 1], [2, 3], [4, 5]], PP_NEXT: [[0, 1], [2, 3], [4, 5]]},
)  # fmt: skip
"""The first program launches a collective that starts when the second has computed what the first sends it."""


def test_circular_dependencies_fall_back_to_the_scalar_engine() -> None:
    """With interference (φ = 1), the slowdown of the first segment depends on a collective that it precedes.

    It is not slowed: it takes 2 s, the message 0.5, the other segment 1; the collective runs from 3.5,
    overlapping the segment of 4 s.
    """
    segment_cost = make_cost(CIRCULAR_PROGRAM, interference=1.0)
    assert can_vectorize(CIRCULAR_PROGRAM)
    assert (
        VectorizedEngine(CIRCULAR_PROGRAM, singleton_classes(CIRCULAR_PROGRAM), segment_cost, None).simulate_all()
        is None
    )
    trace, _ = simulate_program(CIRCULAR_PROGRAM, singleton_classes(CIRCULAR_PROGRAM), segment_cost)
    assert task_times(trace, 0, 1) == (0.0, 0.0, 0.0, 2.0)
    assert task_times(trace, 4, 0) == (0.0, 0.0, 3.5, 4.5)
    assert task_times(trace, 0, 3)[-1] == 6.5


def test_without_interference_there_is_no_circular_dependency() -> None:
    trace = run_vectorized(CIRCULAR_PROGRAM, make_cost(CIRCULAR_PROGRAM))
    assert task_times(trace, 2, 1)[-1] == 2.0
    assert task_times(trace, 4, 0) == (0.0, 0.0, 3.5, 4.5)
    assert task_times(trace, 0, 3)[-1] == 6.0


def test_a_deadlock_is_detected_by_both_engines() -> None:
    """Six ranks of two programs issue the collectives of two groups in opposite orders."""
    dp_step, model_step = all_reduce(1.0), all_reduce(1.0, comm_group="model")
    groups = {"dp": [[0, 1], [2, 3], [4, 5]], "model": [[0, 1], [2, 3], [4, 5]]}
    program = make_replicated_programs([[dp_step, model_step], [model_step, dp_step]], 3, groups)
    assert VectorizedEngine(program, singleton_classes(program), make_cost(program), None).simulate_all() is None
    with pytest.raises(DeadlockError, match="never finished task 0 of 2"):
        simulate_program(program, singleton_classes(program), make_cost(program))


TP_SEGMENT = [compute(make_comm_op("tp", 1.0))]
UNSUPPORTED = {
    "kinds meet inside a block": make_replicated_programs([TP_SEGMENT, TP_SEGMENT], 2, {"tp": [[0, 1], [2, 3]]}),
    "some of a kind send": Program(
        make_program([[send(1.0)], [receive(1.0)]]).programs,
        np.array([0, 1, 0]),
        make_program([[]], {PP_NEXT: [[0, 1]]}).groups,
    ),
    "a kind sends to two kinds": Program(
        make_program([[send(1.0)], [receive(1.0)], [receive(1.0)]]).programs,
        np.array([0, 1, 2, 0, 1, 2]),
        make_program([[]], {PP_NEXT: [[0, 1], [3, 5]]}).groups,
    ),
}


@pytest.mark.parametrize("why", UNSUPPORTED)
def test_unsupported_programs(why: str) -> None:
    assert not can_vectorize(UNSUPPORTED[why])


def test_supported_programs() -> None:
    assert can_vectorize(make_replicated_programs([TP_SEGMENT, TP_SEGMENT], 2, {"tp": [[0, 2], [1, 3]]}))
    assert can_vectorize(CIRCULAR_PROGRAM)


def expert_all_to_all(seconds: float, *, depends_on: tuple[int, ...] = ()) -> StreamTask:
    return Stream.EP, CollectiveTask(make_comm_op("ep", seconds, CollectiveType.ALL_TO_ALL), depends_on)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_group_matches_collectives_inside_and_outside_segments(one_by_one: bool) -> None:
    """Rank 0 issues on the EP stream at 1 s, before its segment's collective at 2 s; rank 1 at 4 s, after its own."""
    steps = [all_reduce(1.0), expert_all_to_all(1.0, depends_on=(0,)), compute(1.0, 1.0, make_comm_op("ep", 1.0))]
    program = make_replicated_program(steps, 2, {"dp": [[0], [1]], "ep": [[0, 1]]})
    segment_cost = UnitCost(program, {"dp": [1.0, 4.0]}).segment_cost
    trace = (
        simulate_scalar(program, singleton_classes(program), segment_cost)[0]
        if one_by_one
        else run_vectorized(program, segment_cost)
    )
    assert task_ends(trace, 1) == [5.0, 5.0]
    assert task_ends(trace, 2) == [3.0, 3.0]


def test_the_strongest_interference_of_two_streams_counts() -> None:
    """During the all-reduce (0 to 8 s) kernels take twice as long, during the all-to-all (2 to 6 s) four times.

    The first of 1 s ends at 2; of three of 4 s, 1 s is done at 6, another at 8, and the other 10 s are not
    overlapped.
    """
    interference = {
        (CollectiveType.ALL_REDUCE, KernelClass.COMPUTE): 1.0,
        (CollectiveType.ALL_TO_ALL, KernelClass.COMPUTE): 3.0,
    }
    steps = [all_reduce(8.0), compute(1.0), expert_all_to_all(4.0, depends_on=(1,)), compute(4.0, 4.0, 4.0)]
    program = make_replicated_program(steps, 4, {"dp": [[0, 1], [2, 3]], "ep": [[0, 2], [1, 3]]})
    unit_cost = UnitCost(program)
    trace = run_vectorized(
        program,
        SegmentCost(
            program,
            DeviceModels.uniform(DeviceModel(unit_cost, Interference.from_measurements(interference, {})), 4),
            unit_cost,
        ),
    )
    assert task_ends(trace, 1) == [2.0] * 4
    assert task_ends(trace, 3) == [18.0] * 4
    assert lost_seconds(trace, 3, 3) == (0.0, 4.0)


def test_jitter_factors_are_independent_of_the_draw_size() -> None:
    """Ranks without peers take the sum of their kernels: segments smaller and larger than one batch of draws."""
    jitter, sizes = Jitter(0.1, seed=6), [1, 2, DRAW_SIZE - 2, 3, DRAW_SIZE + 5, 1, 2 * DRAW_SIZE, 4]
    program = make_replicated_program([compute(*[1.0] * size) for size in sizes], 3, {})
    trace = VectorizedEngine(program, singleton_classes(program), make_cost(program), jitter).simulate_all()
    assert trace is not None
    for rank in range(3):
        expected_ends = np.cumsum(jitter.rank_factors(rank, sum(sizes)))[np.cumsum(sizes) - 1]
        assert [task_ends(trace, task)[rank] for task in range(len(sizes))] == pytest.approx(expected_ends.tolist())


@pytest.mark.parametrize("slow", range(4))
def test_both_engines_attribute_waiting_to_the_slow_rank(slow: int) -> None:
    """Ranks that synchronize in rows and columns: all spans name the rank at half speed as their leader."""
    program = make_replicated_program(
        [compute(1.0, make_comm_op("tp", 1.0), make_comm_op("cp", 1.0))],
        4, {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]]},
    )  # fmt: skip
    segment_cost = make_cost(program, {slow: HALF_SPEED})
    for trace in (
        run_vectorized(program, segment_cost),
        simulate_scalar(program, singleton_classes(program), segment_cost)[0],
    ):
        assert trace.rank[trace.blocking_event].tolist() == [slow] * 4
