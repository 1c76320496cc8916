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

PIPELINE: dict[str, Any] = {
    "model": {"preset": "gpt-tiny", "layers": 8}, "cluster": {"name": "dgx-a100", "gpus": 8},
    "layout": {"pp": 4, "dp": 2}, "schedule": "1f1b",
    "training": {"sequence": 512, "global_batch": 32, "microbatch": 2, "precision": "bf16"},
}  # fmt: skip
FORWARD = (MicrobatchRange(ActionKind.FORWARD, 3, 9),)


def path(lengths: list[float], *, stages: int = 2, word: str = "stage", steps: int = 1) -> CriticalPathView:
    """Pieces of so many seconds, on one stage after the other."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    ranks = np.arange(len(lengths)) % stages
    pieces = tuple(
        PathSection(rank, rank, start, end, PathLink.MESSAGE if number else PathLink.BEGINNING, FORWARD, ())
        for number, (rank, start, end) in enumerate(zip(ranks.tolist(), starts.tolist(), ends.tolist(), strict=True))
    )
    parts = np.zeros((stages, len(TIME_CATEGORIES)))
    np.add.at(parts[:, TimeCategory.COMPUTE.index], ranks, lengths)
    legs = PathIntervals(ranks, ranks, np.full(len(lengths), TimeCategory.COMPUTE.index), starts, ends)
    labels = tuple(f"{word} {number}" for number in range(stages))
    short = tuple(map(str, range(stages)))
    return CriticalPathView(
        CriticalPathSections(pieces, parts, legs), PipelineRowLabels(labels, short, word), 16 // steps, steps
    )


def rows(found: CriticalPathView, title: str = "Longest pieces") -> list[list[str]]:
    """The text of the cells of a table of the card, by row."""
    table = critical_path_panel(found).html.split(f"<h3>{title}")[1].split("</table>")[0]
    lines = re.findall(r"<tr.*?</tr>", table)
    lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
    return [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", line)] for line in lines]


def column(figure_trace: dict[str, Any], name: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(figure_trace[name]["bdata"]), dtype=figure_trace[name]["dtype"])


def test_a_piece_says_where_it_is_what_it_does_and_what_it_waited_for() -> None:
    _, first, second, end = rows(path([1.0, 2.0]))
    assert first == ["0 s", "stage 0 (rank 0)", "forward of microbatches 3 to 9", "1 s"]
    after = "forward of microbatches 3 to 9; after a message from stage 0 (rank 0)"
    assert second == ["1 s", "stage 1 (rank 1)", after, "2 s"]
    assert end[-1] == "3.000 s"


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (3, 3, "forward of microbatch 3 (step 1)"),
        (9, 9, "forward of microbatch 1 (step 2)"),
        (8, 9, "forward of microbatches 0 to 1 (step 2)"),
        (7, 9, "forward of microbatches 7 (step 1) to 1 (step 2)"),
    ],
)
def test_microbatches_are_counted_in_their_step_as_on_the_timeline(first: int, last: int, words: str) -> None:
    found = path([1.0, 1.0], steps=2)  # of 8 microbatches
    piece = replace(found.path.sections[0], passes=(MicrobatchRange(ActionKind.FORWARD, first, last),))
    lines = rows(replace(found, path=replace(found.path, sections=(piece, found.path.sections[1]))))
    assert lines[1][2] == words


def test_short_pieces_between_long_ones_share_a_line() -> None:
    lines = rows(path([5.0, *[1 / 128] * 64, 5.0, *[1 / 128] * 16], stages=3))[1:-1]
    assert [line[-1] for line in lines] == ["5 s", "500 ms", "5 s", "125 ms"]
    assert lines[1][1:3] == ["stages 0 to 2", "64 pieces of at most 7.812 ms: forward of microbatches 3 to 9"]


def test_pieces_that_take_no_time_have_no_line() -> None:
    lines = rows(path([1.0, 0.0, 1.0]))[1:-1]
    assert len(lines) == 2
    assert "after a message from stage 1" in lines[1][2]


@pytest.mark.parametrize("many", [2, 5, 13, 300])
def test_lines_are_few_and_follow_each_other(many: int) -> None:
    lengths = np.random.default_rng(many).integers(1, 9, many) / 1024
    lines = rows(path(lengths.tolist()))[1:-1]
    assert len(lines) <= 12
    assert lines[0][0] == "0 s"
    took = sum(parse_quantity(line[-1], Dimension.TIME) for line in lines)
    assert took == pytest.approx(lengths.sum(), rel=1e-2)


def test_stages_sum_to_the_step_time() -> None:
    result = simulate(Scenario.from_mapping(PIPELINE).with_overrides("steps=2"))
    found = build_critical_path(result)
    assert found is not None
    assert found.path.category_seconds.sum() / 2 == pytest.approx(result.step_time, rel=1e-12)
    head, *stages, step = rows(found, "By ")
    assert [row[0] for row in stages] == [f"stage {number}" for number in range(4)]
    known = {
        name: seconds for name, seconds in result.critical_path_breakdown.items() if seconds > 1e-9 * result.step_time
    }
    assert head[1:-1] == list(known)
    assert "By stage, the mean of 2 steps" in critical_path_panel(found).html
    assert step[0] == "step"


def test_the_bar_reaches_from_the_beginning_to_the_end() -> None:
    found = build_critical_path(simulate(Scenario.from_mapping(PIPELINE)))
    assert found is not None
    figure = path_figure(found)
    parts = [trace for trace in figure.traces if trace["name"] != "stage"]
    (stages,) = (trace for trace in figure.traces if trace["name"] == "stage")
    whole = figure.layout["xaxis"]["range"][1]
    assert sum(column(trace, "x").sum() for trace in parts) == pytest.approx(whole)
    assert column(stages, "x").sum() == pytest.approx(whole)
    assert set(stages["text"]) == {"0", "1", "2", "3"}


def test_the_bar_shows_what_takes_most_of_its_time() -> None:
    """Compute for 9 ms and wait for 1 ms, in turn, then 10 s of wait: no thin bars of waits between."""
    lengths = [0.009, 0.001] * 1000 + [10.0]
    known = path(lengths, stages=1).path
    part = np.array([TimeCategory.COMPUTE.index, TimeCategory.WAIT.index] * 1000 + [TimeCategory.WAIT.index])
    found = replace(path(lengths, stages=1), path=replace(known, intervals=replace(known.intervals, category=part)))
    compute, wait = path_figure(found).traces
    assert (column(compute, "base").tolist(), column(compute, "x").tolist()) == ([0.0], pytest.approx([10.0]))
    assert (column(wait, "base").tolist(), column(wait, "x").tolist()) == (pytest.approx([10.0]), pytest.approx([10.0]))


def test_16384_stages_and_a_very_long_path_are_cut_to_what_can_be_seen() -> None:
    found = path([1.0] * 40_000, stages=16384, word="<stage>")
    card = critical_path_panel(found)
    for bar in card.figures[0].traces:
        assert len(column(bar, "x")) <= 1000
        assert column(bar, "x").sum() == pytest.approx(card.figures[0].layout["xaxis"]["range"][1])
    assert len(rows(found, "By ")) == 16 + 3
    assert "<stage>" not in card.html


def test_one_piece_on_one_stage_needs_no_tables() -> None:
    assert "<table" not in critical_path_panel(path([1.0], stages=1)).html
