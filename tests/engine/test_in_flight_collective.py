"""DP collectives and the kernels that they overlap slow each other."""

import pytest

from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.interference import Interference, KernelClass
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.fluid_action import FluidAction
from clustersim.engine.kernel.in_flight_collective import InFlightCollective
from clustersim.program.program import Program
from clustersim.program.task import CollectiveType
from clustersim.symmetry.refinement import singleton_classes
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import all_reduce, compute, make_comm_op, make_program, trace_spans

OVERLAPPED_PAIR = (CollectiveType.ALL_REDUCE, KernelClass.COMPUTE)
GROUPS = {"dp": [[0, 1]], "tp": [[0, 1]]}


def task_ends(program: Program, p: float, q: float, *, coalesce: bool = True) -> list[float]:
    """End times of tasks, by rank and task, where kernels take 1 + p times as long and the collective 1 + q."""
    unit_cost = UnitCost(program)
    table = Interference.from_measurements({OVERLAPPED_PAIR: p}, {OVERLAPPED_PAIR: q})
    cost = SegmentCost(program, DeviceModels.uniform(DeviceModel(unit_cost, table), program.world_size), unit_cost)
    trace, _ = simulate_program(program, singleton_classes(program), cost, coalesce=coalesce)
    return [end for _, _, _, end in sorted(trace_spans(trace))]


@pytest.mark.parametrize(
    ("kernel", "call", "ends"),
    [(4.0, 2.0, [4.8, 4.0]), (1.0, 2.0, [1.25, 2.625]), (0.0, 2.0, [0.0, 2.0]), (4.0, 0.0, [4.0, 0.0])],
)
def test_kernel_and_collective_slow_each_other_until_either_ends(kernel: float, call: float, ends: list[float]) -> None:
    """P = 1/4, q = 1. 2 s of data take 4 during a kernel, which does 3.2 s meanwhile and 0.8 at full rate.

    A kernel of 1 s takes 1.25, in which 0.625 s of data move; 1.375 are left.
    """
    program = make_program([[compute(kernel), all_reduce(call)]] * 2, GROUPS)
    assert task_ends(program, 0.25, 1.0) == pytest.approx(ends * 2)
    assert task_ends(program, 0.25, 0.0)[1] == call, "where kernels slow nothing"


def test_the_most_slowed_member_bounds_the_collective() -> None:
    """The other computes nothing; both have the data after 4 s."""
    program = make_program([[compute(4.0), all_reduce(2.0)], [all_reduce(2.0)]], GROUPS)
    assert task_ends(program, 0.25, 1.0) == pytest.approx([4.8, 4.0, 4.0])


def test_a_collective_runs_at_the_mean_rate_of_a_segment() -> None:
    """P = 0, q = 1. A segment is a kernel of 1 s and a collective of 1 s: data move 1/2 + 1 s in its 2 s, at 3/4.

    So of 3 s of data 1.5 are left at 2 s; the next segment waits for them and overlaps nothing.
    """
    program = make_program(
        [[compute(1.0, make_comm_op("tp", 1.0)), all_reduce(3.0), compute(1.0, depends_on=(1,))]] * 2, GROUPS
    )
    for coalesce in (True, False):
        assert task_ends(program, 0.0, 1.0, coalesce=coalesce) == pytest.approx([2.0, 3.5, 4.5] * 2)


def test_a_rate_change_applies_from_its_time() -> None:
    """4 s of work: 1 s at full rate, 2 s at half rate, and the 2 s that are left."""
    environment = SimEnvironment()
    transfer, end_times = FluidAction(environment, 4.0), []
    transfer.set_rate(1.0)
    in_flight = InFlightCollective(transfer)
    transfer.done.callbacks.append(lambda _: end_times.append(environment.now))
    environment.timeout(1.0).callbacks.append(lambda _: in_flight.bound_rate(0, 0.5))
    environment.timeout(2.0).callbacks.append(lambda _: in_flight.bound_rate(1, 0.75))
    environment.timeout(3.0).callbacks.append(lambda _: (in_flight.bound_rate(0, 1.0), in_flight.bound_rate(1, 1.0)))
    environment.run()
    assert end_times == [pytest.approx(3.0 + (4.0 - 1.0 - 1.0))]
