"""Topology picture and network panel in a real browser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.report.html_document import html_document
from clustersim.report.panels.network import build_network, network_panel
from clustersim.report.panels.topology import result_topology, topology_page, topology_panel

pytestmark = pytest.mark.browser

ANNOTATIONS = "#topology .annotation-text"
BASE_MAPPING = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 32},
    "layout": {"tp": 8, "pp": 2, "dp": 2},
    "training": {"sequence": 1024, "global_batch": 16, "microbatch": 1},
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = simulate(Scenario.from_mapping(BASE_MAPPING))
    network = build_network(result)
    assert network is not None
    path = tmp_path_factory.mktemp("network") / "page.html"
    path.write_text(html_document("network", [network_panel(network), topology_panel(result_topology(result))]))
    path.with_name("topology.html").write_text(topology_page(result_topology(result)), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_panels_have_no_messages_and_fit_the_width(
    open_page: Callable[..., Any], page: Path, width: int, dark: bool
) -> None:
    opened = open_page(page, width=width, dark=dark)
    assert opened.quiet(), opened.console_messages + opened.requests
    assert opened.js("() => document.documentElement.scrollWidth") <= width


def test_annotations_do_not_overlap(open_page: Callable[..., Any], page: Path) -> None:
    for width in (1280, 390):
        opened = open_page(page.with_name("topology.html"), width=width)
        assert opened.quiet(), opened.console_messages + opened.requests
        boxes = opened.js(
            f"() => [...document.querySelectorAll({ANNOTATIONS!r})].map(e => e.getBoundingClientRect().toJSON())"
        )
        assert len(boxes) > 8
        for index, first in enumerate(boxes):
            for second in boxes[index + 1 :]:
                overlap_width = min(first["right"], second["right"]) - max(first["left"], second["left"])
                overlap_height = min(first["bottom"], second["bottom"]) - max(first["top"], second["top"])
                assert overlap_width <= 1 or overlap_height <= 1


def test_hover_text_of_axis_crossings(open_page: Callable[..., Any], page: Path) -> None:
    opened = open_page(page.with_name("topology.html"))
    dots = opened.page.locator("#topology .scatterlayer .points path")
    assert dots.count() >= 3
    box = dots.first.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.page.wait_for_selector("#topology .hovertext")
    assert "between neighbours: NVLink" in opened.page.locator("#topology .hovertext").text_content()


def test_hover_text_of_the_utilization_heatmap(open_page: Callable[..., Any], page: Path) -> None:
    opened = open_page(page)
    box = opened.page.locator("#network .nsewdrag").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 8)
    opened.page.wait_for_selector("#network .hovertext")
    hover_text = opened.page.locator("#network .hovertext").text_content()
    assert hover_text.startswith("NVLink")
    assert "% used" in hover_text
