"""The rank heatmap in a browser: rows are ranks, cells dominant time categories; a click selects a class."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.common.units import Dimension, parse_quantity
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DISPLAY_AXES, PIPELINE
from clustersim.report.draw.rank_heatmap import RankHeatmap, build_heatmap, heatmap_panel
from clustersim.report.draw.timeline_figure import timeline_panel
from clustersim.report.html_document import html_document
from clustersim.report.result_timeline import build_timeline
from clustersim.report.row_selection import select_ranks
from clustersim.results.dominant_categories import DominantCategories, dominant_categories
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import BUBBLE_CATEGORIES, EXPOSED_CATEGORIES, TIME_CATEGORIES, TimeCategory
from clustersim.results.trace_table import build_trace_table

pytestmark = pytest.mark.browser

SLOW_RANK = 5  # of tp 2, cp 1, dp 4, pp 2: dp 2, pp 0, tp 1
ROWS_JS = """() => {
    const { y, z } = document.getElementById("heatmap").data[0];
    return z.map((row, place) => [y[place], y[place + 1], Array.from(row)]);
}"""


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return simulate(
        Scenario.from_mapping(
            {
                "model": {"preset": "gpt-tiny", "vocab": 50432},
                "cluster": {"name": "dgx-a100", "gpus": 16},
                "layout": {"tp": 2, "pp": 2, "dp": 4},
                "schedule": "1f1b",
                "training": {"sequence": 512, "global_batch": 32, "microbatch": 2, "precision": "bf16"},
                "degradations": {"slow": [{"gpu": SLOW_RANK, "speed": 0.6}]},
            }
        )
    )


def write_page(tmp_path: Path, heatmap: RankHeatmap | None) -> Path:
    assert heatmap is not None
    path = tmp_path / "heatmap.html"
    path.write_text(html_document("heatmap", [heatmap_panel(heatmap)]), encoding="utf-8")
    return path


def ranks_by_stage(result: SimulationResult) -> list[int]:
    """All ranks in row order."""
    axes = [result.scenario.layout.rank_coordinates(axis) for axis in result.scenario.layout.axes]
    return np.lexsort(axes).tolist()


def dominant_category(result: SimulationResult, rank: int, hover_text: str) -> str:
    """The breakdown's category of a rank at the time named by a hover text such as "1.2 ms to 1.3 ms"."""
    heatmap = build_heatmap(result)
    assert heatmap is not None
    categories = heatmap.dominant.category[heatmap.dominant.ranks.tolist().index(result.trace.representative[rank])]
    start = re.search(r"([\d.]+ \w+) to ", hover_text)
    assert start is not None
    time = parse_quantity(start[1], Dimension.TIME) * (1 + 1e-3)
    return TIME_CATEGORIES[categories[int(time / heatmap.dominant.makespan * len(categories))]].value


def screen_position(page: Any, row: float, time: float) -> tuple[float, float]:
    """Screen coordinates of a row and a time in axis units."""
    position = page.js(
        """([row, time]) => {
            const plot = document.getElementById("heatmap"), box = plot.getBoundingClientRect();
            const { xaxis, yaxis } = plot._fullLayout;
            return [box.left + xaxis._offset + xaxis.l2p(time), box.top + yaxis._offset + yaxis.l2p(row)];
        }""",
        [row, time],
    )
    return position[0], position[1]


def test_rows_equal_dominant_categories(
    open_page: Callable[..., Any], tmp_path: Path, result: SimulationResult
) -> None:
    page = open_page(write_page(tmp_path, build_heatmap(result)))
    rows = page.js(ROWS_JS)
    dominant = dominant_categories(
        build_trace_table(result.trace, result.program), result.cost.time_segment, bin_count=len(rows[0][2])
    )
    class_index = np.searchsorted(dominant.ranks, result.trace.representative)
    assert [row[:2] for row in rows] == [[rank - 0.5, rank + 0.5] for rank in range(16)]
    for rank, row in zip(ranks_by_stage(result), rows, strict=True):
        assert row[2] == dominant.category[class_index[rank]].tolist()
    assert page.quiet(), (page.console_messages, page.requests)


def test_hover_text_and_click_selection(
    open_page: Callable[..., Any], tmp_path: Path, result: SimulationResult
) -> None:
    page = open_page(write_page(tmp_path, build_heatmap(result)))
    row = ranks_by_stage(result).index(SLOW_RANK)
    for time in (3.0, 3.1):
        page.page.mouse.move(*screen_position(page, row, time))
    page.until(lambda: f"rank {SLOW_RANK}, " in page.page.inner_text("#heatmap-words"))
    hover_text = page.page.inner_text("#heatmap-words")
    assert f"mostly {dominant_category(result, SLOW_RANK, hover_text)}" in hover_text
    page.page.mouse.click(*screen_position(page, row, 3.1))
    text = page.page.inner_text("#heatmap-row")
    assert f"Rank {SLOW_RANK}: pp 0, dp 2, tp 1, node 0" in text
    assert "No other rank does the same." in text
    representative = int(np.flatnonzero(np.bincount(result.trace.representative) > 1)[0])
    equivalent = np.flatnonzero(result.trace.representative == representative)
    page.page.fill("#heatmap-rank", str(equivalent[-1]))
    page.page.keyboard.press("Enter")
    text = page.page.inner_text("#heatmap-row")
    assert f"{len(equivalent)} ranks do the same at the same times" in text
    assert f"Rank {representative} was simulated for them." in text
    seconds = result.breakdown.rank_seconds(representative)
    assert f"compute {1000 * seconds['compute']:.4g} ms" in text
    assert page.quiet()


