from collections.abc import Callable

import numpy as np
import pytest

from clustersim.report.row_selection import sample_rows
from clustersim.report.theme import CATEGORY_STYLES, CategoryStyle
from clustersim.report.timeline_boxes import merge_spans
from clustersim.report.timeline_data import PipelineTimeline, TimelineSpans

Make = Callable[..., PipelineTimeline]


def many(count: int) -> TimelineSpans:
    """One row whose spans follow each other: forwards twice as long as the backwards between them."""
    length = np.where(np.arange(count) % 2 == 0, 2.0, 1.0)
    end = np.cumsum(length)
    look = np.where(
        np.arange(count) % 2 == 0,
        CATEGORY_STYLES.index(CategoryStyle.FORWARD),
        CATEGORY_STYLES.index(CategoryStyle.BACKWARD),
    )
    nothing, none = np.zeros(count, dtype=np.int64), np.full(count, -1)
    start = end - length
    return TimelineSpans(
        nothing,
        nothing,
        look,
        np.arange(count) // 2,
        nothing,
        start,
        start,
        end,
        start * 0,
        none,
        none,
        none,
        start * 0,
        start * 0,
        texts=(),
    )


def test_pieces_of_one_action_become_one_box() -> None:
    spans = many(4)
    same = TimelineSpans(
        *(getattr(spans, name) for name in ("row", "lane")),
        np.zeros(4, dtype=np.int64),
        np.zeros(4, dtype=np.int64),
        *(
            getattr(spans, name)
            for name in ("chunk", "waiting", "start", "end", "bytes", "name", "detail", "cause", "waited", "slowed")
        ),
        texts=(),
    )
    joined = merge_spans(same, np.array([0]), by_action=True, max_boxes=10_000)
    assert len(joined) == 1
    assert (joined.start[0], joined.end[0]) == (0.0, 6.0)
    assert joined.order[: joined.first[1]].tolist() == [0, 1, 2, 3]
    assert len(merge_spans(same, np.array([0]), by_action=False, max_boxes=10_000)) == 4


def test_actions_are_never_joined_while_they_are_few() -> None:
    assert len(merge_spans(many(1000), np.array([0]), by_action=True, max_boxes=10_000)) == 1000


@pytest.mark.parametrize("count", [10_001, 200_000])
def test_no_more_boxes_than_allowed_and_no_span_lost(count: int) -> None:
    spans = many(count)
    joined = merge_spans(spans, np.array([0]), by_action=True, max_boxes=10_000)
    assert len(joined) <= 10_000
    assert np.array_equal(np.sort(joined.order), np.arange(count))
    assert joined.first[-1] == count
    assert joined.end.max() == spans.end.max()
    assert joined.bin_seconds > 0


def test_a_merged_box_has_the_category_that_lasts_longest() -> None:
    joined = merge_spans(many(200_000), np.array([0]), by_action=True, max_boxes=10_000)
    assert set(joined.category.tolist()) == {CATEGORY_STYLES.index(CategoryStyle.FORWARD)}


def test_rows_that_are_not_shown_have_no_boxes(make_timeline: Make) -> None:
    spans = make_timeline(4, 4).spans
    joined = merge_spans(spans, np.array([1, 3]), by_action=True, max_boxes=10_000)
    assert set(spans.row[joined.order].tolist()) == {1, 3}


def test_no_spans_give_no_boxes() -> None:
    assert len(merge_spans(many(0), np.array([0]), by_action=True, max_boxes=10_000)) == 0


def test_first_and_last_row_are_always_shown() -> None:
    rows = sample_rows(16_384)
    assert (rows[0], rows[-1], len(np.unique(rows))) == (0, 16_383, 64)


def test_a_box_without_length_keeps_its_category() -> None:
    spans = many(2)
    assert spans.category[1] == CATEGORY_STYLES.index(CategoryStyle.BACKWARD)
    end = np.array([2.0, 2.0])
    still = TimelineSpans(
        *(end if name == "end" else getattr(spans, name) for name in TimelineSpans.__slots__[:14]), texts=()
    )
    assert merge_spans(still, np.array([0]), by_action=False, max_boxes=10_000).category[1] == CATEGORY_STYLES.index(
        CategoryStyle.BACKWARD
    )
