"""Do pages fit a phone? Nothing overflows or is cut off, labels are legible, and sentences are whole."""

from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from clustersim.planning.explorer.explorer_data import build_exploration
from clustersim.planning.layouts import LayoutSearch, SearchSpace
from clustersim.planning.what_if import run_what_ifs
from clustersim.reliability import simulate_goodput
from clustersim.report.explorer_page import explorer_page
from clustersim.report.goodput_page import goodput_page
from clustersim.report.run_page import run_page
from clustersim.report.search_page import search_page
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.validation.nearest_run import nearest_run
from tests.browser.conftest import PHONE, BrowserPage
from tests.planning.explorer_scenarios import few_choices
from tests.planning.layouts.search_scenarios import search_scenario

pytestmark = pytest.mark.browser
PageOpener = Callable[..., BrowserPage]
PHONE_WIDTH = PHONE["viewport"]["width"]
TOOL_PAGES = ("run", "search", "explore", "goodput")
SCREENS = pytest.mark.parametrize("phone", [True, False], ids=["phone", "desktop"])

UNREACHABLE_JS = """() => [...document.querySelectorAll("main *")].filter(each => {
  if (each.closest("svg") || !each.offsetParent) return false;
  const scrolls = side => { for (let up = each; up !== document.body; up = up.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(up)[side])) return true; };
  const cuts = ["hidden", "clip"].includes(getComputedStyle(each).overflowX);
  const box = each.getBoundingClientRect();
  const outside = box.right > innerWidth + 1 || box.left < -1;
  return cuts && each.scrollWidth > each.clientWidth + 1 || outside && !scrolls("overflowX");
}).map(each => each.outerHTML.slice(0, 120))"""
CLIPPED_SELECTS_JS = """() => [...document.querySelectorAll("select")].filter(each => {
  const style = getComputedStyle(each), pen = document.createElement("canvas").getContext("2d");
  pen.font = style.font;
  const widest = Math.max(...[...each.options].map(option => pen.measureText(option.text).width));
  const arrow = 18;
  return widest + parseFloat(style.paddingLeft) + parseFloat(style.paddingRight) + arrow > each.clientWidth;
}).map(each => each.outerHTML.slice(0, 120))"""
TABLE_OVERFLOW_JS = """() => [...document.querySelectorAll("table")].filter(each => each.scrollWidth > each.clientWidth)
  .map(each => each.closest("section").querySelector("h2").textContent)"""
BOXES_JS = """name => [...document.querySelectorAll(name)].map(each => { const box = each.getBoundingClientRect();
  return [box.left, box.right, box.top, box.bottom]; })"""
