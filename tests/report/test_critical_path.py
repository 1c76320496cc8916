"""The critical path's bar and tables."""

import base64
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.common.units import Dimension, parse_quantity
from clustersim.program.action import ActionKind
from clustersim.report.labels import PipelineRowLabels
from clustersim.report.panels.critical_path import (
    CriticalPathView,
    build_critical_path,
    critical_path_panel,
    path_figure,
)
from clustersim.results.critical_path_segments import (
    CriticalPathSections,
    MicrobatchRange,
    PathIntervals,
    PathLink,
    PathSection,
)
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory
from tests.sentences import parts

PIPELINE_MAPPING: dict[str, Any] = {
    "model": {"preset": "gpt-tiny", "layers": 8}, "cluster": {"name": "dgx-a100", "gpus": 8},
    "layout": {"pp": 4, "dp": 2}, "schedule": "1f1b",
    "training": {"sequence": 512, "global_batch": 32, "microbatch": 2, "precision": "bf16"},
}  # fmt: skip
FORWARD_PASSES = (MicrobatchRange(ActionKind.FORWARD, 3, 9),)


def synthetic_path(
    durations: list[float], *, stages: int = 2, stage_label: str = "stage", steps: int = 1
) -> CriticalPathView:
    """A critical path of segments of the given durations in seconds, cycling over the stages."""
    ends = np.cumsum(durations)
    starts = ends - durations
    ranks = np.arange(len(durations)) % stages
    segments = tuple(
        PathSection(rank, rank, start, end, PathLink.MESSAGE if index else PathLink.BEGINNING, FORWARD_PASSES, ())
        for index, (rank, start, end) in enumerate(zip(ranks.tolist(), starts.tolist(), ends.tolist(), strict=True))
    )
    category_seconds = np.zeros((stages, len(TIME_CATEGORIES)))
    np.add.at(category_seconds[:, TimeCategory.COMPUTE.index], ranks, durations)
    category_spans = PathIntervals(ranks, ranks, np.full(len(durations), TimeCategory.COMPUTE.index), starts, ends)
    labels = tuple(f"{stage_label} {index}" for index in range(stages))
    short_labels = tuple(map(str, range(stages)))
    return CriticalPathView(
        CriticalPathSections(segments, category_seconds, category_spans),
        PipelineRowLabels(labels, short_labels, stage_label),
        16 // steps,
        steps,
    )


