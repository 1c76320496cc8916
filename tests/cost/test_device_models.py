"""Device models: a GPU's state slows its kernels, and nothing else."""

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
from tests.engine.small_programs import all_reduce, make_comm_op, make_program, make_segment

WORK = make_segment(2.0, make_comm_op("tp", 3.0), 1.0)


def segment_cost(
    speeds: list[float], group_slowdowns: list[float] | None = None, interference: float = 0.0
) -> SegmentCost:
    """Neighbouring ranks communicate in pairs. speeds: of each rank; group_slowdowns: of each pair."""
    rank_program = make_program([[] for _ in speeds], {"tp": np.arange(len(speeds)).reshape(-1, 2).tolist()})
    unit = UnitCost(rank_program, {} if group_slowdowns is None else {"tp": group_slowdowns})
    distinct_speeds = tuple(sorted(set(speeds), reverse=True))
    models = tuple(
        DeviceModel(ThrottledKernels(unit, speed), Interference.uniform(interference)) for speed in distinct_speeds
    )
    return SegmentCost(
        rank_program, DeviceModels(models, np.array([distinct_speeds.index(speed) for speed in speeds])), unit
    )


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.0, 2.0])
def test_kernel_time_is_inverse_to_gpu_speed(speed: float) -> None:
    unit = UnitCost(make_program([[]]))
    (kernel,) = (operation.kernel for operation in make_segment(3.0).operations)
    assert kernel is not None
    timing = ThrottledKernels(unit, speed).time_kernel(kernel)
    assert timing.seconds == 3.0 / speed
    assert (timing.provenance, timing.bottleneck) == (Provenance.MEASURED, Bottleneck.COMPUTE), (
        "what is known does not change"
    )


def test_a_slow_gpu_slows_kernels_and_no_collective() -> None:
    """At half speed 2 + 3 + 1 s are 4 + 3 + 2."""
    costs = segment_cost([0.5, 1.0])
    assert costs.time_segment(0, WORK).durations == (4.0, 3.0, 2.0)
    assert costs.time_segment(1, WORK).durations == (2.0, 3.0, 1.0)


def ranks_sharing_timings(costs: SegmentCost, ranks: int, segment: Segment = WORK) -> list[list[int]]:
    """Ranks that share a timing, by identity; checked against equal timing ids."""
    timing_ids = costs.timing_classes(segment)
    sets = [
        [other for other in range(ranks) if costs.time_segment(rank, segment) is costs.time_segment(other, segment)]
        for rank in range(ranks)
    ]
    assert sets == [np.flatnonzero(timing_ids == timing_ids[rank]).tolist() for rank in range(ranks)]
    return sorted({tuple(item): item for item in sets}.values())


def test_equal_devices_in_equally_fast_groups_share_a_timing() -> None:
    assert ranks_sharing_timings(segment_cost([1.0] * 6), 6) == [[0, 1, 2, 3, 4, 5]]


def test_different_devices_do_not_share_a_timing() -> None:
    assert ranks_sharing_timings(segment_cost([1.0, 0.5, 1.0, 1.0, 0.5, 1.0]), 6) == [[0, 2, 3, 5], [1, 4]]


def test_groups_of_different_speeds_do_not_share_a_timing() -> None:
    assert ranks_sharing_timings(segment_cost([1.0] * 6, [1.0, 2.0, 1.0]), 6) == [[0, 1, 4, 5], [2, 3]]


def test_timings_are_distinguished_by_device_and_group() -> None:
    """Devices 0/1 by groups 0/1/2: each combination that occurs has a correct timing of its own."""
    speeds, group_slowdowns = [1.0, 0.5, 0.5, 1.0, 1.0, 0.5], [1.0, 2.0, 1.0]
    costs = segment_cost(speeds, group_slowdowns)
    assert ranks_sharing_timings(costs, 6) == [[0, 4], [1, 5], [2], [3]]
    for rank, speed in enumerate(speeds):
        assert costs.time_segment(rank, WORK).durations == (2.0 / speed, 3.0 * group_slowdowns[rank // 2], 1.0 / speed)


def test_groups_that_a_segment_does_not_use_distinguish_no_timing() -> None:
    assert ranks_sharing_timings(segment_cost([1.0] * 4, [1.0, 2.0]), 4, make_segment(1.0)) == [[0, 1, 2, 3]]


def test_timings_are_distinguished_by_all_groups_of_a_segment() -> None:
    """Four ranks in a 2 x 2 grid with one slow row and one slow column: all four differ."""
    rank_program = make_program([[] for _ in range(4)], {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]]})
    unit = UnitCost(rank_program, {"tp": [1.0, 2.0], "cp": [1.0, 3.0]})
    costs = SegmentCost(rank_program, DeviceModels.uniform(DeviceModel(unit), 4), unit)
    segment = make_segment(make_comm_op("tp", 1.0), make_comm_op("cp", 1.0))
    assert ranks_sharing_timings(costs, 4, segment) == [[0], [1], [2], [3]]
    assert [costs.time_segment(rank, segment).seconds for rank in range(4)] == [2.0, 4.0, 3.0, 5.0]


def test_each_rank_has_the_interference_of_its_device() -> None:
    rank_program = make_program([[all_reduce(1.0)], []], {"dp": [[0, 1]]})
    unit = UnitCost(rank_program)
    costs = SegmentCost(
        rank_program,
        DeviceModels((DeviceModel(unit), DeviceModel(unit, Interference.uniform(0.25))), np.array([1, 0])),
        unit,
    )
    segment = make_segment(1.0)
    assert [costs.slowdown(rank, segment).tolist() for rank in (0, 1)] == [[[0.25]], [[0.0]]]
    assert [costs.comm_slows_compute(np.array([rank])) for rank in (0, 1)] == [True, False]


def test_a_single_gpu_is_the_mean() -> None:
    assert slowest_deviation(1) == 0.0


def test_the_slowest_of_more_gpus_is_slower() -> None:
    scores = [slowest_deviation(gpus) for gpus in (1, 2, 3, 8, 64, 1024, 16384)]
    assert scores == sorted(set(scores))


@pytest.mark.parametrize(("gpus", "exact"), [(2, 1 / sqrt(pi)), (3, 1.5 / sqrt(pi))])
def test_the_slowest_of_two_and_three_matches_closed_forms(gpus: int, exact: float) -> None:
    """Expected largest of 2 and 3 standard normals (closed forms: Jones 1948); Blom's score lies within 5 % of it."""
    assert slowest_deviation(gpus) == pytest.approx(exact, rel=0.05)


def test_the_slowest_of_1024_matches_a_monte_carlo_mean() -> None:
    """Mean largest of 1024 standard normals over 4000 draws, whose own standard error is 0.35/sqrt(4000) = 0.006."""
    drawn = np.random.default_rng(0).standard_normal((4000, 1024), dtype=np.float32).max(axis=1).mean()
    assert slowest_deviation(1024) == pytest.approx(float(drawn), rel=0.01)


def test_each_rank_is_launched_by_the_host_of_its_device() -> None:
    """Two kernels of 1 s, by a host that needs 3 s for each and by one that needs nothing."""
    rank_program = make_program([[], []])
    unit = UnitCost(rank_program)
    costs = SegmentCost(
        rank_program,
        DeviceModels((DeviceModel(unit), DeviceModel(unit, host=AsyncHost(3.0, 3.0))), np.array([1, 0])),
        unit,
    )
    segment = make_segment(1.0, 1.0)
    assert (costs.time_segment(0, segment).seconds, costs.time_segment(1, segment).seconds) == (6.0, 2.0)
