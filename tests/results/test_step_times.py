"""Times of successive steps where ranks drift apart and steps overlap."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.arrays import FloatArray
from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.lowering.repeat_steps import repeat_steps
from clustersim.program.program import Program
from clustersim.results.step_times import step_times
from clustersim.results.trace_table import build_trace_table
from clustersim.symmetry.refinement import singleton_classes
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import (
    PP_NEXT,
    all_reduce,
    compute,
    make_program,
    make_replicated_program,
    receive,
    send,
)


def simulated_step_times(step_program: Program, step_count: int, jitter: Jitter | None = None) -> FloatArray:
    """Seconds of each of several successive steps, at unit costs."""
    repeated = repeat_steps(step_program, step_count)
    unit_cost = UnitCost(repeated)
    cost = SegmentCost(repeated, DeviceModels.uniform(DeviceModel(unit_cost), repeated.world_size), unit_cost)
    trace, _ = simulate_program(repeated, singleton_classes(repeated), cost, jitter=jitter)
    seconds = step_times(build_trace_table(trace, repeated, step_count))
    assert seconds.shape == (step_count,)
    assert seconds.sum() == pytest.approx(trace.makespan)
    return seconds


def test_one_step_takes_the_makespan() -> None:
    assert simulated_step_times(make_program([[compute(1.0)], [compute(2.5)]]), 1).tolist() == [2.5]


def test_steps_of_synchronized_ranks_are_equal() -> None:
    """Ranks compute 1 and 2 s, then both reduce for 3 s, synchronized by the slower."""
    step_program = make_program(
        [
            [compute(1.0), all_reduce(3.0, depends_on=(0,)), compute(0.0, depends_on=(1,))],
            [compute(2.0), all_reduce(3.0, depends_on=(0,)), compute(0.0, depends_on=(1,))],
        ],
        {"dp": [[0, 1]]},
    )
    assert simulated_step_times(step_program, 4).tolist() == [5.0] * 4


def test_an_unsynchronized_straggler_determines_the_step_time() -> None:
    """Ranks of 1 and 2 s that never synchronize: every step ends when the slow one has run it, 2 s after its last."""
    assert simulated_step_times(make_program([[compute(1.0)], [compute(2.0)]]), 5).tolist() == [2.0] * 5


def test_steps_overlap_where_ranks_run_ahead() -> None:
    """Rank 0 computes 2 s and sends for 1; rank 1 then computes 3 s.

    The first step takes 2 + 1 + 3 s; then rank 0 is ahead, and each additional step ends 3 s later.
    """
    step_program = make_program(
        [[compute(2.0), send(1.0, depends_on=(0,))], [receive(1.0), compute(3.0, depends_on=(0,))]], {PP_NEXT: [[0, 1]]}
    )
    assert simulated_step_times(step_program, 4).tolist() == [6.0, 3.0, 3.0, 3.0]


def test_programs_may_have_different_task_counts_per_step() -> None:
    """Three tasks and one: the first rank's step takes 3 s, the second's 1."""
    step_program = make_program([[compute(1.0), compute(1.0), compute(1.0)], [compute(1.0)]])
    assert simulated_step_times(step_program, 3).tolist() == [3.0, 3.0, 3.0]


def test_a_rank_without_tasks_does_not_affect_step_times() -> None:
    assert simulated_step_times(make_program([[compute(2.0)], []]), 2).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("ranks", [1, 6])
def test_with_jitter_each_step_has_its_own_samples(ranks: int) -> None:
    """Ranks that reduce after every kernel: step n lasts the largest n-th factor of all (two operations a step)."""
    jitter = Jitter(0.1, seed=5)
    tasks = [compute(1.0), all_reduce(1.0, depends_on=(0,)), compute(0.0, depends_on=(1,))]
    step_program = make_replicated_program(tasks, ranks, {"dp": [list(range(ranks))]})
    factors = np.stack([jitter.rank_factors(rank, 10) for rank in range(ranks)])
    assert simulated_step_times(step_program, 5, jitter).tolist() == pytest.approx(
        (1.0 + factors[:, ::2].max(axis=0)).tolist()
    )


KERNELS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=3)


@given(st.lists(KERNELS, min_size=1, max_size=3), st.integers(1, 4))
def test_steps_of_unsynchronized_ranks_end_with_the_slowest(kernels: Sequence[Sequence[float]], steps: int) -> None:
    step_program = make_program([[compute(seconds) for seconds in kernel] for kernel in kernels])
    assert simulated_step_times(step_program, steps).tolist() == [max(sum(item) for item in kernels)] * steps
