"""What does `clustersim run` do? Read a scenario, simulate it, write what was asked for, say whether it fits."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.cli.outputs import Outputs, write_json
from clustersim.cli.waiting import waiting_for
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.report.view import PageView
    from clustersim.result import Result


def run_scenario(file: Path, overrides: Sequence[str], outputs: Outputs) -> bool:
    """Simulate and answer; whether the scenario fits in memory."""
    scenario = Scenario.load(file, overrides)
    outputs.require((file, *scenario.files))
    if outputs.table:
        _announce_wait(scenario)
    from clustersim.simulation import simulate

    with waiting_for("simulating"):
        result = simulate(scenario)
        if outputs.json is not None:
            write_json(result.to_json(), outputs.json)
        if outputs.trace and outputs.table:
            _announce_trace(result, outputs.trace)
        traced = _write_trace(result, outputs.trace)
        if outputs.drawn:
            from clustersim.report.answer import page_view

            view = page_view(result)
            _write_page(view, outputs.html)
    if outputs.table:
        _print(view)
        for option, path in outputs.files.items():
            print(f"wrote {path}{traced if option == '--trace' else ''}")
    return result.fits


def _announce_wait(scenario: Scenario) -> None:
    """Say beforehand what takes long; the answer says it again."""
    from clustersim.scenario.warnings import long_waits

    for warning in long_waits(scenario):
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _announce_trace(result: "Result", path: str) -> None:
    """Say how much is about to be written, where that takes a while."""
    from clustersim.report.trace import MANY_SPANS, spans_of

    spans = spans_of(result)
    if spans >= MANY_SPANS:
        print(f"writing about {spans:,} spans to {path}", file=sys.stderr, flush=True)


def _write_trace(result: "Result", path: str | None) -> str:
    """Write the trace; say of how many ranks, if not of all that were simulated."""
    if path is None:
        return ""
    from clustersim.report.trace import write_trace

    ranks = write_trace(result, path)
    return f" ({ranks:,} of {result.simulated_ranks:,} simulated ranks)" if ranks < result.simulated_ranks else ""


def _write_page(view: "PageView", path: str | None) -> None:
    if path is not None:
        from clustersim.report.page import write_page

        write_page(view, path)


def _print(view: "PageView") -> None:
    from rich.console import Console

    from clustersim.report.table import render_table

    Console().print(render_table(view))
