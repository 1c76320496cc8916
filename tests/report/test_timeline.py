"""What of a timeline goes into the file; what the browser makes of it is in tests/browser."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from clustersim.report.draw.timeline_figure import lane_geometry, timeline_caption, timeline_figure
from clustersim.report.figure import compress_array
from clustersim.report.row_selection import MAX_ROWS
from clustersim.report.timeline_arrays import MAX_ARRAY_BYTES, build_drawing, smallest_dtype
from clustersim.report.timeline_data import KernelLabel, KernelTemplates, PipelineTimeline, TimelineSpans
from tests.report.page_reader import unpacked

Make = Callable[..., PipelineTimeline]


def with_kernels(timeline: PipelineTimeline, each: int, *, own: bool) -> PipelineTimeline:
    """The same with so many kernels in every pass, of random times where they are its own."""
    spans = timeline.spans
    passes = np.flatnonzero(spans.lane == 0)
    templates = len(passes) if own else 1
    template = np.full(len(spans), -1)
    template[passes] = np.arange(templates) if own else 0
    share = np.random.default_rng(0).dirichlet(np.ones(each), templates)
    long = (spans.end - spans.start)[passes[:templates]]
    kernels = KernelTemplates(
        template, np.arange(templates + 1) * each, np.zeros(templates * each, dtype=np.int64),
        np.zeros(templates * each), (share * long[:, None]).ravel(), (KernelLabel("matmul", 1, ("m 1",)),),
    )  # fmt: skip
    return replace(timeline, kernels=kernels)


def test_times_and_causes_come_back_to_a_tick(make_timeline: Make) -> None:
    timeline = make_timeline(4, 8, 2)
    drawn = build_drawing(timeline)
    read, lead = unpacked(drawn.arrays), drawn.boxes.first_spans()
    assert read["start"] * drawn.tick_seconds == pytest.approx(timeline.spans.start[lead], abs=drawn.tick_seconds)
    assert read["end"] * drawn.tick_seconds == pytest.approx(drawn.boxes.end, abs=drawn.tick_seconds)
    caused = np.flatnonzero(read["cause"] >= 0)
    assert len(caused) > 0
    assert (read["end"][read["cause"][caused]].astype(int) <= read["start"][caused].astype(int) + 1).all()
    waited = np.maximum(timeline.spans.start[lead] - timeline.spans.waiting_since[lead], 0.0)
    assert read["waiting"] * drawn.tick_seconds == pytest.approx(waited, abs=drawn.tick_seconds)


def test_kernels_fill_the_passes_that_they_are_in(make_timeline: Make) -> None:
    timeline = with_kernels(make_timeline(2, 4), 7, own=True)
    drawn = build_drawing(timeline)
    read = unpacked(drawn.arrays)
    for span in np.flatnonzero(read["template"] >= 0):
        first, last = read["templateFirst"][read["template"][span] :][:2]
        inside = read["gap"][first:last].sum() + read["duration"][first:last].sum()
        whole = (read["spanEnd"][span].astype(float) - read["spanStart"][span]) * drawn.tick_seconds
        assert inside == pytest.approx(whole, rel=1e-5)


def test_runs_that_share_a_template_cost_nothing_more(make_timeline: Make) -> None:
    def size(microbatches: int) -> int:
        timeline = with_kernels(make_timeline(4, microbatches), 1000, own=False)
        return sum(len(array["z"]) for array in build_drawing(timeline).arrays.values())

    few, many = size(8), size(64)
    assert (
        many < few + 64 * 4 * 2 * 60
    )  # bytes of a pass and its message; a thousand kernels of its own are four thousand


@pytest.mark.parametrize(
    ("limit", "words"), [(200_000, "Kernels of 516 spans are not in this file"), (4_000, "merged with")]
)
def test_what_is_too_large_is_left_out_the_innermost_first_and_said(
    make_timeline: Make, limit: int, words: str
) -> None:
    timeline = with_kernels(make_timeline(4, 64), 200, own=True)
    full, drawn = build_drawing(timeline), build_drawing(timeline, limit)
    assert timeline_caption(full) == ""
    assert sum(len(array["z"]) for array in drawn.arrays.values()) <= limit
    assert words in timeline_caption(drawn)


def test_a_million_own_kernels_fit(make_timeline: Make) -> None:
    timeline = with_kernels(make_timeline(8, 250), 250, own=True)
    assert len(timeline.kernels.label) >= 1_000_000
    drawn = build_drawing(timeline)
    assert timeline_caption(drawn) == ""
    assert sum(len(array["z"]) for array in drawn.arrays.values()) <= MAX_ARRAY_BYTES


def test_no_more_rows_than_a_page_bears(make_timeline: Make) -> None:
    drawn = build_drawing(make_timeline(80, 2))
    assert len(drawn.rows) == MAX_ROWS
    assert unpacked(drawn.arrays)["row"].max() == MAX_ROWS - 1


def test_nothing_happened(make_timeline: Make) -> None:
    timeline = make_timeline(1, 1)
    whole, real = np.zeros(0, dtype=np.int64), np.zeros(0)
    nothing = TimelineSpans(*[whole] * 5, *[real] * 4, *[whole] * 3, real, real, texts=())
    path = replace(timeline.path, **dict.fromkeys(("row", "lane"), whole), start=real, end=real, is_connected=whole > 0)
    drawn = build_drawing(replace(timeline, spans=nothing, path=path))
    assert timeline_figure(drawn).layout["xaxis"]["range"] == [0, 1]
    assert {len(array) for name, array in unpacked(drawn.arrays).items() if not name.endswith(("first", "First"))} == {
        0
    }


def test_lanes_do_not_overlap_and_stay_in_their_row() -> None:
    edges = [(centre - height / 2, centre + height / 2) for centre, height in lane_geometry(3)]
    assert edges == sorted(edges)
    assert all(low < high for low, high in edges)
    assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(edges))
    assert edges[0][0] >= -0.5 and edges[-1][1] <= 0.5


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.sampled_from(["u1", "u2", "u4", "i2", "i4", "f4", "f8"]))
def test_arrays_come_back_as_they_were(values: list[int], dtype: str) -> None:
    array: NDArray[np.generic] = np.array(values, dtype=np.int64).astype(dtype)
    (back,) = unpacked({"a": compress_array(array)}).values()
    assert np.array_equal(back, array)
    numbers = np.array(values, dtype=np.int64)
    assert np.array_equal(smallest_dtype(numbers).astype(np.int64), numbers)


def test_an_array_that_javascript_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="no typed array of int64; one of f4, f8"):
        compress_array(np.zeros(1, dtype=np.int64))
