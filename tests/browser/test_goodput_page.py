"""Goodput and search pages in a browser: all figures are drawn, nothing is loaded or overflows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clustersim.planning.layouts import LayoutSearch, SearchSpace
from clustersim.reliability import simulate_goodput
from clustersim.report.goodput_page import goodput_page
from clustersim.report.search_page import search_page
from tests.browser.conftest import BrowserPage
from tests.planning.layouts.search_scenarios import search_scenario

pytestmark = pytest.mark.browser
PageOpener = Callable[..., BrowserPage]
IS_DRAWN_JS = "name => document.querySelectorAll(`#${name} .main-svg`).length > 0 ? 1 : 0"
VIEWPORTS = pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])


@pytest.fixture(scope="module")
def goodput_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weeks") / "page.html"
    result = simulate_goodput(search_scenario("economics.tokens=100B", "reliability.rates=100"), 8)
    path.write_text(goodput_page(result, Path("plan.yaml")), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def search_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("found") / "page.html"
    vary = {"layout.tp": ["1", "2", "4"], "layout.data": ["ddp", "zero1"]}
    page = search_page(LayoutSearch(SearchSpace.restricted_to(search_scenario(), vary)).run(), Path("plan.yaml"))
    path.write_text(page, encoding="utf-8")
    return path


@VIEWPORTS
def test_goodput_page_is_drawn(open_page: PageOpener, goodput_file: Path, width: int, dark: bool) -> None:
    page = open_page(goodput_file, width=width, dark=dark)
    for figure in ("losses", "timeline", "spread", "intervals"):
        assert page.js(IS_DRAWN_JS, figure) == 1
    assert page.quiet(), page.console_messages + page.requests
    assert page.js("() => document.documentElement.scrollWidth") <= width


def test_tables_are_readable_without_scrolling_on_a_phone(open_page: PageOpener, goodput_file: Path) -> None:
    page = open_page(goodput_file, width=390)
    overflow = page.js(
        "() => Math.max(...[...document.querySelectorAll('table')].map(t => t.scrollWidth - t.clientWidth))"
    )
    assert overflow <= 0


@VIEWPORTS
def test_search_page_is_drawn(open_page: PageOpener, search_file: Path, width: int, dark: bool) -> None:
    page = open_page(search_file, width=width, dark=dark)
    for figure in ("pareto", "heat", "lines"):
        assert page.js(IS_DRAWN_JS, figure) == 1
    assert page.quiet(), page.console_messages + page.requests
    assert page.js("() => document.documentElement.scrollWidth") <= width
