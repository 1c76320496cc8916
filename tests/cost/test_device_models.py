"""Machines: what a GPU's state does to its kernels, and to nothing else."""

from math import pi, sqrt

import numpy as np
import pytest

from clustersim.cost.device_models import DeviceModel, DeviceModels, ThrottledKernels, slowest_deviation
from clustersim.cost.host_launch import AsyncHost
from clustersim.cost.interference import Interference
from clustersim.cost.segment import SegmentCost
from clustersim.cost.timing import Bottleneck, Provenance
from clustersim.program.task import Segment
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import block, exchange, meet, program

WORK = block(2.0, exchange("tp", 3.0), 1.0)


def cost(speeds: list[float], slowness: list[float] | None = None, interference: float = 0.0) -> SegmentCost:
    """Pairs of neighbouring ranks communicate. speeds: of each rank; slowness: of each pair."""
    made = program([[] for _ in speeds], {"tp": np.arange(len(speeds)).reshape(-1, 2).tolist()})
    unit = UnitCost(made, {} if slowness is None else {"tp": slowness})
    kinds = tuple(sorted(set(speeds), reverse=True))
    machines = tuple(DeviceModel(ThrottledKernels(unit, speed), Interference.uniform(interference)) for speed in kinds)
    return SegmentCost(made, DeviceModels(machines, np.array([kinds.index(speed) for speed in speeds])), unit)


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.0, 2.0])
def test_kernels_take_as_much_longer_as_the_gpu_is_slower(speed: float) -> None:
    unit = UnitCost(program([[]]))
    (kernel,) = (operation.kernel for operation in block(3.0).operations)
    assert kernel is not None
    timing = ThrottledKernels(unit, speed).time_kernel(kernel)
    assert timing.seconds == 3.0 / speed
    assert (timing.provenance, timing.bottleneck) == (Provenance.MEASURED, Bottleneck.COMPUTE), (
        "what is known does not change"
    )


def test_a_slow_gpu_slows_kernels_and_no_exchange() -> None:
    """At half speed 2 + 3 + 1 s are 4 + 3 + 2."""
    blocks = cost([0.5, 1.0])
    assert blocks.time_segment(0, WORK).durations == (4.0, 3.0, 2.0)
    assert blocks.time_segment(1, WORK).durations == (2.0, 3.0, 1.0)


def together(blocks: SegmentCost, ranks: int, work: Segment = WORK) -> list[list[int]]:
    """Ranks that share a timing, by identity; checked against those that have equal numbers."""
    numbers = blocks.timing_classes(work)
    sets = [
        [other for other in range(ranks) if blocks.time_segment(rank, work) is blocks.time_segment(other, work)]
        for rank in range(ranks)
    ]
    assert sets == [np.flatnonzero(numbers == numbers[rank]).tolist() for rank in range(ranks)]
    return sorted({tuple(item): item for item in sets}.values())


def test_equal_machines_in_equally_fast_groups_share_a_timing() -> None:
    assert together(cost([1.0] * 6), 6) == [[0, 1, 2, 3, 4, 5]]


def test_different_machines_do_not_share_a_timing() -> None:
    assert together(cost([1.0, 0.5, 1.0, 1.0, 0.5, 1.0]), 6) == [[0, 2, 3, 5], [1, 4]]


def test_groups_of_different_speeds_do_not_share_a_timing() -> None:
    assert together(cost([1.0] * 6, [1.0, 2.0, 1.0]), 6) == [[0, 1, 4, 5], [2, 3]]


def test_machines_and_groups_both_tell_timings_apart() -> None:
    """Machines 0/1 by groups 0/1/2: each pair of numbers that occurs is a timing of its own, and right."""
    speeds, slowness = [1.0, 0.5, 0.5, 1.0, 1.0, 0.5], [1.0, 2.0, 1.0]
    blocks = cost(speeds, slowness)
    assert together(blocks, 6) == [[0, 4], [1, 5], [2], [3]]
    for rank, speed in enumerate(speeds):
        assert blocks.time_segment(rank, WORK).durations == (2.0 / speed, 3.0 * slowness[rank // 2], 1.0 / speed)


def test_groups_that_a_block_does_not_use_tell_nobody_apart() -> None:
    assert together(cost([1.0] * 4, [1.0, 2.0]), 4, block(1.0)) == [[0, 1, 2, 3]]


def test_several_exchanges_of_different_groups_are_told_apart_together() -> None:
    """Four ranks in rows and columns of which one each is slow: all four differ."""
    made = program([[] for _ in range(4)], {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]]})
    unit = UnitCost(made, {"tp": [1.0, 2.0], "cp": [1.0, 3.0]})
    blocks = SegmentCost(made, DeviceModels.uniform(DeviceModel(unit), 4), unit)
    work = block(exchange("tp", 1.0), exchange("cp", 1.0))
    assert together(blocks, 4, work) == [[0], [1], [2], [3]]
    assert [blocks.time_segment(rank, work).seconds for rank in range(4)] == [2.0, 4.0, 3.0, 5.0]


def test_each_rank_has_the_interference_of_its_machine() -> None:
    made = program([[meet(1.0)], []], {"dp": [[0, 1]]})
    unit = UnitCost(made)
    blocks = SegmentCost(
        made, DeviceModels((DeviceModel(unit), DeviceModel(unit, Interference.uniform(0.25))), np.array([1, 0])), unit
    )
    work = block(1.0)
    assert [blocks.slowdown(rank, work).tolist() for rank in (0, 1)] == [[[0.25]], [[0.0]]]
    assert [blocks.comm_slows_compute(np.array([rank])) for rank in (0, 1)] == [True, False]


def test_a_gpu_alone_is_the_mean_one() -> None:
    assert slowest_deviation(1) == 0.0


def test_the_slowest_of_more_gpus_is_slower() -> None:
    later = [slowest_deviation(gpus) for gpus in (1, 2, 3, 8, 64, 1024, 16384)]
    assert later == sorted(set(later))


@pytest.mark.parametrize(("gpus", "exact"), [(2, 1 / sqrt(pi)), (3, 1.5 / sqrt(pi))])
def test_the_slowest_of_two_and_three_as_their_integrals_are(gpus: int, exact: float) -> None:
    """Expected largest of 2 and 3 standard normals (closed forms: Jones 1948); Blom's score lies within 5 % of it."""
    assert slowest_deviation(gpus) == pytest.approx(exact, rel=0.05)


def test_the_slowest_of_many_as_drawn() -> None:
    """Mean largest of 1024 standard normals over 4000 draws, whose own standard error is 0.35/sqrt(4000) = 0.006."""
    drawn = np.random.default_rng(0).standard_normal((4000, 1024), dtype=np.float32).max(axis=1).mean()
    assert slowest_deviation(1024) == pytest.approx(float(drawn), rel=0.01)


def test_each_rank_is_launched_by_the_host_of_its_machine() -> None:
    """Two kernels of 1 s, by a host that needs 3 s for each and by one that needs nothing."""
    made = program([[], []])
    unit = UnitCost(made)
    blocks = SegmentCost(
        made, DeviceModels((DeviceModel(unit), DeviceModel(unit, host=AsyncHost(3.0, 3.0))), np.array([1, 0])), unit
    )
    work = block(1.0, 1.0)
    assert (blocks.time_segment(0, work).seconds, blocks.time_segment(1, work).seconds) == (6.0, 2.0)
