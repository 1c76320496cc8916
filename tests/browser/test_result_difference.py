"""The comparison page of two results in a browser: no console messages, and synchronized timeline zoom."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustersim.report.result_difference import compare_results
from clustersim.report.result_difference_page import difference_page
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.browser.conftest import BrowserPage

pytestmark = pytest.mark.browser

SMALL_MAPPING: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 4, "dp": 2, "data": "zero1"},
    "training": {"sequence": 4096, "global_batch": 16},
}
RANGE_JS = "name => document.getElementById(name).layout.xaxis.range"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = [
        simulate(Scenario.from_mapping(SMALL_MAPPING, change))
        for change in ([], ["schedule=gpipe", "layout.tp=4", "layout.dp=1"])
    ]
    path = tmp_path_factory.mktemp("difference") / "page.html"
    page = difference_page(compare_results(results[0], results[1], ("A", "B")), results)
    path.write_text(page, encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_page_has_no_messages_and_fits_the_width(
    open_page: Callable[..., BrowserPage], page: Path, width: int, dark: bool
) -> None:
    opened = open_page(page, width=width, dark=dark)
    assert opened.quiet(), (opened.console_messages, opened.requests)
    assert opened.js("() => document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("zoomed", "other"), [("timeline-a", "timeline-b"), ("timeline-b", "timeline-a")])
def test_timeline_zoom_is_synchronized(
    open_page: Callable[..., BrowserPage], page: Path, zoomed: str, other: str
) -> None:
    opened = open_page(page)
    full_range = opened.js(RANGE_JS, other)
    assert opened.js(RANGE_JS, zoomed) == full_range
    zoom_range = [0.25 * full_range[1], 0.5 * full_range[1]]
    opened.relayout(zoomed, {"xaxis.range": zoom_range})
    opened.page.wait_for_function(f"([name, low]) => ({RANGE_JS})(name)[0] === low", arg=[other, zoom_range[0]])
    assert opened.js(RANGE_JS, other) == pytest.approx(zoom_range)
    opened.relayout(other, {"xaxis.autorange": True})
    opened.page.wait_for_function(f"([name, high]) => ({RANGE_JS})(name)[1] === high", arg=[zoomed, full_range[1]])
    assert opened.js(RANGE_JS, zoomed) == opened.js(RANGE_JS, other) == full_range
    assert opened.quiet()
