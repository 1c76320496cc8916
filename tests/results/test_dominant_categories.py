"""The categories of the breakdown over time: binned seconds and the dominant category of each bin."""

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
from tests.results.random_trace_cases import MIXED, MIXED_TIMING, trace_cases
from tests.results.trace_cases import (
    BACKWARD,
    FORWARD,
    OPTIMIZER_STEP,
    SpanEvent,
    TraceCase,
    collective_task,
    receive_task,
    send_task,
)
from tests.strategies import scenarios

DATA, SEND, RECEIVE = Stream.DP, Stream.SEND_NEXT, Stream.RECEIVE


def binned_seconds(case: TraceCase, bin_count: int) -> FloatArray:
    """[categories, classes, bins] seconds."""
    return np.array(
        list(category_seconds(case.trace_table, case.segment_timing, bin_count=bin_count, makespan=case.trace.makespan))
    )


def bin_categories(case: TraceCase, bin_count: int, rank: int = 0) -> list[dict[str, float]]:
    """Nonzero seconds of each bin of a class by category."""
    return [
        {
            category.value: float(value)
            for category, value in zip(TIME_CATEGORIES, column, strict=True)
            if abs(value) > 1e-12
        }
        for column in binned_seconds(case, bin_count)[:, rank].T
    ]


@given(trace_cases(), st.integers(1, 40))
def test_bins_of_a_category_sum_to_the_breakdown(case: TraceCase, bins: int) -> None:
    expected = compute_breakdown(case.trace_table, case.segment_timing).seconds
    assert (
        pytest.approx(expected, rel=1e-9, abs=1e-9 * (1 + case.trace.makespan))
        == binned_seconds(case, bins).sum(axis=2).T
    )


@given(trace_cases(), st.integers(1, 40))
def test_every_bin_is_full_and_no_category_negative(case: TraceCase, bins: int) -> None:
    seconds, makespan = binned_seconds(case, bins), case.trace.makespan
    assert seconds.sum(axis=0) == pytest.approx(makespan / bins, rel=1e-9, abs=1e-9 * (1 + makespan))
    assert (seconds >= -1e-9 * (1 + makespan)).all()


@given(trace_cases(), st.integers(1, 20), st.integers(2, 5))
def test_finer_bins_add_up_to_coarser_ones(case: TraceCase, bins: int, refinement: int) -> None:
    coarse, fine = binned_seconds(case, bins), binned_seconds(case, bins * refinement)
    merged = fine.reshape(*coarse.shape, refinement).sum(axis=3)
    assert merged == pytest.approx(coarse, rel=1e-9, abs=1e-9 * (1 + case.trace.makespan))


@pytest.mark.parametrize("steps", [1, 2])
@given(drawn=scenarios())
@examples(8)
def test_bins_sum_to_the_breakdown_in_training_steps(steps: int, drawn: Scenario) -> None:
    check_bins_sum_to_breakdown(simulate(drawn.with_overrides(f"steps={steps}")))


@pytest.mark.parametrize(
    "changes",
    [
        ("degradations.slow=[{gpu: 3, speed: 0.7}]",),
        ("degradations.jitter={std: 0.05}",),
        ("cost.network=shared",),
        ("layout.overlap_p2p_comm=false", "steps=2"),
    ],
)
def test_bins_sum_to_the_breakdown_where_ranks_differ(changes: tuple[str, ...]) -> None:
    check_bins_sum_to_breakdown(simulate(SMALL.with_overrides(*changes)))


SMALL = Scenario.from_mapping(
    {
        "model": {"preset": "gpt-tiny", "vocab": 50432}, "cluster": {"name": "dgx-a100", "gpus": 8},
        "layout": {"tp": 2, "pp": 2, "dp": 2, "data": "zero1"}, "schedule": "1f1b",
        "training": {"sequence": 512, "global_batch": 16, "microbatch": 2, "precision": "bf16"},
    }
)  # fmt: skip


def check_bins_sum_to_breakdown(result: SimulationResult) -> None:
    trace_table = build_trace_table(result.trace, result.program, result.scenario.steps)
    dominant = dominant_categories(trace_table, result.cost.time_segment, bin_count=50)
    assert dominant.is_complete
    expected = result.breakdown.seconds * result.scenario.steps
    assert dominant.seconds == pytest.approx(expected, rel=1e-9, abs=1e-9 * dominant.makespan)


