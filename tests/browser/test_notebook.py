"""The notebook representation of a result, in its iframe."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clustersim.report.run_page import notebook_html
from tests.browser.conftest import BrowserPage
from tests.small_pipeline import simulate_pipeline

pytestmark = pytest.mark.browser


def test_notebook_iframe_shows_verdict_and_timeline(open_page: Callable[..., BrowserPage], tmp_path: Path) -> None:
    result = simulate_pipeline()
    cell = tmp_path / "notebook.html"
    ready = "<script>document.documentElement.dataset.ready = 'yes'</script>"
    cell.write_text(f"<!doctype html><meta charset=utf-8><body>{notebook_html(result)}{ready}", encoding="utf-8")
    opened = open_page(cell)
    frame = opened.page.frame_locator("iframe")
    frame.locator("html[data-ready=yes]").wait_for(state="attached")
    assert frame.locator(".verdict h1").text_content() == result.scenario.name
    assert frame.locator("#timeline .point").count() >= 4 * 2 * 8
    assert opened.quiet(), (opened.console_messages, opened.requests)
    inner = opened.page.frames[1]
    assert inner.evaluate("document.documentElement.scrollHeight <= window.innerHeight + 1"), "nothing is cut off"
