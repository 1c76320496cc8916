"""Can the run page be read and used by everybody? What axe-core says of it, and what the keyboard reaches."""

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
from tests.browser.conftest import Opened
from tests.browser.test_run_page import SMALL as PAGE

pytestmark = pytest.mark.browser
Open = Callable[..., Opened]
FOLD = 900
SMALL: dict[str, Any] = {**PAGE, "name": "small", "economics": {"tokens": "1T"}}
FOCUSED = """() => { const each = document.activeElement;
  return [each.tagName, each.getBoundingClientRect().top + scrollY]; }"""
BOXES = """name => [...document.querySelectorAll(name)].map(each => { const box = each.getBoundingClientRect();
  return [box.left, box.right, box.top, box.bottom]; })"""
SCROLLING = "() => document.querySelectorAll('table[tabindex], .scrolls[tabindex]').length"
UNREACHED = """() => [...document.querySelectorAll("select, button, input, summary, a[href]")]
  .filter(each => each.offsetParent !== null && each.tabIndex < 0).map(each => each.outerHTML)"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page as `clustersim run --html` writes it."""
    result = simulate(Scenario.from_mapping(SMALL))
    target = tmp_path_factory.mktemp("access") / "page.html"
    target.write_text(run_page(result, run_what_ifs(result, 30.0), nearest_run(result.scenario)), encoding="utf-8")
    return target


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 390])
def test_axe_finds_nothing(open_page: Open, path: Path, width: int, dark: bool) -> None:
    from axe_playwright_python.sync_playwright import Axe

    seen = open_page(path, width=width, height=FOLD, dark=dark)
    found = Axe().run(seen.page).response["violations"]
    assert not found, "\n".join(
        f"{item['id']}: {item['help']}: {[node['html'][:160] for node in item['nodes'][:6]]}" for item in found
    )


def test_every_control_is_reached_by_the_keyboard_in_the_order_of_the_page(open_page: Open, path: Path) -> None:
    seen = open_page(path)
    assert seen.js(UNREACHED) == []
    reached = []
    for _ in range(60):
        seen.page.keyboard.press("Tab")
        tag, top = seen.js(FOCUSED)
        if tag == "BODY":
            break
        reached.append((tag, top))
    assert {"SUMMARY", "SELECT", "BUTTON", "INPUT"} <= {tag for tag, _ in reached}
    tops = [top for _, top in reached]
    assert tops == sorted(tops)


def test_what_decides_is_seen_without_scrolling(open_page: Open, path: Path) -> None:
    seen = open_page(path, width=1400, height=FOLD)
    for name in (".tiles > div", ".losses", ".sure"):
        boxes = seen.js(BOXES, name)
        assert boxes
        assert all(bottom < FOLD for *_, bottom in boxes)
    words = seen.page.inner_text(".verdict")
    for told in ("per training step", "expected between", "tokens/s per GPU", "MFU", "left", "for 1T tokens"):
        assert told in words
    assert seen.page.locator(".losses li").count() == 3
    assert "Nearest published run" in words


def test_on_a_phone_tiles_stand_below_each_other(open_page: Open, path: Path) -> None:
    boxes = open_page(path, width=390).js(BOXES, ".tiles > div")
    assert len(boxes) == 4
    assert all(right <= 390 for _, right, _, _ in boxes)
    assert all(upper[3] <= lower[2] for upper, lower in pairwise(boxes))


def test_what_scrolls_sideways_can_be_scrolled_with_the_keyboard_and_nothing_else_stops_it(
    open_page: Open, path: Path
) -> None:
    assert open_page(path, width=390).js(SCROLLING) > 0
    assert open_page(path, width=1400).js(SCROLLING) == 0