def test_each_bin_has_its_category() -> None:
    """Idle for 2 s, a message of 1 s, forward of 2 s, a gap of 1 s with an exposed collective, the optimizer."""
    case = TraceCase(
        (
            SpanEvent(receive_task(), 2, 3, -1, RECEIVE),
            SpanEvent(FORWARD, 3, 5, 0),
            SpanEvent(collective_task("dp"), 5, 6, 1, DATA),
            SpanEvent(OPTIMIZER_STEP, 6, 8, 2),
        ),
        has_pipeline=True,
    )
    assert bin_categories(case, 8) == [
        {"bubble warm-up": 1.0}, {"bubble warm-up": 1.0}, {"exposed pp": 1.0}, {"compute": 1.0}, {"compute": 1.0},
        {"exposed dp": 1.0}, {"optimizer": 1.0}, {"optimizer": 1.0},
    ]  # fmt: skip


def test_exposed_transfers_are_in_the_bins_in_which_they_ran() -> None:
    """A gap from 1 to 6: two queued messages, 2 to 3 and 4 to 6; the first second and the one between are bubble."""
    case = TraceCase(
        (
            SpanEvent(FORWARD, 0, 1),
            SpanEvent(send_task(), 2, 3, 0, SEND),
            SpanEvent(send_task(), 4, 6, 0, SEND),
            SpanEvent(BACKWARD, 6, 7, 2),
        ),
        has_pipeline=True,
    )
    categories = [next(iter(seconds_by_category)) for seconds_by_category in bin_categories(case, 7)]
    bubble, exposed = "bubble warm-up", "exposed pp"
    assert categories == ["compute", bubble, exposed, bubble, exposed, exposed, "compute"]


def test_segment_categories_are_spread_evenly_except_for_the_waits_of_a_run() -> None:
    """9 s of work in each run; the second waits for 3 s more."""
    case = TraceCase(
        (SpanEvent(ComputeTask(MIXED), 0, 9), SpanEvent(ComputeTask(MIXED), 9, 21, 0, waited=3.0)),
        timings={MIXED: MIXED_TIMING},
    )
    first, second = binned_seconds(case, 21)[:, 0, :9], binned_seconds(case, 21)[:, 0, 9:]
    compute, wait = TimeCategory.COMPUTE.index, TimeCategory.WAIT.index
    assert first[compute] == pytest.approx(5 / 9)
    assert second[compute] == pytest.approx(5 / 12)
    assert first[wait] == pytest.approx(0)
    assert second[wait] == pytest.approx(3 / 12)


def test_a_bin_is_labelled_by_its_dominant_category() -> None:
    """Bins of 2 s: forward for 1.5 s and 0.5 s of a collective; 0.875 s of the collective, and the optimizer."""
    case = TraceCase(
        (
            SpanEvent(FORWARD, 0, 1.5),
            SpanEvent(collective_task("dp"), 1.5, 2.875, 0, DATA),
            SpanEvent(OPTIMIZER_STEP, 2.875, 4, 1),
        )
    )
    dominant = dominant_categories(case.trace_table, case.segment_timing, bin_count=2)
    assert [TIME_CATEGORIES[index] for index in dominant.category[0]] == [TimeCategory.COMPUTE, TimeCategory.OPTIMIZER]
    assert dominant.seconds[0, TimeCategory.EXPOSED_DP.index] == pytest.approx(1.375)


def test_of_too_many_classes_evenly_spaced_ranks_are_shown() -> None:
    events = tuple(SpanEvent(FORWARD, 0, 1.0 + rank, -1, rank=rank) for rank in range(9))
    case = TraceCase(events, tuple(range(9)))
    all_classes = dominant_categories(case.trace_table, case.segment_timing, bin_count=9)
    sampled = dominant_categories(case.trace_table, case.segment_timing, bin_count=9, max_classes=3)
    assert all_classes.is_complete
    assert not sampled.is_complete
    assert sampled.ranks.tolist() == [0, 4, 8]
    assert sampled.makespan == all_classes.makespan == 9.0
    assert (sampled.category == all_classes.category[[0, 4, 8]]).all()
    assert sampled.seconds == pytest.approx(all_classes.seconds[[0, 4, 8]])


def test_the_largest_class_is_always_shown() -> None:
    """Rank 1 represents ten ranks, each other one only itself."""
    events = tuple(SpanEvent(FORWARD, 0, 1.0, -1, rank=rank) for rank in range(6))
    case = TraceCase(events, (0, 1, 2, 3, 4, 5, *[1] * 9))
    assert 1 in dominant_categories(case.trace_table, case.segment_timing, bin_count=1, max_classes=3).ranks
