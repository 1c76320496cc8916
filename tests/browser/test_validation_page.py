"""The `clustersim validate` page in a real browser."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clustersim.report.validation_page import validation_page
from tests.browser.conftest import BrowserPage
from tests.report.test_validation_page import HTML_INJECTION, build_point, build_section

pytestmark = pytest.mark.browser


def test_validation_page_has_no_messages(open_page: Callable[..., BrowserPage], tmp_path: Path) -> None:
    points = [build_point(n, f"source {n % 3}", gpu=f"gpu {n % 2}") for n in range(30)]
    text = validation_page(HTML_INJECTION, [build_section(*points), build_section(*points, unit="B")])
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    opened = open_page(tmp_path / "page.html")
    assert opened.quiet(), (opened.console_messages, opened.requests)
    assert opened.page.locator(".plot .main-svg").count() >= 8  # two for each of four figures
    assert opened.page.locator(".plot .point").count() >= 4 * 30


def test_validation_page_does_not_overflow_a_phone(open_page: Callable[..., BrowserPage], tmp_path: Path) -> None:
    points = [build_point(n, f"source {n % 3}", gpu=f"gpu {n % 2}") for n in range(30)]
    (tmp_path / "page.html").write_text(validation_page("Validation", [build_section(*points)]), encoding="utf-8")
    opened = open_page(tmp_path / "page.html", phone=True)
    assert opened.js("() => [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
