"""The report in a real browser: it opens quietly, and shows what the simulation says at every zoom."""

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
from tests.browser.conftest import Opened

pytestmark = pytest.mark.browser
Open = Callable[..., Opened]
SMALL: dict[str, Any] = {
    "name": "</script><b>small",
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 4, "dp": 2, "data": "zero1"},
    "training": {"sequence": 4096, "global_batch": 16},
}
BOXES = """name => {
  const plot = document.getElementById(name);
  return plot.data.filter(trace => trace.type === "bar" && trace.customdata).flatMap(trace => trace.customdata.map(
    (box, index) => ({box, look: trace.name, y: trace.y[index], from: trace.base[index], long: trace.x[index],
                      words: trace.hovertext[index]}))).filter(each => each.y >= -1);
}"""


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    """A pipeline of four stages."""
    return simulate(Scenario.from_mapping(SMALL))


@pytest.fixture(scope="module")
def timeline(result: SimulationResult) -> PipelineTimeline:
    """What its page shows of time."""
    return build_timeline(result, select_ranks(result))


@pytest.fixture(scope="module")
def path(result: SimulationResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its page."""
    target = tmp_path_factory.mktemp("page") / "page.html"
    target.write_text(run_page(result), encoding="utf-8")
    return target


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_without_a_complaint_or_a_request(open_page: Open, path: Path, width: int, dark: bool) -> None:
    seen = open_page(path, width=width, dark=dark)
    assert seen.quiet(), (seen.complaints, seen.requests)
    assert seen.page.title().startswith("</script><b>small")
    figures = seen.js("JSON.parse(document.getElementById('figures').textContent).map(figure => figure.name)")
    assert all(seen.drawn(figure) == 1 for figure in figures)
    wide = seen.js("document.documentElement.scrollWidth")
    assert wide <= width, "nothing is cut off or must be scrolled sideways"


def test_every_pass_is_drawn_where_and_when_it_ran(open_page: Open, path: Path, timeline: PipelineTimeline) -> None:
    seen, spans = open_page(path), timeline.spans
    size, drawn = seen.facts("timeline")["size"], build_drawing(timeline)
    boxes = {item["box"]: item for item in seen.js(BOXES, "timeline") if item["box"] >= 0}
    lead = drawn.boxes.first_spans()
    passes = np.flatnonzero((spans.lane[lead] == 0) & (spans.microbatch[lead] >= 0))
    assert len(passes) >= 4 * 2 * 8  # stages, ways, microbatches; a pass that stands still for a while is two boxes
    for box in passes.tolist():
        start, end = drawn.boxes.start[box], drawn.boxes.end[box]
        assert boxes[box]["from"] * size == pytest.approx(start, abs=2 * drawn.tick_seconds)
        assert boxes[box]["long"] * size == pytest.approx(end - start, abs=3 * drawn.tick_seconds)


def test_microbatches_are_numbered_in_their_boxes(open_page: Open, path: Path) -> None:
    seen = open_page(path)
    words = seen.js("[...document.querySelectorAll('#timeline .text text')].map(each => each.textContent)")
    assert {"0", "7"} <= set(words)


def test_zoom_goes_down_to_a_kernel_and_back(open_page: Open, path: Path, result: SimulationResult) -> None:
    seen = open_page(path)
    rank = 4  # of stage 1
    task = next(
        number for number, task in enumerate(result.program.programs[1].tasks)
        if getattr(task, "action", None) is not None and str(task.action) == "1F3"
    )  # fmt: skip
    operations = result.operation_spans(rank, frozenset({task}))
    longest = int((operations.end - operations.start).argmax())
    start, end = float(operations.start[longest]), float(operations.end[longest])
    facts = seen.facts("timeline")
    margin = 0.2 * (end - start)
    seen.relayout("timeline", {"xaxis.range": [(start - margin) / facts["size"], (end + margin) / facts["size"]]})
    kernels = [item for item in seen.js(BOXES, "timeline") if item["box"] == -2 and 0.5 < item["y"] < 1.5]
    (kernel,) = [element for element in kernels if abs(element["from"] * facts["size"] - start) < 1e-8]
    operation = result.program.programs[1].tasks[task].segment.operations[int(operations.operation[longest])]
    assert operation.kernel is not None
    assert operation.kernel.name in kernel["words"]
    assert format_seconds(end - start) in kernel["words"]
    assert "TFLOP/s" in kernel["words"] and "bound by" in kernel["words"]
    assert "forward of microbatch 3" in kernel["words"]
    seen.page.get_by_role("button", name="whole step").click()
    seen.until(lambda: seen.drawn("timeline") >= 3)
    whole = [0, pytest.approx(facts["whole"] / facts["size"])]
    assert seen.js("document.getElementById('timeline').layout.xaxis.range") == whole


def test_pointing_at_a_box_says_what_it_waited_for_and_draws_the_arrow(
    open_page: Open, path: Path, timeline: PipelineTimeline
) -> None:
    seen = open_page(path)
    drawn, spans = build_drawing(timeline), timeline.spans
    lead = drawn.boxes.first_spans()
    waited = np.where(
        (spans.lane[lead] == 0) & (spans.row[lead] == 3), spans.start[lead] - spans.waiting_since[lead], 0
    )
    box = int(waited.argmax())
    here = next(item for item in seen.js(BOXES, "timeline") if item["box"] == box)
    assert f"waited {format_seconds(float(waited[box]))} for" in here["words"]
    point = seen.js(
        """([x, y]) => { const plot = document.getElementById("timeline"), {xaxis, yaxis} = plot._fullLayout;
           plot.scrollIntoView(); const at = plot.getBoundingClientRect();
           return [at.left + xaxis._offset + xaxis.l2p(x), at.top + yaxis._offset + yaxis.l2p(y)]; }""",
        [here["from"] + here["long"] / 2, here["y"]],
    )
    seen.page.mouse.move(point[0] - 3, point[1])
    seen.page.mouse.move(*point)
    seen.until(lambda: bool(seen.page.locator("#timeline .hovertext").count()))
    assert "waited" in seen.page.locator("#timeline .hovertext").first.text_content()
    assert seen.page.locator("#timeline .arrows path.cause").count() == 1


def test_dark_and_light_differ_and_words_can_be_read_in_both(open_page: Open, path: Path) -> None:
    for dark in (False, True):
        seen = open_page(path, dark=dark)
        ink, page = (seen.js(f"getComputedStyle(document.body).{item}") for item in ("color", "backgroundColor"))
        tick = seen.js("getComputedStyle(document.querySelector('#timeline .ytick text')).fill")
        assert tick == ink
        assert _contrast(ink, page) > 7  # WCAG AAA


def test_the_scheme_can_change_while_the_page_is_open_and_the_zoom_stays(open_page: Open, path: Path) -> None:
    seen = open_page(path)
    seen.relayout("timeline", {"xaxis.range": [10, 20]})
    before = seen.drawn("timeline")
    seen.page.emulate_media(color_scheme="dark")
    seen.until(lambda: seen.drawn("timeline") > before)
    assert seen.js("document.getElementById('timeline').layout.xaxis.range") == [10, 20]
    assert seen.js("document.querySelectorAll('#timeline .legend .traces').length") == len(
        set(seen.js("document.getElementById('timeline').data.filter(t => t.showlegend !== false).map(t => t.name)"))
    )


def test_memory_of_the_chosen_stage_is_drawn(open_page: Open, path: Path, result: SimulationResult) -> None:
    seen = open_page(path)
    sums = """() => { const all = document.getElementById("memory").data.map(trace => trace.y);
              return Math.max(...all[0].map((_, at) => all.reduce((sum, held) => sum + held[at], 0))); }"""
    order = [
        result.peak_memory_pipeline_rank,
        *(stage for stage in range(4) if stage != result.peak_memory_pipeline_rank),
    ]
    for place, stage in enumerate(order):
        seen.page.locator("select[data-figure=memory]").select_option(str(place))
        seen.until(lambda place=place: seen.drawn("memory") > place)
        assert seen.js(sums) == pytest.approx(result.ledgers[stage].peak / 2**30, rel=1e-5)


def _contrast(first: str, second: str) -> float:
    """The ratio of WCAG 2.1 between two colours `rgb(r, g, b)`."""
    light = sorted(_luminance(item) for item in (first, second))
    return (light[1] + 0.05) / (light[0] + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(item) / 255 for item in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [element / 12.92 if element <= 0.04045 else ((element + 0.055) / 1.055) ** 2.4 for element in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
