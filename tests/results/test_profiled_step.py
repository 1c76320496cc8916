"""Profiled steps of synthetic spans: every instant counts once, whatever overlaps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.results.profiled_step import (
    GPU_SPAN_KINDS,
    GpuSpanKind,
    GpuSpanLabel,
    ProfiledCollective,
    RankSpans,
    collective_wait_seconds,
    median_step,
)

LABELS = tuple(GpuSpanLabel(kind.value, kind) for kind in GPU_SPAN_KINDS)
Span = tuple[float, float, GpuSpanKind, int, int]  # start, duration, kind, stream, step


def rank_spans(*spans: Span, steps: int = 1, rank: int = 0) -> RankSpans:
    starts, durations, kinds, streams, step = zip(*sorted(spans, key=lambda span: span[0]), strict=True)
    start = np.array(starts, dtype=np.float64)
    label = np.array([GPU_SPAN_KINDS.index(kind) for kind in kinds])
    end = start + np.array(durations)
    return RankSpans(rank, start, end, np.array(streams), label, np.array(step), LABELS, tuple(range(steps)))


SPANS = st.lists(
    st.tuples(
        st.floats(0, 1), st.floats(1e-3, 1), st.sampled_from(GPU_SPAN_KINDS), st.integers(0, 3), st.integers(0, 0)
    ),
    min_size=1,
    max_size=30,
)


@given(spans=SPANS)
def test_categories_sum_to_the_step_and_nothing_counts_twice(spans: list[Span]) -> None:
    step = median_step([rank_spans(*spans)])
    (rank_step,) = step.ranks
    assert rank_step.category_seconds.sum() == pytest.approx(step.step_time)
    assert (rank_step.category_seconds >= -1e-12).all()
    sample_times = np.linspace(0, step.step_time, 500, endpoint=False) + step.step_time / 1000
    is_running = (rank_step.spans.start <= sample_times[:, None]) & (sample_times[:, None] < rank_step.spans.end)
    is_compute = rank_step.spans.kind < 9
    expected = is_running[:, is_compute].any(axis=1).mean() * step.step_time
    assert rank_step.category_seconds[0] == pytest.approx(expected, abs=step.step_time * (2 * len(spans) + 1) / 500)
    assert rank_step.comm_seconds - rank_step.hidden_seconds == pytest.approx(rank_step.category_seconds[1], abs=1e-12)
    assert (
        sum(stream_seconds[:3].sum() for stream_seconds in rank_step.stream_seconds().values())
        >= rank_step.category_seconds[:3].sum() - 1e-12
    )


def test_compute_has_precedence_over_communication_and_that_over_copies() -> None:
    step = median_step(
        [
            rank_spans(
                (0.0, 4.0, GpuSpanKind.HOST, 1, 0), (1.0, 2.0, GpuSpanKind.COMMUNICATION, 2, 0),
                (2.0, 3.0, GpuSpanKind.NORM, 3, 0), (6.0, 1.0, GpuSpanKind.MATMUL, 3, 0),
            )
        ]
    )  # fmt: skip
    assert step.category_seconds.tolist() == [4.0, 1.0, 1.0, 1.0]
    assert (step.comm_seconds, step.hidden_seconds) == (2.0, 1.0)


def test_a_step_starts_with_a_compute_kernel() -> None:
    """Communication prefetched for a step counts in the step before."""
    spans = [(start, 1.0, GpuSpanKind.MATMUL, 7, step) for step, start in enumerate((0.0, 10.0, 24.0, 36.0))]
    prefetches = [
        (start - 2.0, 1.0, GpuSpanKind.COMMUNICATION, 20, step) for step, start in ((1, 10.0), (2, 24.0), (3, 36.0))
    ]
    step = median_step([rank_spans(*spans, *prefetches, steps=4)])
    assert step.step_times.tolist() == [10.0, 14.0, 12.0]
    assert (step.step_number, step.step_time) == (2, 12.0)
    assert step.category_seconds.tolist() == [1.0, 1.0, 0.0, 10.0]


def test_the_median_of_an_even_count_is_the_shorter_middle_step() -> None:
    starts = np.cumsum([0.0, 4.0, 1.0, 3.0, 2.0])
    step = median_step(
        [rank_spans(*((start, 0.5, GpuSpanKind.NORM, 7, n) for n, start in enumerate(starts.tolist())), steps=5)]
    )
    assert (step.step_number, step.step_time) == (3, 2.0)


def test_steps_of_ranks_may_start_at_different_times_and_are_averaged() -> None:
    """A later pipeline rank starts later, and takes as long."""
    first = rank_spans((0.0, 2.0, GpuSpanKind.NORM, 7, 0), (10.0, 2.0, GpuSpanKind.NORM, 7, 1), steps=2)
    second = rank_spans((3.0, 4.0, GpuSpanKind.NORM, 7, 0), (13.0, 4.0, GpuSpanKind.NORM, 7, 1), steps=2, rank=1)
    step = median_step([first, second])
    assert [rank.step_time for rank in step.ranks] == [10.0, 10.0]
    assert step.category_seconds.tolist() == [3.0, 0.0, 0.0, 7.0]
    assert step.kind_totals[0][GPU_SPAN_KINDS.index(GpuSpanKind.NORM)] == 1.0


def test_a_single_step_lasts_until_its_last_span_or_as_given() -> None:
    first = rank_spans((1.0, 2.0, GpuSpanKind.NORM, 7, 0))
    second = rank_spans((2.0, 5.0, GpuSpanKind.NORM, 7, 0), (9.0, 1.0, GpuSpanKind.NORM, 7, -1), rank=1)
    assert median_step([first, second]).step_time == 6.0
    given_step = median_step([first, second], 8.0)
    assert given_step.step_time == 8.0
    assert given_step.ranks[0].category_seconds.tolist() == [2.0, 0.0, 0.0, 6.0]


def test_collective_wait_is_for_the_last_member_if_all_are_profiled() -> None:
    """The n-th collective of a group on one rank is matched with the n-th on the others, whatever runs between."""
    pair, three = (ProfiledCollective("all_reduce", size, 8.0, members=tuple(range(size))) for size in (2, 3))
    index = GPU_SPAN_KINDS.index(GpuSpanKind.COMMUNICATION)
    labels = (
        *LABELS[:index],
        replace(LABELS[index], collective=pair),
        *LABELS[index + 1 :],
        replace(LABELS[index], collective=three),
    )

    def collective_spans(rank: int, *durations: float) -> RankSpans:
        starts = np.cumsum([0.0, *durations])
        spans = zip(starts.tolist(), durations, strict=False)
        rank_step = rank_spans(
            *((start, duration, GpuSpanKind.COMMUNICATION, 7, 0) for start, duration in spans), rank=rank
        )
        label = np.where(np.arange(len(durations)) == len(durations) - 1, len(labels) - 1, rank_step.label_index)
        return replace(rank_step, labels=labels, label_index=label)

    assert collective_wait_seconds(
        [collective_spans(0, 5.0, 2.0, 9.0), collective_spans(1, 3.0, 6.0, 1.0)], 0
    ) == pytest.approx((2.0 + 4.0) / 2)
