"""The page of `clustersim validate` in a real browser."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clustersim.report.validation_page import validation_page
from tests.browser.conftest import Opened
from tests.report.test_validation_page import HOSTILE, part, point

pytestmark = pytest.mark.browser


def test_the_page_draws_without_a_complaint(open_page: Callable[..., Opened], tmp_path: Path) -> None:
    points = [point(n, f"source {n % 3}", gpu=f"gpu {n % 2}") for n in range(30)]
    text = validation_page(HOSTILE, [part(*points), part(*points, unit="B")])
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    seen = open_page(tmp_path / "page.html")
    assert seen.quiet(), (seen.complaints, seen.requests)
    assert seen.page.locator(".plot .main-svg").count() >= 8  # two for each of four figures
    assert seen.page.locator(".plot .point").count() >= 4 * 30
