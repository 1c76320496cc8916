"""A real browser (the system's chromium, headless, driven by playwright) that rejects all network requests."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMIUM_FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
TIMEOUT_MS = 60_000  # milliseconds
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844}, "device_scale_factor": 3, "is_mobile": True, "has_touch": True,
}  # fmt: skip


@dataclass
class BrowserPage:
    """A drawn page; console_messages: its console output; requests: its network requests."""

    page: Any
    console_messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def quiet(self) -> bool:
        """Whether there are neither console messages nor network requests."""
        return not self.console_messages and not self.requests

    def js(self, script: str, argument: object = None) -> Any:
        """Return value of a JavaScript function for an argument."""
        return self.page.evaluate(script, argument)

    def facts(self, figure: str) -> Any:
        """The data of a figure besides its arrays."""
        figures = self.js("() => JSON.parse(document.getElementById('figures').textContent)")
        return next(item["facts"] for item in figures if item["name"] == figure)

    def drawn(self, figure: str) -> int:
        """Number of times a figure has been drawn."""
        return int(self.js("name => document.getElementById(name).dataset.drawn ?? 0", figure))

    def relayout(self, figure: str, change: dict[str, object]) -> None:
        """Change a figure's layout as a user's zoom does, and wait until it is drawn."""
        before = self.drawn(figure)
        self.js("([name, change]) => Plotly.relayout(name, change).then(() => null)", [figure, change])
        self.until(lambda: self.drawn(figure) > before)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; the content security policy forbids playwright's wait_for_function, which uses eval."""
        for _ in range(TIMEOUT_MS // 20):
            if condition():
                return
            self.page.wait_for_timeout(20)
        raise TimeoutError("the page did not get there")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The running browser."""
    if BROWSER is None:
        pytest.skip("no chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=CHROMIUM_FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., BrowserPage]]:
    """Opens a file: `open_page(path, width=1280, dark=False)`; returns when all figures are drawn.

    phone: a real one is emulated: its pixels, touch, and a layout viewport that grows where the page is too wide.
    """
    with ExitStack() as stack:

        def open_file(
            path: Path, *, width: int = 1280, height: int = 1000, dark: bool = False, phone: bool = False
        ) -> BrowserPage:
            screen = PHONE if phone else {"viewport": {"width": width, "height": height}}
            context = chromium.new_context(**screen, color_scheme="dark" if dark else "light")
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(TIMEOUT_MS)
            browser_page = BrowserPage(page)
            page.on("console", lambda message: browser_page.console_messages.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: browser_page.console_messages.append(f"error: {error}"))
            page.on("request", lambda request: _record_request(browser_page, request.url, path))
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready=yes]", state="attached")
            return browser_page

        yield open_file


def _record_request(browser_page: BrowserPage, url: str, path: Path) -> None:
    """Record requests other than the page itself and its data and blob URLs."""
    if url != path.as_uri() and not url.startswith(("data:", "blob:")):
        browser_page.requests.append(url)
