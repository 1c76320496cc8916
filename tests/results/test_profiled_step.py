"""Steps of made-up spans: every instant counts once, whatever overlaps."""

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
Span = tuple[float, float, GpuSpanKind, int, int]  # begin, lasting, kind, stream, step


def rank_of(*spans: Span, steps: int = 1, rank: int = 0) -> RankSpans:
    begin, lasting, kinds, streams, step = zip(*sorted(spans, key=lambda each: each[0]), strict=True)
    start = np.array(begin, dtype=np.float64)
    label = np.array([GPU_SPAN_KINDS.index(kind) for kind in kinds])
    end = start + np.array(lasting)
    return RankSpans(rank, start, end, np.array(streams), label, np.array(step), LABELS, tuple(range(steps)))


SPANS = st.lists(
    st.tuples(
        st.floats(0, 1), st.floats(1e-3, 1), st.sampled_from(GPU_SPAN_KINDS), st.integers(0, 3), st.integers(0, 0)
    ),
    min_size=1,
    max_size=30,
)


@given(spans=SPANS)
def test_parts_sum_to_the_step_and_count_nothing_twice(spans: list[Span]) -> None:
    step = median_step([rank_of(*spans)])
    (only,) = step.ranks
    assert only.category_seconds.sum() == pytest.approx(step.step_time)
    assert (only.category_seconds >= -1e-12).all()
    moments = np.linspace(0, step.step_time, 500, endpoint=False) + step.step_time / 1000
    running = (only.spans.start <= moments[:, None]) & (moments[:, None] < only.spans.end)
    computes = only.spans.kind < 9
    expected = running[:, computes].any(axis=1).mean() * step.step_time
    assert only.category_seconds[0] == pytest.approx(expected, abs=step.step_time * (2 * len(spans) + 1) / 500)
    assert only.comm_seconds - only.hidden_seconds == pytest.approx(only.category_seconds[1], abs=1e-12)
    assert sum(array[:3].sum() for array in only.stream_seconds().values()) >= only.category_seconds[:3].sum() - 1e-12


def test_what_computes_goes_before_what_communicates_and_that_before_copies() -> None:
    step = median_step(
        [
            rank_of(
                (0.0, 4.0, GpuSpanKind.HOST, 1, 0), (1.0, 2.0, GpuSpanKind.COMMUNICATION, 2, 0),
                (2.0, 3.0, GpuSpanKind.NORM, 3, 0), (6.0, 1.0, GpuSpanKind.MATMUL, 3, 0),
            )
        ]
    )  # fmt: skip
    assert step.category_seconds.tolist() == [4.0, 1.0, 1.0, 1.0]
    assert (step.comm_seconds, step.hidden_seconds) == (2.0, 1.0)


def test_a_step_begins_with_a_kernel_that_computes() -> None:
    """What is fetched ahead for a step counts in the one before."""
    spans = [(at, 1.0, GpuSpanKind.MATMUL, 7, step) for step, at in enumerate((0.0, 10.0, 24.0, 36.0))]
    ahead = [(at - 2.0, 1.0, GpuSpanKind.COMMUNICATION, 20, step) for step, at in ((1, 10.0), (2, 24.0), (3, 36.0))]
    step = median_step([rank_of(*spans, *ahead, steps=4)])
    assert step.step_times.tolist() == [10.0, 14.0, 12.0]
    assert (step.step_number, step.step_time) == (2, 12.0)
    assert step.category_seconds.tolist() == [1.0, 1.0, 0.0, 10.0]


def test_of_an_even_number_the_shorter_of_both_in_the_middle_is_taken() -> None:
    begins = np.cumsum([0.0, 4.0, 1.0, 3.0, 2.0])
    step = median_step([rank_of(*((at, 0.5, GpuSpanKind.NORM, 7, n) for n, at in enumerate(begins.tolist())), steps=5)])
    assert (step.step_number, step.step_time) == (3, 2.0)


def test_ranks_begin_when_they_do_and_the_mean_is_told() -> None:
    """A later pipeline rank begins later, and takes as long."""
    first = rank_of((0.0, 2.0, GpuSpanKind.NORM, 7, 0), (10.0, 2.0, GpuSpanKind.NORM, 7, 1), steps=2)
    second = rank_of((3.0, 4.0, GpuSpanKind.NORM, 7, 0), (13.0, 4.0, GpuSpanKind.NORM, 7, 1), steps=2, rank=1)
    step = median_step([first, second])
    assert [rank.step_time for rank in step.ranks] == [10.0, 10.0]
    assert step.category_seconds.tolist() == [3.0, 0.0, 0.0, 7.0]
    assert step.kind_totals[0][GPU_SPAN_KINDS.index(GpuSpanKind.NORM)] == 1.0


def test_the_only_step_lasts_as_long_as_anything_runs_or_as_is_said() -> None:
    first = rank_of((1.0, 2.0, GpuSpanKind.NORM, 7, 0))
    second = rank_of((2.0, 5.0, GpuSpanKind.NORM, 7, 0), (9.0, 1.0, GpuSpanKind.NORM, 7, -1), rank=1)
    assert median_step([first, second]).step_time == 6.0
    said = median_step([first, second], 8.0)
    assert said.step_time == 8.0
    assert said.ranks[0].category_seconds.tolist() == [2.0, 0.0, 0.0, 6.0]


def test_a_collective_waits_for_who_comes_last_and_only_where_all_are_seen() -> None:
    """The n-th of a group on one rank is the n-th on the others, whatever runs between."""
    pair, three = (ProfiledCollective("all_reduce", size, 8.0, members=tuple(range(size))) for size in (2, 3))
    place = GPU_SPAN_KINDS.index(GpuSpanKind.COMMUNICATION)
    labels = (
        *LABELS[:place],
        replace(LABELS[place], collective=pair),
        *LABELS[place + 1 :],
        replace(LABELS[place], collective=three),
    )

    def of(rank: int, *lasting: float) -> RankSpans:
        starts = np.cumsum([0.0, *lasting])
        spans = zip(starts.tolist(), lasting, strict=False)
        made = rank_of(*((at, took, GpuSpanKind.COMMUNICATION, 7, 0) for at, took in spans), rank=rank)
        label = np.where(np.arange(len(lasting)) == len(lasting) - 1, len(labels) - 1, made.label_index)
        return replace(made, labels=labels, label_index=label)

    assert collective_wait_seconds([of(0, 5.0, 2.0, 9.0), of(1, 3.0, 6.0, 1.0)], 0) == pytest.approx((2.0 + 4.0) / 2)
