"""The pages of a run over weeks and of a search in a browser: all is drawn, nothing is loaded or overflows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clustersim.planning.layouts import LayoutSearch, SearchSpace
from clustersim.reliability import simulate_goodput
from clustersim.report.goodput_page import goodput_page
from clustersim.report.search_page import search_page
from tests.browser.conftest import Opened
from tests.planning.layouts.search_scenarios import job

pytestmark = pytest.mark.browser
Open = Callable[..., Opened]
DRAWN = "name => document.querySelectorAll(`#${name} .main-svg`).length > 0 ? 1 : 0"
SIZES = pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])


@pytest.fixture(scope="module")
def weeks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weeks") / "page.html"
    weeks = simulate_goodput(job("economics.tokens=100B", "reliability.rates=100"), 8)
    path.write_text(goodput_page(weeks, Path("plan.yaml")), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("found") / "page.html"
    vary = {"layout.tp": ["1", "2", "4"], "layout.data": ["ddp", "zero1"]}
    page = search_page(LayoutSearch(SearchSpace.restricted_to(job(), vary)).run(), Path("plan.yaml"))
    path.write_text(page, encoding="utf-8")
    return path


@SIZES
def test_a_run_over_weeks_is_drawn(open_page: Open, weeks: Path, width: int, dark: bool) -> None:
    page = open_page(weeks, width=width, dark=dark)
    for figure in ("losses", "timeline", "spread", "intervals"):
        assert page.js(DRAWN, figure) == 1
    assert page.quiet(), page.complaints + page.requests
    assert page.js("() => document.documentElement.scrollWidth") <= width


@SIZES
def test_a_search_is_drawn(open_page: Open, found: Path, width: int, dark: bool) -> None:
    page = open_page(found, width=width, dark=dark)
    for figure in ("pareto", "heat", "lines"):
        assert page.js(DRAWN, figure) == 1
    assert page.quiet(), page.complaints + page.requests
    assert page.js("() => document.documentElement.scrollWidth") <= width
