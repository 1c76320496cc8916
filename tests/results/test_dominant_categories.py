"""Every second of the breakdown, at its place in time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.common.arrays import FloatArray
from clustersim.program.task import ComputeTask, Stream
from clustersim.results.dominant_categories import category_seconds, dominant_categories
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_breakdown import compute_breakdown
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory
from clustersim.results.trace_table import build_trace_table
from tests.conftest import examples
from tests.results.random_trace_cases import MIXED, MIXED_TIMING, cases
from tests.results.trace_cases import BACKWARD, FORWARD, STEP, Case, Row, collective, receive, send
from tests.strategies import scenarios

DATA, SEND, RECEIVE = Stream.DP, Stream.SEND_NEXT, Stream.RECEIVE


def shares(case: Case, bins: int) -> FloatArray:
    """[parts, classes, bins] seconds."""
    return np.array(list(category_seconds(case.joined, case.timing_of, bin_count=bins, makespan=case.trace.makespan)))


def timeline(case: Case, bins: int, rank: int = 0) -> list[dict[str, float]]:
    """Seconds of each bin of a class by part, those that are not zero."""
    return [
        {part.value: float(value) for part, value in zip(TIME_CATEGORIES, column, strict=True) if abs(value) > 1e-12}
        for column in shares(case, bins)[:, rank].T
    ]


@given(cases(), st.integers(1, 40))
def test_bins_of_a_part_sum_to_the_breakdown(case: Case, bins: int) -> None:
    known = compute_breakdown(case.joined, case.timing_of).seconds
    assert pytest.approx(known, rel=1e-9, abs=1e-9 * (1 + case.trace.makespan)) == shares(case, bins).sum(axis=2).T


@given(cases(), st.integers(1, 40))
def test_every_bin_is_full_and_no_part_negative(case: Case, bins: int) -> None:
    found, makespan = shares(case, bins), case.trace.makespan
    assert found.sum(axis=0) == pytest.approx(makespan / bins, rel=1e-9, abs=1e-9 * (1 + makespan))
    assert (found >= -1e-9 * (1 + makespan)).all()


@given(cases(), st.integers(1, 20), st.integers(2, 5))
def test_finer_bins_add_up_to_coarser_ones(case: Case, bins: int, finer: int) -> None:
    whole, parts = shares(case, bins), shares(case, bins * finer)
    together = parts.reshape(*whole.shape, finer).sum(axis=3)
    assert together == pytest.approx(whole, rel=1e-9, abs=1e-9 * (1 + case.trace.makespan))


@pytest.mark.parametrize("steps", [1, 2])
@given(drawn=scenarios())
@examples(8)
def test_bins_sum_to_the_breakdown_in_training_steps(steps: int, drawn: Scenario) -> None:
    check(simulate(drawn.with_overrides(f"steps={steps}")))


@pytest.mark.parametrize(
    "changes",
    [
        ("disturbances.slow=[{gpu: 3, speed: 0.7}]",),
        ("disturbances.jitter={std: 0.05}",),
        ("cost.network=shared",),
        ("layout.pipeline_overlap=false", "steps=2"),
    ],
)
def test_bins_sum_to_the_breakdown_where_ranks_differ(changes: tuple[str, ...]) -> None:
    check(simulate(SMALL.with_overrides(*changes)))


SMALL = Scenario.from_mapping(
    {
        "model": {"preset": "gpt-tiny", "vocab": 50432}, "cluster": {"name": "dgx-a100", "gpus": 8},
        "layout": {"tp": 2, "pp": 2, "dp": 2, "data": "zero1"}, "schedule": "1f1b",
        "training": {"sequence": 512, "global_batch": 16, "microbatch": 2, "precision": "bf16"},
    }
)  # fmt: skip


def check(result: SimulationResult) -> None:
    rows = build_trace_table(result.trace, result.program, result.scenario.steps)
    found = dominant_categories(rows, result.cost.time_segment, bin_count=50)
    assert found.is_complete
    known = result.breakdown.seconds * result.scenario.steps
    assert found.seconds == pytest.approx(known, rel=1e-9, abs=1e-9 * found.makespan)


def test_each_moment_has_its_part() -> None:
    """Idle for 2 s, a message of 1 s, forward of 2 s, a pause of 1 s in which a collective moves, the optimizer."""
    case = Case(
        (
            Row(receive(), 2, 3, -1, RECEIVE), Row(FORWARD, 3, 5, 0), Row(collective("dp"), 5, 6, 1, DATA),
            Row(STEP, 6, 8, 2),
        ),
        staged=True,
    )  # fmt: skip
    assert timeline(case, 8) == [
        {"bubble warm-up": 1.0}, {"bubble warm-up": 1.0}, {"exposed pp": 1.0}, {"compute": 1.0}, {"compute": 1.0},
        {"exposed dp": 1.0}, {"optimizer": 1.0}, {"optimizer": 1.0},
    ]  # fmt: skip


def test_what_a_stream_moves_while_it_is_awaited_stands_where_it_moved() -> None:
    """A gap from 1 to 6: two messages queue, 2 to 3 and 4 to 6; the first second and the one between are bubble."""
    case = Case(
        (Row(FORWARD, 0, 1), Row(send(), 2, 3, 0, SEND), Row(send(), 4, 6, 0, SEND), Row(BACKWARD, 6, 7, 2)),
        staged=True,
    )
    found = [next(iter(item)) for item in timeline(case, 7)]
    bubble, moved = "bubble warm-up", "exposed pp"
    assert found == ["compute", bubble, moved, bubble, moved, moved, "compute"]


def test_a_blocks_parts_are_spread_evenly_but_for_what_this_run_waited() -> None:
    """9 s of own time in each run; the second waits for 3 s more."""
    case = Case(
        (Row(ComputeTask(MIXED), 0, 9), Row(ComputeTask(MIXED), 9, 21, 0, waited=3.0)), timings={MIXED: MIXED_TIMING}
    )  # fmt: skip
    first, second = shares(case, 21)[:, 0, :9], shares(case, 21)[:, 0, 9:]
    compute, wait = TimeCategory.COMPUTE.index, TimeCategory.WAIT.index
    assert first[compute] == pytest.approx(5 / 9)
    assert second[compute] == pytest.approx(5 / 12)
    assert first[wait] == pytest.approx(0)
    assert second[wait] == pytest.approx(3 / 12)


def test_a_bin_is_called_after_what_takes_most_of_it() -> None:
    """Bins of 2 s: forward for 1.5 s and 0.5 s of a collective; 1 s of it less an eighth, and the optimizer."""
    case = Case((Row(FORWARD, 0, 1.5), Row(collective("dp"), 1.5, 2.875, 0, DATA), Row(STEP, 2.875, 4, 1)))
    found = dominant_categories(case.joined, case.timing_of, bin_count=2)
    assert [TIME_CATEGORIES[place] for place in found.category[0]] == [TimeCategory.COMPUTE, TimeCategory.OPTIMIZER]
    assert found.seconds[0, TimeCategory.EXPOSED_DP.place] == pytest.approx(1.375)


def test_of_many_classes_evenly_spaced_ranks_are_shown_as_they_are() -> None:
    rows = tuple(Row(FORWARD, 0, 1.0 + rank, -1, rank=rank) for rank in range(9))
    case = Case(rows, tuple(range(9)))
    every = dominant_categories(case.joined, case.timing_of, bin_count=9)
    some = dominant_categories(case.joined, case.timing_of, bin_count=9, max_classes=3)
    assert every.is_complete
    assert not some.is_complete
    assert some.ranks.tolist() == [0, 4, 8]
    assert some.makespan == every.makespan == 9.0
    assert (some.category == every.category[[0, 4, 8]]).all()
    assert some.seconds == pytest.approx(every.seconds[[0, 4, 8]])


def test_a_large_class_is_shown_however_few_are() -> None:
    """Rank 1 stands for ten ranks, each other one for itself."""
    rows = tuple(Row(FORWARD, 0, 1.0, -1, rank=rank) for rank in range(6))
    case = Case(rows, (0, 1, 2, 3, 4, 5, *[1] * 9))
    assert 1 in dominant_categories(case.joined, case.timing_of, bin_count=1, max_classes=3).ranks
