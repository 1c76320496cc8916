"""What a notebook shows of a result, in the frame that it is put into."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clustersim.report.run_page import notebook_html
from tests.browser.conftest import Opened
from tests.small_pipeline import simulated

pytestmark = pytest.mark.browser


def test_a_result_shows_its_verdict_and_timeline_in_a_frame_of_its_own(
    open_page: Callable[..., Opened], tmp_path: Path
) -> None:
    shown = simulated()
    cell = tmp_path / "notebook.html"
    ready = "<script>document.documentElement.dataset.ready = 'yes'</script>"
    cell.write_text(f"<!doctype html><meta charset=utf-8><body>{notebook_html(shown)}{ready}", encoding="utf-8")
    seen = open_page(cell)
    frame = seen.page.frame_locator("iframe")
    frame.locator("html[data-ready=yes]").wait_for(state="attached")
    assert frame.locator(".verdict h1").text_content() == shown.scenario.name
    assert frame.locator("#timeline .point").count() >= 4 * 2 * 8
    assert seen.quiet(), (seen.complaints, seen.requests)
    inner = seen.page.frames[1]
    assert inner.evaluate("document.documentElement.scrollHeight <= window.innerHeight + 1"), "nothing is cut off"
