"""The run page in a real browser: no console messages, and correct contents at every zoom level."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim.common.units import format_seconds
from clustersim.report.result_timeline import build_timeline
from clustersim.report.row_selection import select_ranks
from clustersim.report.run_page import run_page
from clustersim.report.timeline_arrays import build_drawing
from clustersim.report.timeline_data import PipelineTimeline
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.browser.conftest import BrowserPage

pytestmark = pytest.mark.browser
PageOpener = Callable[..., BrowserPage]
SMALL_MAPPING: dict[str, Any] = {
    "name": "</script><b>small",
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 4, "dp": 2, "data": "zero1"},
    "training": {"sequence": 4096, "global_batch": 16},
}
BOXES_JS = """name => {
  const plot = document.getElementById(name);
  return plot.data.filter(trace => trace.type === "bar" && trace.customdata).flatMap(trace => trace.customdata.map(
    (box, index) => ({box, look: trace.name, y: trace.y[index], from: trace.base[index], long: trace.x[index],
                      words: trace.hovertext[index]}))).filter(each => each.y >= -1);
}"""


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    """A pipeline of four stages."""
    return simulate(Scenario.from_mapping(SMALL_MAPPING))


@pytest.fixture(scope="module")
def timeline(result: SimulationResult) -> PipelineTimeline:
    """The timeline of the result's page."""
    return build_timeline(result, select_ranks(result))


