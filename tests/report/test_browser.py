"""The page in a real browser, where one is installed: what was drawn is read back from the document."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from clustersim.report.page import write_page
from clustersim.report.topology import Tier, write_topology_page
from clustersim.report.view import PageView

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=8000 --window-size=1280,2400 "
    "--enable-logging=stderr --v=0"
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no chromium is installed"),
]


def opened(path: Path, home: Path) -> tuple[str, str]:
    """The document after its scripts ran, and what was written to the console."""
    command = [str(BROWSER), *QUIET.split(), f"--user-data-dir={home / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_the_page_draws_its_figures_without_a_complaint(make_view: Callable[..., PageView], tmp_path: Path) -> None:
    write_page(make_view(4, 8, 2, title="</script><b>hostile"), tmp_path / "page.html")
    document, console = opened(tmp_path / "page.html", tmp_path)
    assert console == ""
    assert document.count('class="main-svg"') >= 5  # two or three for each of five figures
    bars = len(re.findall(r'class="point"', document))
    assert bars >= 4 * (4 * 8 * 2)  # 4 stages × 8 microbatches × 2 chunks, forward and backward, and their sends
    assert re.search(r"<text[^>]*>(?:<tspan[^>]*>)?7<", document), "a microbatch's number is in its box"


def test_the_topology_draws(tmp_path: Path) -> None:
    write_topology_page("pod", [Tier("GPU", 32, "450 GB/s"), Tier("leaf switch", 4)], tmp_path / "pod.html")
    document, console = opened(tmp_path / "pod.html", tmp_path)
    assert console == ""
    assert "32 × GPU" in document
