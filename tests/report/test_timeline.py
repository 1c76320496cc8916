"""Timeline data in the page file; its browser side is tested in tests/browser."""

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
from tests.report.page_reader import decode_arrays

Make = Callable[..., PipelineTimeline]


def with_kernels(timeline: PipelineTimeline, per_pass: int, *, distinct: bool) -> PipelineTimeline:
    """The timeline with kernels in all passes; with random durations per pass if distinct."""
    spans = timeline.spans
    passes = np.flatnonzero(spans.lane == 0)
    templates = len(passes) if distinct else 1
    template = np.full(len(spans), -1)
    template[passes] = np.arange(templates) if distinct else 0
    share = np.random.default_rng(0).dirichlet(np.ones(per_pass), templates)
    seconds = (spans.end - spans.start)[passes[:templates]]
    kernels = KernelTemplates(
        template, np.arange(templates + 1) * per_pass, np.zeros(templates * per_pass, dtype=np.int64),
        np.zeros(templates * per_pass), (share * seconds[:, None]).ravel(), (KernelLabel("matmul", 1, ("m 1",)),),
    )  # fmt: skip
    return replace(timeline, kernels=kernels)


def test_times_and_causes_round_trip_within_a_tick(make_timeline: Make) -> None:
    timeline = make_timeline(4, 8, 2)
    drawn = build_drawing(timeline)
    arrays, lead = decode_arrays(drawn.arrays), drawn.boxes.first_spans()
    assert arrays["start"] * drawn.tick_seconds == pytest.approx(timeline.spans.start[lead], abs=drawn.tick_seconds)
    assert arrays["end"] * drawn.tick_seconds == pytest.approx(drawn.boxes.end, abs=drawn.tick_seconds)
    caused = np.flatnonzero(arrays["cause"] >= 0)
    assert len(caused) > 0
    assert (arrays["end"][arrays["cause"][caused]].astype(int) <= arrays["start"][caused].astype(int) + 1).all()
    waited = np.maximum(timeline.spans.start[lead] - timeline.spans.waiting_since[lead], 0.0)
    assert arrays["waiting"] * drawn.tick_seconds == pytest.approx(waited, abs=drawn.tick_seconds)


def test_kernel_durations_fill_their_pass(make_timeline: Make) -> None:
    timeline = with_kernels(make_timeline(2, 4), 7, distinct=True)
    drawn = build_drawing(timeline)
    arrays = decode_arrays(drawn.arrays)
    for span in np.flatnonzero(arrays["template"] >= 0):
        first, last = arrays["templateFirst"][arrays["template"][span] :][:2]
        kernel_seconds = arrays["gap"][first:last].sum() + arrays["duration"][first:last].sum()
        pass_seconds = (arrays["spanEnd"][span].astype(float) - arrays["spanStart"][span]) * drawn.tick_seconds
        assert kernel_seconds == pytest.approx(pass_seconds, rel=1e-5)


def test_shared_kernel_templates_do_not_grow_the_data(make_timeline: Make) -> None:
    def data_size(microbatches: int) -> int:
        timeline = with_kernels(make_timeline(4, microbatches), 1000, distinct=False)
        return sum(len(packed_array["z"]) for packed_array in build_drawing(timeline).arrays.values())

    size_of_8, size_of_64 = data_size(8), data_size(64)
    assert (
        size_of_64 < size_of_8 + 64 * 4 * 2 * 60
    )  # bytes of a pass and its message; a thousand distinct kernels would take four thousand


@pytest.mark.parametrize(
    ("limit", "caption"), [(200_000, "Kernels of 516 spans are not in this file"), (4_000, "merged with")]
)
def test_size_limit_drops_kernels_first_with_a_caption(make_timeline: Make, limit: int, caption: str) -> None:
    timeline = with_kernels(make_timeline(4, 64), 200, distinct=True)
    full, drawn = build_drawing(timeline), build_drawing(timeline, limit)
    assert timeline_caption(full) == ""
    assert sum(len(packed_array["z"]) for packed_array in drawn.arrays.values()) <= limit
    assert caption in timeline_caption(drawn)


def test_a_million_distinct_kernels_fit(make_timeline: Make) -> None:
    timeline = with_kernels(make_timeline(8, 250), 250, distinct=True)
    assert len(timeline.kernels.label) >= 1_000_000
    drawn = build_drawing(timeline)
    assert timeline_caption(drawn) == ""
    assert sum(len(packed_array["z"]) for packed_array in drawn.arrays.values()) <= MAX_ARRAY_BYTES


def test_timeline_row_limit(make_timeline: Make) -> None:
    drawn = build_drawing(make_timeline(80, 2))
    assert len(drawn.rows) == MAX_ROWS
    assert decode_arrays(drawn.arrays)["row"].max() == MAX_ROWS - 1


def test_empty_timeline(make_timeline: Make) -> None:
    timeline = make_timeline(1, 1)
    no_ints, no_floats = np.zeros(0, dtype=np.int64), np.zeros(0)
    no_spans = TimelineSpans(*[no_ints] * 5, *[no_floats] * 4, *[no_ints] * 3, no_floats, no_floats, texts=())
    path = replace(
        timeline.path,
        **dict.fromkeys(("row", "lane"), no_ints),
        start=no_floats,
        end=no_floats,
        is_connected=no_ints > 0,
    )
    drawn = build_drawing(replace(timeline, spans=no_spans, path=path))
    assert timeline_figure(drawn).layout["xaxis"]["range"] == [0, 1]
    assert {
        len(array) for name, array in decode_arrays(drawn.arrays).items() if not name.endswith(("first", "First"))
    } == {0}


def test_lanes_do_not_overlap_and_stay_in_their_row() -> None:
    edges = [(centre - height / 2, centre + height / 2) for centre, height in lane_geometry(3)]
    assert edges == sorted(edges)
    assert all(low < high for low, high in edges)
    assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(edges))
    assert edges[0][0] >= -0.5 and edges[-1][1] <= 0.5


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.sampled_from(["u1", "u2", "u4", "i2", "i4", "f4", "f8"]))
def test_packed_arrays_round_trip(values: list[int], dtype: str) -> None:
    array: NDArray[np.generic] = np.array(values, dtype=np.int64).astype(dtype)
    (decoded,) = decode_arrays({"a": compress_array(array)}).values()
    assert np.array_equal(decoded, array)
    integers = np.array(values, dtype=np.int64)
    assert np.array_equal(smallest_dtype(integers).astype(np.int64), integers)


def test_dtype_without_typed_array_is_rejected() -> None:
    with pytest.raises(ValueError, match="no typed array of int64; one of f4, f8"):
        compress_array(np.zeros(1, dtype=np.int64))
