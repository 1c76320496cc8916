"""The page of two answers in a browser: it is quiet, and a zoom in one timeline is one in the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustersim.report.result_difference import compare_results
from clustersim.report.result_difference_page import difference_page
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.browser.conftest import Opened

pytestmark = pytest.mark.browser

SMALL: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 4, "dp": 2, "data": "zero1"},
    "training": {"sequence": 4096, "global_batch": 16},
}
RANGE = "name => document.getElementById(name).layout.xaxis.range"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = [
        simulate(Scenario.from_mapping(SMALL, change))
        for change in ([], ["schedule=gpipe", "layout.tp=4", "layout.dp=1"])
    ]
    path = tmp_path_factory.mktemp("difference") / "page.html"
    page = difference_page(compare_results(results[0], results[1], ("A", "B")), results)
    path.write_text(page, encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_quiet_and_no_wider_than_the_screen(
    open_page: Callable[..., Opened], page: Path, width: int, dark: bool
) -> None:
    opened = open_page(page, width=width, dark=dark)
    assert opened.quiet(), (opened.complaints, opened.requests)
    assert opened.js("() => document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("zoomed", "other"), [("timeline-a", "timeline-b"), ("timeline-b", "timeline-a")])
def test_a_zoom_in_one_timeline_is_a_zoom_in_both_and_so_is_the_way_back(
    open_page: Callable[..., Opened], page: Path, zoomed: str, other: str
) -> None:
    opened = open_page(page)
    whole = opened.js(RANGE, other)
    assert opened.js(RANGE, zoomed) == whole
    part = [0.25 * whole[1], 0.5 * whole[1]]
    opened.relayout(zoomed, {"xaxis.range": part})
    opened.page.wait_for_function(f"([name, low]) => ({RANGE})(name)[0] === low", arg=[other, part[0]])
    assert opened.js(RANGE, other) == pytest.approx(part)
    opened.relayout(other, {"xaxis.autorange": True})
    opened.page.wait_for_function(f"([name, high]) => ({RANGE})(name)[1] === high", arg=[zoomed, whole[1]])
    assert opened.js(RANGE, zoomed) == opened.js(RANGE, other) == whole
    assert opened.quiet()
