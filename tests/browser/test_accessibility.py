"""Accessibility of the run page: axe-core violations and keyboard navigation."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clustersim.planning.what_if import run_what_ifs
from clustersim.report.run_page import run_page
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.validation.nearest_run import nearest_run
from tests.browser.conftest import BrowserPage
from tests.browser.test_run_page import SMALL_MAPPING as PAGE

pytestmark = pytest.mark.browser
PageOpener = Callable[..., BrowserPage]
VIEWPORT_HEIGHT = 900
SMALL_MAPPING: dict[str, Any] = {**PAGE, "name": "small", "economics": {"tokens": "1T"}}
FOCUSED_JS = """() => { const each = document.activeElement;
  return [each.tagName, each.getBoundingClientRect().top + scrollY]; }"""
BOXES_JS = """name => [...document.querySelectorAll(name)].map(each => { const box = each.getBoundingClientRect();
  return [box.left, box.right, box.top, box.bottom]; })"""
SCROLLABLE_COUNT_JS = "() => document.querySelectorAll('table[tabindex], .scrolls[tabindex]').length"
UNREACHABLE_JS = """() => [...document.querySelectorAll("select, button, input, summary, a[href]")]
  .filter(each => each.offsetParent !== null && each.tabIndex < 0).map(each => each.outerHTML)"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page as written by `clustersim run --html`."""
    software = {"framework": {"name": "ideal", "launch": "10 us"}}  # few changes help, so that all of them are listed
    result = simulate(Scenario.from_mapping(SMALL_MAPPING | software))
    target = tmp_path_factory.mktemp("access") / "page.html"
    target.write_text(run_page(result, run_what_ifs(result, 30.0), nearest_run(result.scenario)), encoding="utf-8")
    return target


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 390])
def test_axe_reports_no_violations(open_page: PageOpener, path: Path, width: int, dark: bool) -> None:
    from axe_playwright_python.sync_playwright import Axe

    opened = open_page(path, width=width, height=VIEWPORT_HEIGHT, dark=dark)
    violations = Axe().run(opened.page).response["violations"]
    assert not violations, "\n".join(
        f"{violation['id']}: {violation['help']}: {[node['html'][:160] for node in violation['nodes'][:6]]}"
        for violation in violations
    )


def test_controls_are_tabbable_in_page_order(open_page: PageOpener, path: Path) -> None:
    opened = open_page(path)
    assert opened.js(UNREACHABLE_JS) == []
    reached = []
    for _ in range(60):
        opened.page.keyboard.press("Tab")
        tag, top = opened.js(FOCUSED_JS)
        if tag == "BODY":
            break
        reached.append((tag, top))
    assert {"SUMMARY", "SELECT", "BUTTON", "INPUT"} <= {tag for tag, _ in reached}
    tops = [top for _, top in reached]
    assert tops == sorted(tops)


def test_verdict_is_visible_without_scrolling(open_page: PageOpener, path: Path) -> None:
    opened = open_page(path, width=1400, height=VIEWPORT_HEIGHT)
    for name in (".tiles > div", ".losses", ".sure"):
        boxes = opened.js(BOXES_JS, name)
        assert boxes
        assert max(bottom for *_, bottom in boxes) < VIEWPORT_HEIGHT, name
    verdict = opened.page.inner_text(".verdict")
    for text in ("per training step", "90% prediction interval", "tokens/s per GPU", "MFU", "left", "for 1T tokens"):
        assert text in verdict
    assert opened.page.locator(".losses li").count() == 3
    assert "Nearest published run" in verdict


def test_tiles_stack_vertically_on_narrow_screens(open_page: PageOpener, path: Path) -> None:
    boxes = open_page(path, width=390).js(BOXES_JS, ".tiles > div")
    assert len(boxes) == 4
    assert all(right <= 390 for _, right, _, _ in boxes)
    assert all(upper[3] <= lower[2] for upper, lower in pairwise(boxes))


def test_only_horizontally_scrollable_elements_are_focusable(open_page: PageOpener, path: Path) -> None:
    assert open_page(path, width=390).js(SCROLLABLE_COUNT_JS) > 0
    assert open_page(path, width=1400).js(SCROLLABLE_COUNT_JS) == 0