def table_cells(critical_path: CriticalPathView, title: str = "Longest sections") -> list[list[str]]:
    """Text of the cells of a table of the panel, by row."""
    table = critical_path_panel(critical_path).html.split(f"<h3>{title}")[1].split("</table>")[0]
    lines = re.findall(r"<tr.*?</tr>", table)
    lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
    return [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", line)] for line in lines]


def decode_column(figure_trace: dict[str, Any], name: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(figure_trace[name]["bdata"]), dtype=figure_trace[name]["dtype"])


def test_segment_row_describes_rank_passes_and_cause() -> None:
    _, first, second, end = table_cells(synthetic_path([1.0, 2.0]))
    assert first == ["0 s", "stage 0 (rank 0)", "forward of microbatches 3 to 9", "1 s"]
    begin, stage, passes, duration = second
    assert (begin, stage, duration) == ("1 s", "stage 1 (rank 1)", "2 s")
    assert parts("forward ... microbatches 3 to 9 ... message from stage 0 (rank 0)").fullmatch(passes)
    assert end[-1] == "3.000 s"


@pytest.mark.parametrize(
    ("first", "last", "label"),
    [
        (3, 3, "forward of microbatch 3 (step 1)"),
        (9, 9, "forward of microbatch 1 (step 2)"),
        (8, 9, "forward of microbatches 0 to 1 (step 2)"),
        (7, 9, "forward of microbatches 7 (step 1) to 1 (step 2)"),
    ],
)
def test_microbatches_are_numbered_within_their_step(first: int, last: int, label: str) -> None:
    critical_path = synthetic_path([1.0, 1.0], steps=2)  # of 8 microbatches
    segment = replace(critical_path.path.sections[0], passes=(MicrobatchRange(ActionKind.FORWARD, first, last),))
    lines = table_cells(
        replace(critical_path, path=replace(critical_path.path, sections=(segment, critical_path.path.sections[1])))
    )
    assert lines[1][2] == label


def test_short_segments_between_long_ones_are_merged() -> None:
    lines = table_cells(synthetic_path([5.0, *[1 / 128] * 64, 5.0, *[1 / 128] * 16], stages=3))[1:-1]
    assert [line[-1] for line in lines] == ["5 s", "500 ms", "5 s", "125 ms"]
    assert lines[1][1] == "stages 0 to 2"
    assert parts("64 sections ... 7.812 ms: forward ... microbatches 3 to 9").fullmatch(lines[1][2])


def test_zero_length_segments_have_no_row() -> None:
    lines = table_cells(synthetic_path([1.0, 0.0, 1.0]))[1:-1]
    assert len(lines) == 2
    assert "after a message from stage 1" in lines[1][2]


@pytest.mark.parametrize("count", [2, 5, 13, 300])
def test_rows_are_limited_and_cover_the_path(count: int) -> None:
    lengths = np.random.default_rng(count).integers(1, 9, count) / 1024
    lines = table_cells(synthetic_path(lengths.tolist()))[1:-1]
    assert len(lines) <= 12
    assert lines[0][0] == "0 s"
    total_seconds = sum(parse_quantity(line[-1], Dimension.TIME) for line in lines)
    assert total_seconds == pytest.approx(lengths.sum(), rel=1e-2)


def test_stages_sum_to_the_step_time() -> None:
    result = simulate(Scenario.from_mapping(PIPELINE_MAPPING).with_overrides("steps=2"))
    critical_path = build_critical_path(result)
    assert critical_path is not None
    assert critical_path.path.category_seconds.sum() / 2 == pytest.approx(result.step_time, rel=1e-12)
    head, *stages, step = table_cells(critical_path, "By ")
    assert [row[0] for row in stages] == [f"stage {stage}" for stage in range(4)]
    visible_categories = {
        name: seconds for name, seconds in result.critical_path_breakdown.items() if seconds > 1e-9 * result.step_time
    }
    assert head[1:-1] == list(visible_categories)
    assert "By stage, the mean of 2 steps" in critical_path_panel(critical_path).html
    assert step[0] == "step"


def test_bar_covers_the_full_step() -> None:
    critical_path = build_critical_path(simulate(Scenario.from_mapping(PIPELINE_MAPPING)))
    assert critical_path is not None
    figure = path_figure(critical_path)
    category_traces = [trace for trace in figure.traces if trace["name"] != "stage"]
    (stages,) = (trace for trace in figure.traces if trace["name"] == "stage")
    axis_end = figure.layout["xaxis"]["range"][1]
    assert sum(decode_column(trace, "x").sum() for trace in category_traces) == pytest.approx(axis_end)
    assert decode_column(stages, "x").sum() == pytest.approx(axis_end)
    assert set(stages["text"]) == {"0", "1", "2", "3"}


def test_bar_merges_to_the_dominant_category() -> None:
    """9 ms of compute and 1 ms of wait, alternating, then 10 s of wait: no thin wait bars in between."""
    lengths = [0.009, 0.001] * 1000 + [10.0]
    original = synthetic_path(lengths, stages=1).path
    category = np.array([TimeCategory.COMPUTE.index, TimeCategory.WAIT.index] * 1000 + [TimeCategory.WAIT.index])
    critical_path = replace(
        synthetic_path(lengths, stages=1),
        path=replace(original, intervals=replace(original.intervals, category=category)),
    )
    compute, wait = path_figure(critical_path).traces
    assert (decode_column(compute, "base").tolist(), decode_column(compute, "x").tolist()) == (
        [0.0],
        pytest.approx([10.0]),
    )
    assert (decode_column(wait, "base").tolist(), decode_column(wait, "x").tolist()) == (
        pytest.approx([10.0]),
        pytest.approx([10.0]),
    )


def test_large_critical_paths_are_limited_to_visible_items() -> None:
    critical_path = synthetic_path([1.0] * 40_000, stages=16384, stage_label="<stage>")
    card = critical_path_panel(critical_path)
    for bar in card.figures[0].traces:
        assert len(decode_column(bar, "x")) <= 1000
        assert decode_column(bar, "x").sum() == pytest.approx(card.figures[0].layout["xaxis"]["range"][1])
    assert len(table_cells(critical_path, "By ")) == 16 + 3
    assert "<stage>" not in card.html


def test_single_segment_has_no_tables() -> None:
    assert "<table" not in critical_path_panel(synthetic_path([1.0], stages=1)).html
