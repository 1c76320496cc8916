"""How large is the HTML page of few and of a million spans, and how fast does a browser draw it and zoom?

    python -m tests.benchmarks.page

Needs chromium; rendering is in software, as on a machine without a GPU. Compare ratios within a run, not
runs: an empty page with only plotly.js is opened for comparison.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from clustersim.report.html_document import PLOTLY_PATH
from clustersim.report.result_timeline import build_timeline
from clustersim.report.row_selection import select_ranks
from clustersim.report.run_page import run_page
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.browser.conftest import BROWSER, CHROMIUM_FLAGS, TIMEOUT_MS

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
PAGE_CASES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "512": ("llama3_405b_16k.yaml", (
        "model={preset: llama3-8b, layers: 4}", "cluster.gpus=8", "layout={tp: 2, pp: 2, dp: 2}", "schedule=1f1b",
        "training.global_batch=4", "training.recompute=none",
    )),
    "50k": ("llama3_405b_16k.yaml", ("training.global_batch=1280",)),
    "1M, each of its own time": ("gpt3_175b_1k.yaml", (
        "cluster.gpus=64", "layout.dp=1", "training.global_batch=800", "degradations.jitter=2%",
    )),
}  # fmt: skip
ZOOM_FRACTIONS: Final = (0.1, 0.01, 0.001, 1.0)  # fractions of the step
ROW_FORMAT: Final = "{:26} {:>10} {:>8} {:>9} {:>9} {:>9} {:>11}"


@dataclass(frozen=True, slots=True)
class BenchmarkPage:
    """A page. spans: kernels and collectives in it; write_seconds: time to write it."""

    text: str
    spans: int
    write_seconds: float


def render_example(file: str, changes: tuple[str, ...]) -> BenchmarkPage:
    """The page of an example with overrides."""
    result = simulate(Scenario.load(EXAMPLES / file, list(changes)))
    start_time = perf_counter()
    text = run_page(result)
    write_seconds = perf_counter() - start_time
    timeline = build_timeline(result, select_ranks(result))
    kernels, spans = timeline.kernels, timeline.spans
    assert kernels is not None
    kernel_counts = (kernels.first[1:] - kernels.first[:-1])[kernels.template[kernels.template >= 0]]
    return BenchmarkPage(text, int(kernel_counts.sum() + (spans.lane > 0).sum()), write_seconds)


@contextmanager
def open_browser_page() -> Iterator[Any]:
    """A new page of the system's browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=CHROMIUM_FLAGS.split())
        page = chromium.new_context(viewport={"width": 1280, "height": 1000}).new_page()
        page.set_default_timeout(TIMEOUT_MS)
        yield page
        chromium.close()


def measure_page_load(path: Path, figure: str) -> tuple[float, float, float]:
    """Seconds until the first text is painted, until a figure is drawn, and of its slowest zoom.

    Without a figure: 0, seconds until the page is loaded, 0.
    """
    with open_browser_page() as page:
        start_time = perf_counter()
        page.goto(path.as_uri(), wait_until="commit")
        if not figure:
            page.wait_for_load_state("load")
            return 0.0, perf_counter() - start_time, 0.0
        page.wait_for_selector(f"#{figure}[data-drawn]", state="attached")
        drawn = perf_counter() - start_time
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        first_paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1e3
        return first_paint, drawn, max(measure_zoom(page, figure, fraction) for fraction in ZOOM_FRACTIONS)


def measure_zoom(page: Any, figure: str, fraction: float) -> float:
    """Seconds from requesting a zoom to a centered fraction of the step until it is drawn."""
    milliseconds: float = page.evaluate(
        """async ([name, part]) => {
            const plot = document.getElementById(name), { size, whole } = clustersim.tools.figure(name).figure.facts;
            const before = plot.dataset.drawn, begun = performance.now();
            const range = [0.5 - part / 2, 0.5 + part / 2].map((share) => (share * whole) / size);
            await Plotly.relayout(plot, { "xaxis.range": range });
            while (plot.dataset.drawn === before) await new Promise(requestAnimationFrame);
            await new Promise((next) => requestAnimationFrame(() => setTimeout(next)));
            return performance.now() - begun;
        }""",
        [figure, fraction],
    )
    return milliseconds / 1e3


def main() -> None:
    """Print a line for each size."""
    print(ROW_FORMAT.format("spans in the page", "in all", "MB", "written", "words", "timeline", "slowest zoom"))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "page.html"
        for name, case in PAGE_CASES.items():
            page = render_example(*case)
            target.write_text(page.text, encoding="utf-8")
            first_paint, drawn, zoom = measure_page_load(target, "timeline")
            times = (f"{seconds:.2f} s" for seconds in (page.write_seconds, first_paint, drawn, zoom))
            print(
                ROW_FORMAT.format(name, f"{page.spans:,}", f"{len(page.text.encode()) / 1e6:.1f}", *times), flush=True
            )
        library = PLOTLY_PATH.read_text(encoding="utf-8")
        target.write_text(f"<!doctype html><body><script>{library}</script>", encoding="utf-8")
        _, load_seconds, _ = measure_page_load(target, "")
        print(
            ROW_FORMAT.format("plotly.js alone", "", f"{len(library) / 1e6:.1f}", "", "", f"{load_seconds:.2f} s", "")
        )


if __name__ == "__main__":
    main()