SENTENCES_JS = """() => [...document.querySelectorAll(
  "h1, .lead, .caption, .alerts li, .explained p, #explorer-bubble-words, h2 + ul:last-child > li")]
  .filter(each => !each.querySelector(".key") && each.textContent.trim()).map(each => each.textContent.trim())"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Path by tool: a run with what helps, a search over many keys, an exploration with an MTP layer, and goodput."""
    folder = tmp_path_factory.mktemp("screens")
    result = simulate(Scenario.from_mapping({**search_scenario().to_mapping(), "name": "Small"}))
    vary = {
        "layout.tp": ["1", "2", "4"], "layout.pp": ["1", "2"], "layout.data": ["ddp", "zero1"],
        "schedule": ["1f1b", "interleaved"], "training.recompute": ["none", "selective", "selective_op", "full"],
    }  # fmt: skip
    search = LayoutSearch(SearchSpace.restricted_to(search_scenario("economics.tokens=100B"), vary)).run()
    weeks = simulate_goodput(search_scenario("economics.tokens=100B", "reliability.rates=100"), 8)
    texts = {
        "run": run_page(result, run_what_ifs(result), nearest_run(result.scenario)),
        "search": search_page(search, Path("plan.yaml")),
        "explore": _exploration(),
        "goodput": goodput_page(weeks, Path("plan.yaml")),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def _exploration() -> str:
    """A mixture of experts of latent attention, which recomputes many modules and has an MTP layer."""
    scenario = Scenario.from_mapping(
        {
            "name": "Small mixture",
            "model": {"preset": "deepseek-v3", "layers": 4, "mtp_layers": 1},
            "cluster": {"name": "dgx-h800", "gpus": 16},
            "layout": {"pp": 2, "dp": 8, "ep": 8, "data": "zero1"},
            "training": {
                "sequence": 512, "global_batch": 32,
                "recompute": {"modules": ["layernorm", "mla_up_proj", "moe_act", "shared_experts"]},
            },
        }
    )  # fmt: skip
    with few_choices():
        return explorer_page(build_exploration(scenario))


def boxes(page: BrowserPage, selector: str) -> list[list[float]]:
    """Bounding boxes [left, right, top, bottom] of elements."""
    found: list[list[float]] = page.js(BOXES_JS, selector)
    assert found, selector
    return found


def overlaps(one: list[float], other: list[float]) -> bool:
    """Whether two boxes overlap by more than a pixel."""
    return all(one[first] + 1 < other[last] and other[first] + 1 < one[last] for first, last in ((0, 1), (2, 3)))


@pytest.mark.parametrize("name", TOOL_PAGES)
def test_pages_do_not_overflow_a_phone(open_page: PageOpener, pages: dict[str, Path], name: str) -> None:
    """A phone's layout viewport grows with what is too wide, so that all becomes small."""
    page = open_page(pages[name], phone=True)
    assert page.js("() => [innerWidth, document.documentElement.scrollWidth]") == [PHONE_WIDTH, PHONE_WIDTH]
    page.js("() => document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert page.js("() => [innerWidth, document.documentElement.scrollWidth]") == [PHONE_WIDTH, PHONE_WIDTH]
    assert page.js(UNREACHABLE_JS) == []
    assert page.quiet(), page.console_messages + page.requests


@pytest.mark.parametrize("name", ["search", "explore", "goodput"])
def test_tables_are_whole_on_a_phone(open_page: PageOpener, pages: dict[str, Path], name: str) -> None:
    page = open_page(pages[name], phone=True)
    page.js("() => document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert page.js(TABLE_OVERFLOW_JS) == []


@SCREENS
@pytest.mark.parametrize("name", TOOL_PAGES)
def test_selects_show_their_whole_options(
    open_page: PageOpener, pages: dict[str, Path], name: str, phone: bool
) -> None:
    assert open_page(pages[name], phone=phone).js(CLIPPED_SELECTS_JS) == []


@pytest.mark.parametrize("name", ["search", "explore", "goodput"])
def test_sentences_begin_with_a_capital_and_are_whole(open_page: PageOpener, pages: dict[str, Path], name: str) -> None:
    for text in open_page(pages[name]).js(SENTENCES_JS):
        assert not text[0].islower(), text
        words = text.split()
        for before, after in pairwise(words):
            assert not (after in {"The", "There", "It", "With", "Each"} and before[-1].isalnum()), text


def test_quantities_of_a_layout_are_named_on_a_phone(open_page: PageOpener, pages: dict[str, Path]) -> None:
    """The table's heads are not visible there; the command that runs a layout is."""
    page = open_page(pages["search"], phone=True)
    named = page.js(
        "() => [...document.querySelectorAll('.labelled tbody tr:first-child td')].map(each => "
        "getComputedStyle(each, '::before').content)"
    )
    assert {'"step"', '"memory"', '"fits"', '"cost of 1T tokens"'} <= set(named)
    page.page.tap(".labelled summary")
    assert "clustersim run plan.yaml" in page.page.inner_text(".labelled details[open] code")


@SCREENS
def test_no_line_crosses_a_label_of_parallel_coordinates(
    open_page: PageOpener, pages: dict[str, Path], phone: bool
) -> None:
    """Values are in opaque boxes, which are drawn after the lines, and do not overlap each other."""
    page = open_page(pages["search"], phone=phone)
    values = boxes(page, "#lines .annotation .bg")
    assert len(values) >= 12
    assert not [pair for pair in combinations(values, 2) if overlaps(*pair)]
    (plot,) = boxes(page, "#lines")
    assert all(left >= plot[0] and right <= plot[1] for left, right, *_ in values)
    opacity, surface, fill = page.js(
        """() => { const box = document.querySelector("#lines .annotation .bg");
        return [getComputedStyle(box).fillOpacity, clustersim.tools.colour("surface"), box.style.fill]; }"""
    )
    assert opacity == "1"
    assert fill.startswith("rgb(")
    assert surface == "#{:02x}{:02x}{:02x}".format(*map(int, fill[4:-1].split(",")))
    assert page.js(
        """() => Boolean(document.querySelector("#lines .scatterlayer .js-line").compareDocumentPosition(
        document.querySelector("#lines .annotation")) & Node.DOCUMENT_POSITION_FOLLOWING)"""
    )


def test_all_zero_stages_are_visible_on_a_phone(open_page: PageOpener, pages: dict[str, Path]) -> None:
    page = open_page(pages["explore"], phone=True)
    rows = page.js(
        "() => [...document.querySelectorAll('#explorer-memory-table tr')].map(row => [...row.querySelectorAll('td')]"
        ".map(each => { const box = each.getBoundingClientRect(); return [box.left, box.right, each.textContent]; }))"
    )
    assert all(len(row) == 4 for row in rows)
    assert all(left >= 0 and right <= PHONE_WIDTH and text for row in rows for left, right, text in row)


@SCREENS
def test_labels_of_memory_bars_do_not_overlap(open_page: PageOpener, pages: dict[str, Path], phone: bool) -> None:
    """Neither each other nor the label of the capacity."""
    page = open_page(pages["explore"], phone=phone)
    labels = boxes(page, "#explorer-memory .annotation .annotation-text")
    assert len(labels) == 5
    assert not [pair for pair in combinations(labels, 2) if overlaps(*pair)]


def test_labels_of_simulated_steps_are_whole_on_a_phone(open_page: PageOpener, pages: dict[str, Path]) -> None:
    page = open_page(pages["explore"], phone=True)
    for figure in ("explorer-layouts", "explorer-zero"):
        (_, plot_end, *_), *_ = boxes(page, f"#{figure}")
        assert all(right <= plot_end for _, right, *_ in boxes(page, f"#{figure} .bartext"))


def test_exploration_says_that_mtp_layers_are_not_drawn(open_page: PageOpener, pages: dict[str, Path]) -> None:
    """The verdict does not claim that the scenario fits."""
    page = open_page(pages["explore"])
    (warning,) = page.page.locator("h1 ~ .alerts li").all_inner_texts()
    assert "1 multi-token prediction (MTP) layer of deepseek-v3" in warning
    assert "simulated steps have it" in warning
    assert page.page.inner_text("#explorer-verdict b") in {"fits without what is not drawn", "does not fit"}
    assert page.page.locator("#explorer-verdict.yes").count() == 0


@SCREENS
def test_arguments_of_what_helps_wrap_and_are_copied_whole(
    open_page: PageOpener, pages: dict[str, Path], phone: bool
) -> None:
    page = open_page(pages["run"], phone=phone)
    arguments = page.page.locator(".helps code")
    assert arguments.count()
    (card,) = boxes(page, ".verdict")
    assert all(card[0] < left and right < card[1] for left, right, *_ in boxes(page, ".helps code"))
    text = arguments.first.inner_text()
    assert text.startswith("--set ")
    arguments.first.click()
    selected: Any = page.js("() => getSelection().toString()")
    assert selected.strip() == text
