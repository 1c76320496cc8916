"""Timeline boxes: merging of spans by action and to a maximum count."""

from collections.abc import Callable

import numpy as np
import pytest

from clustersim.report.row_selection import sample_rows
from clustersim.report.theme import CATEGORY_STYLES, CategoryStyle
from clustersim.report.timeline_boxes import merge_spans
from clustersim.report.timeline_data import PipelineTimeline, TimelineSpans

Make = Callable[..., PipelineTimeline]


def alternating_spans(count: int) -> TimelineSpans:
    """One row of consecutive spans: forwards twice as long as the backwards between them."""
    length = np.where(np.arange(count) % 2 == 0, 2.0, 1.0)
    end = np.cumsum(length)
    category = np.where(
        np.arange(count) % 2 == 0,
        CATEGORY_STYLES.index(CategoryStyle.FORWARD),
        CATEGORY_STYLES.index(CategoryStyle.BACKWARD),
    )
    zeros, minus_ones = np.zeros(count, dtype=np.int64), np.full(count, -1)
    start = end - length
    return TimelineSpans(
        zeros,
        zeros,
        category,
        np.arange(count) // 2,
        zeros,
        start,
        start,
        end,
        start * 0,
        minus_ones,
        minus_ones,
        minus_ones,
        start * 0,
        start * 0,
        texts=(),
    )


def test_spans_of_one_action_are_merged() -> None:
    spans = alternating_spans(4)
    same = TimelineSpans(
        *(getattr(spans, name) for name in ("row", "lane")),
        np.zeros(4, dtype=np.int64),
        np.zeros(4, dtype=np.int64),
        *(
            getattr(spans, name)
            for name in (
                "chunk",
                "waiting_since",
                "start",
                "end",
                "bytes",
                "name",
                "detail",
                "cause",
                "waited",
                "slowed",
            )
        ),
        texts=(),
    )
    joined = merge_spans(same, np.array([0]), by_action=True, max_boxes=10_000)
    assert len(joined) == 1
    assert (joined.start[0], joined.end[0]) == (0.0, 6.0)
    assert joined.order[: joined.first[1]].tolist() == [0, 1, 2, 3]
    assert len(merge_spans(same, np.array([0]), by_action=False, max_boxes=10_000)) == 4


def test_actions_are_not_merged_below_the_limit() -> None:
    assert len(merge_spans(alternating_spans(1000), np.array([0]), by_action=True, max_boxes=10_000)) == 1000


@pytest.mark.parametrize("count", [10_001, 200_000])
def test_box_limit_keeps_all_spans(count: int) -> None:
    spans = alternating_spans(count)
    joined = merge_spans(spans, np.array([0]), by_action=True, max_boxes=10_000)
    assert len(joined) <= 10_000
    assert np.array_equal(np.sort(joined.order), np.arange(count))
    assert joined.first[-1] == count
    assert joined.end.max() == spans.end.max()
    assert joined.bin_seconds > 0


def test_merged_box_has_the_dominant_category() -> None:
    joined = merge_spans(alternating_spans(200_000), np.array([0]), by_action=True, max_boxes=10_000)
    assert set(joined.category.tolist()) == {CATEGORY_STYLES.index(CategoryStyle.FORWARD)}


def test_hidden_rows_have_no_boxes(make_timeline: Make) -> None:
    spans = make_timeline(4, 4).spans
    joined = merge_spans(spans, np.array([1, 3]), by_action=True, max_boxes=10_000)
    assert set(spans.row[joined.order].tolist()) == {1, 3}


def test_no_spans_give_no_boxes() -> None:
    assert len(merge_spans(alternating_spans(0), np.array([0]), by_action=True, max_boxes=10_000)) == 0


def test_first_and_last_rows_are_selected() -> None:
    rows = sample_rows(16_384)
    assert (rows[0], rows[-1], len(np.unique(rows))) == (0, 16_383, 64)


def test_zero_length_box_keeps_its_category() -> None:
    spans = alternating_spans(2)
    assert spans.category[1] == CATEGORY_STYLES.index(CategoryStyle.BACKWARD)
    end = np.array([2.0, 2.0])
    zero_length = TimelineSpans(
        *(end if name == "end" else getattr(spans, name) for name in TimelineSpans.__slots__[:14]), texts=()
    )
    assert merge_spans(zero_length, np.array([0]), by_action=False, max_boxes=10_000).category[
        1
    ] == CATEGORY_STYLES.index(CategoryStyle.BACKWARD)