def test_rank_order_by_replica(open_page: Callable[..., Any], tmp_path: Path, result: SimulationResult) -> None:
    page = open_page(write_page(tmp_path, build_heatmap(result)))
    page.page.select_option("select[data-figure=heatmap]", "1")
    page.until(lambda: page.drawn("heatmap") > 1)
    heatmap = build_heatmap(result)
    assert heatmap is not None
    axes = [result.scenario.layout.mesh.rank_coordinates(axis) for axis in DISPLAY_AXES]
    row = np.lexsort(axes).tolist().index(SLOW_RANK)
    assert (
        page.js(ROWS_JS)[row][2] == heatmap.dominant.category[heatmap.dominant.ranks.tolist().index(SLOW_RANK)].tolist()
    )


def test_symbols_mark_communication_and_waiting(
    open_page: Callable[..., Any], tmp_path: Path, result: SimulationResult
) -> None:
    """Each symbol is in the middle of a cell of its kind, and all long intervals of these kinds have symbols."""
    heatmap = build_heatmap(result)
    page = open_page(write_page(tmp_path, heatmap))
    rows = [cells for _, _, cells in page.js(ROWS_JS)]
    size, bins = page.facts("heatmap")["size"], len(rows[0])
    symbols = page.js("() => document.getElementById('heatmap').data.slice(1).map(({ x, y }) => [x, y])")
    assert 100 < sum(len(x) for x, _ in symbols) <= 2000
    kinds = (
        {category.index for category in EXPOSED_CATEGORIES.values()},
        {TimeCategory.WAIT.index, *(category.index for category in BUBBLE_CATEGORIES)},
    )
    assert heatmap is not None
    for (x, y), kind in zip(symbols, kinds, strict=True):
        bin_indices = (np.array(x) * size / heatmap.dominant.makespan * bins).astype(int).tolist()
        assert {rows[round(row)][position] for row, position in zip(y, bin_indices, strict=True)} <= kind
    waiting = np.isin(heatmap.dominant.category[:, -40:], list(kinds[1])).all(axis=1)
    rows_waiting_last = {
        round(row)
        for row, position in zip(symbols[1][1], symbols[1][0], strict=True)
        if position * size > 0.95 * result.step_time
    }
    classes = np.searchsorted(heatmap.dominant.ranks, result.trace.representative)
    assert {row for row, rank in enumerate(ranks_by_stage(result)) if waiting[classes[rank]]} <= rows_waiting_last


def test_rank_links_to_its_timeline_row(
    open_page: Callable[..., Any], tmp_path: Path, result: SimulationResult
) -> None:
    heatmap, timeline = build_heatmap(result), build_timeline(result, select_ranks(result))
    assert heatmap is not None
    path = tmp_path / "both.html"
    cards = [heatmap_panel(heatmap), timeline_panel(timeline)]
    path.write_text(html_document("both", cards), encoding="utf-8")
    page = open_page(path)
    classes = result.trace.representative.tolist()
    shown = {classes[row.rank]: row.rank for row in timeline.rows}
    missing = next(rank for rank in range(result.rank_count) if classes[rank] not in shown)
    for rank, link_text in (
        (SLOW_RANK, f"rank {SLOW_RANK} in the timeline"),
        (missing, f"Rank {missing} is not shown in the timeline."),
    ):
        page.page.fill("#heatmap-rank", str(rank))
        page.page.keyboard.press("Enter")
        assert link_text in page.page.inner_text("#heatmap-row")
        assert page.page.locator("#heatmap-row button").count() == (rank == SLOW_RANK)
    assert page.quiet()


def test_large_heatmap_is_downsampled_until_zoomed(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """131,072 ranks, one of them in a class of its own: it is visible unzoomed, and zooming in shows single rows."""
    layout, bins, odd_rank = Layout(tp=8, pp=16, dp=1024), 90, 70_000
    representative = np.arange(16)[layout.mesh.rank_coordinates(PIPELINE)] * 8192
    representative[odd_rank] = odd_rank
    ranks = np.unique(representative)
    category = np.random.default_rng(0).integers(0, len(TIME_CATEGORIES), (len(ranks), bins)).astype(np.uint8)
    dominant = DominantCategories(
        ranks, representative, np.full((len(ranks), len(TIME_CATEGORIES)), 0.5), category, 6.5
    )
    page = open_page(
        write_page(tmp_path, RankHeatmap(dominant, layout, np.arange(layout.world_size) // 8)), width=390, dark=True
    )
    rows = page.js(ROWS_JS)
    assert 256 <= len(rows) <= 512
    row = np.lexsort([layout.rank_coordinates(axis) for axis in layout.axes]).tolist().index(odd_rank)
    odd_cells = category[ranks.tolist().index(odd_rank)].tolist()
    assert next(cells for low, high, cells in rows if low < row < high) == odd_cells
    page.relayout("heatmap", {"yaxis.range[0]": row + 4.5, "yaxis.range[1]": row - 5.5})
    rows = page.js(ROWS_JS)
    assert [high - low for low, high, _ in rows] == [1.0] * 10
    assert rows[5][2] == odd_cells
    assert f"rank {odd_rank} " in page.js("() => document.getElementById('heatmap').layout.yaxis.ticktext")
    assert page.quiet(), (page.console_messages, page.requests)
