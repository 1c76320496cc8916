"""Collectives of the data stream beside kernels that slow them, and that they slow."""

import pytest

from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.interference import Interference, KernelClass
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.in_flight_collective import InFlightCollective, PrivateCollective
from clustersim.program.program import Program
from clustersim.program.task import CollectiveType
from clustersim.symmetry.refinement import singleton_classes
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import compute, exchange, meet, program, spans

PAIR = (CollectiveType.ALL_REDUCE, KernelClass.COMPUTE)
PAIRS = {"dp": [[0, 1]], "tp": [[0, 1]]}


def ended(made: Program, p: float, q: float, *, coalesce: bool = True) -> list[float]:
    """When tasks ended, by rank and task, where kernels take 1 + p times as long and the collective 1 + q."""
    unit = UnitCost(made)
    table = Interference.from_measurements({PAIR: p}, {PAIR: q})
    cost = SegmentCost(made, DeviceModels.uniform(DeviceModel(unit, table), made.world_size), unit)
    trace, _ = simulate_program(made, singleton_classes(made), cost, coalesce=coalesce)
    return [end for _, _, _, end in sorted(spans(trace))]


@pytest.mark.parametrize(
    ("kernel", "call", "ends"),
    [(4.0, 2.0, [4.8, 4.0]), (1.0, 2.0, [1.25, 2.625]), (0.0, 2.0, [0.0, 2.0]), (4.0, 0.0, [4.0, 0.0])],
)
def test_kernel_and_collective_slow_each_other_until_either_ends(kernel: float, call: float, ends: list[float]) -> None:
    """P = 1/4, q = 1. 2 s of data take 4 beside a kernel, which does 3.2 s meanwhile and 0.8 alone.

    A kernel of 1 s takes 1.25, in which 0.625 s of data move; 1.375 are left.
    """
    made = program([[compute(kernel), meet(call)]] * 2, PAIRS)
    assert ended(made, 0.25, 1.0) == pytest.approx(ends * 2)
    assert ended(made, 0.25, 0.0)[1] == call, "where kernels slow nothing"


def test_the_member_whose_kernels_slow_it_most_sets_the_pace() -> None:
    """The other computes nothing; both have the data after 4 s."""
    made = program([[compute(4.0), meet(2.0)], [meet(2.0)]], PAIRS)
    assert ended(made, 0.25, 1.0) == pytest.approx([4.8, 4.0, 4.0])


def test_a_collective_goes_at_its_own_pace_between_blocks_and_at_the_mean_of_one() -> None:
    """P = 0, q = 1. A block is a kernel of 1 s and an exchange of 1 s: data move 1/2 + 1 s in its 2 s, at 3/4.

    So of 3 s of data 1.5 are left at 2 s; the next block waits for them and is beside nothing.
    """
    made = program([[compute(1.0, exchange("tp", 1.0)), meet(3.0), compute(1.0, after=(1,))]] * 2, PAIRS)
    for coalesce in (True, False):
        assert ended(made, 0.0, 1.0, coalesce=coalesce) == pytest.approx([2.0, 3.5, 4.5] * 2)


def test_a_pace_that_changes_is_counted_from_when_it_does() -> None:
    """4 s of work: 1 s alone, 2 s at half its pace, and the 2 s that are left."""
    environment = SimEnvironment()
    alone = PrivateCollective(environment, 4.0)
    moving, found = InFlightCollective(alone.done, alone.set_rate_bound), []
    alone.done.callbacks.append(lambda _: found.append(environment.now))
    environment.timeout(1.0).callbacks.append(lambda _: moving.bound_rate(0, 0.5))
    environment.timeout(2.0).callbacks.append(lambda _: moving.bound_rate(1, 0.75))
    environment.timeout(3.0).callbacks.append(lambda _: (moving.bound_rate(0, 1.0), moving.bound_rate(1, 1.0)))
    environment.run_all()
    assert found == [pytest.approx(3.0 + (4.0 - 1.0 - 1.0))]