@pytest.fixture(scope="module")
def path(result: SimulationResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result's page."""
    target = tmp_path_factory.mktemp("page") / "page.html"
    target.write_text(run_page(result), encoding="utf-8")
    return target


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_has_no_messages_and_no_requests(open_page: PageOpener, path: Path, width: int, dark: bool) -> None:
    opened = open_page(path, width=width, dark=dark)
    assert opened.quiet(), (opened.console_messages, opened.requests)
    assert opened.page.title().startswith("</script><b>small")
    figures = opened.js("JSON.parse(document.getElementById('figures').textContent).map(figure => figure.name)")
    assert all(opened.drawn(figure) == 1 for figure in figures)
    scroll_width = opened.js("document.documentElement.scrollWidth")
    assert scroll_width <= width, "nothing is cut off or must be scrolled sideways"


def test_passes_are_drawn_at_their_times(open_page: PageOpener, path: Path, timeline: PipelineTimeline) -> None:
    opened, spans = open_page(path), timeline.spans
    size, drawn = opened.facts("timeline")["size"], build_drawing(timeline)
    boxes = {box["box"]: box for box in opened.js(BOXES_JS, "timeline") if box["box"] >= 0}
    lead = drawn.boxes.first_spans()
    passes = np.flatnonzero((spans.lane[lead] == 0) & (spans.microbatch[lead] >= 0))
    assert len(passes) >= 4 * 2 * 8  # stages, directions, microbatches; an interrupted pass has two boxes
    for box in passes.tolist():
        start, end = drawn.boxes.start[box], drawn.boxes.end[box]
        assert boxes[box]["from"] * size == pytest.approx(start, abs=2 * drawn.tick_seconds)
        assert boxes[box]["long"] * size == pytest.approx(end - start, abs=3 * drawn.tick_seconds)


def test_microbatches_are_numbered_in_their_boxes(open_page: PageOpener, path: Path) -> None:
    opened = open_page(path)
    labels = opened.js("[...document.querySelectorAll('#timeline .text text')].map(each => each.textContent)")
    assert {"0", "7"} <= set(labels)


def test_zoom_to_a_kernel_and_back(open_page: PageOpener, path: Path, result: SimulationResult) -> None:
    opened = open_page(path)
    rank = 4  # of stage 1
    task = next(
        task_id for task_id, task in enumerate(result.program.programs[1].tasks)
        if getattr(task, "action", None) is not None and str(task.action) == "1F3"
    )  # fmt: skip
    operations = result.operation_spans(rank, frozenset({task}))
    longest = int((operations.end - operations.start).argmax())
    start, end = float(operations.start[longest]), float(operations.end[longest])
    script_data = opened.facts("timeline")
    margin = 0.2 * (end - start)
    opened.relayout(
        "timeline", {"xaxis.range": [(start - margin) / script_data["size"], (end + margin) / script_data["size"]]}
    )
    kernels = [box for box in opened.js(BOXES_JS, "timeline") if box["box"] == -2 and 0.5 < box["y"] < 1.5]
    (kernel,) = [box for box in kernels if abs(box["from"] * script_data["size"] - start) < 1e-8]
    operation = result.program.programs[1].tasks[task].segment.operations[int(operations.operation[longest])]
    assert operation.kernel is not None
    assert operation.kernel.name in kernel["words"]
    assert format_seconds(end - start) in kernel["words"]
    assert "TFLOP/s" in kernel["words"] and "bound by" in kernel["words"]
    assert "forward of microbatch 3" in kernel["words"]
    opened.page.get_by_role("button", name="full step").click()
    opened.until(lambda: opened.drawn("timeline") >= 3)
    full_range = [0, pytest.approx(script_data["whole"] / script_data["size"])]
    assert opened.js("document.getElementById('timeline').layout.xaxis.range") == full_range


def test_hovering_a_box_shows_its_cause_and_arrow(
    open_page: PageOpener, path: Path, timeline: PipelineTimeline
) -> None:
    opened = open_page(path)
    drawn, spans = build_drawing(timeline), timeline.spans
    lead = drawn.boxes.first_spans()
    waited = np.where(
        (spans.lane[lead] == 0) & (spans.row[lead] == 3), spans.start[lead] - spans.waiting_since[lead], 0
    )
    box = int(waited.argmax())
    drawn_box = next(candidate for candidate in opened.js(BOXES_JS, "timeline") if candidate["box"] == box)
    assert f"waited {format_seconds(float(waited[box]))} for" in drawn_box["words"]
    point = opened.js(
        """([x, y]) => { const plot = document.getElementById("timeline"), {xaxis, yaxis} = plot._fullLayout;
           plot.scrollIntoView(); const at = plot.getBoundingClientRect();
           return [at.left + xaxis._offset + xaxis.l2p(x), at.top + yaxis._offset + yaxis.l2p(y)]; }""",
        [drawn_box["from"] + drawn_box["long"] / 2, drawn_box["y"]],
    )
    opened.page.mouse.move(point[0] - 3, point[1])
    opened.page.mouse.move(*point)
    opened.until(lambda: bool(opened.page.locator("#timeline .hovertext").count()))
    assert "waited" in opened.page.locator("#timeline .hovertext").first.text_content()
    assert opened.page.locator("#timeline .arrows path.cause").count() == 1


def test_text_contrast_in_dark_and_light_schemes(open_page: PageOpener, path: Path) -> None:
    for dark in (False, True):
        opened = open_page(path, dark=dark)
        ink, page = (
            opened.js(f"getComputedStyle(document.body).{css_property}")
            for css_property in ("color", "backgroundColor")
        )
        tick = opened.js("getComputedStyle(document.querySelector('#timeline .ytick text')).fill")
        assert tick == ink
        assert _contrast_ratio(ink, page) > 7  # WCAG AAA


def test_colour_scheme_change_keeps_the_zoom(open_page: PageOpener, path: Path) -> None:
    opened = open_page(path)
    opened.relayout("timeline", {"xaxis.range": [10, 20]})
    before = opened.drawn("timeline")
    opened.page.emulate_media(color_scheme="dark")
    opened.until(lambda: opened.drawn("timeline") > before)
    assert opened.js("document.getElementById('timeline').layout.xaxis.range") == [10, 20]
    assert opened.js("document.querySelectorAll('#timeline .legend .traces').length") == len(
        set(opened.js("document.getElementById('timeline').data.filter(t => t.showlegend !== false).map(t => t.name)"))
    )


def test_memory_of_the_selected_stage_is_drawn(open_page: PageOpener, path: Path, result: SimulationResult) -> None:
    opened = open_page(path)
    sums = """() => { const all = document.getElementById("memory").data.map(trace => trace.y);
              return Math.max(...all[0].map((_, at) => all.reduce((sum, held) => sum + held[at], 0))); }"""
    order = [
        result.memory.most_loaded_pipeline_rank,
        *(stage for stage in range(4) if stage != result.memory.most_loaded_pipeline_rank),
    ]
    for option_index, stage in enumerate(order):
        opened.page.locator("select[data-figure=memory]").select_option(str(option_index))
        opened.until(lambda option_index=option_index: opened.drawn("memory") > option_index)
        assert opened.js(sums) == pytest.approx(result.ledgers[stage].peak / 2**30, rel=1e-5)


def _contrast_ratio(first: str, second: str) -> float:
    """Contrast ratio (WCAG 2.1) of two colours `rgb(r, g, b)`."""
    luminances = sorted(_relative_luminance(colour) for colour in (first, second))
    return (luminances[1] + 0.05) / (luminances[0] + 0.05)


def _relative_luminance(colour: str) -> float:
    channels = [int(channel) / 255 for channel in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
