"""What does `clustersim run` do? Read a scenario, simulate it, write what was asked for, say whether it fits."""

import json as json_format
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.cli.waiting import waiting_for
from clustersim.errors import InputError
from clustersim.report.files import require_writable, write_text_atomically
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.report.view import PageView
    from clustersim.result import Result

STDOUT = "-"


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where answers go. json: a path or `-` for stdout; table: print one."""

    json: str | None
    html: Path | None
    trace: Path | None
    table: bool

    @property
    def files(self) -> dict[str, Path]:
        """Option and path of every file that is written."""
        json = None if self.json in (None, STDOUT) else Path(str(self.json))
        wanted = {"--json": json, "--html": self.html, "--trace": self.trace}
        return {option: path for option, path in wanted.items() if path is not None}

    @property
    def drawn(self) -> bool:
        """Whether anything but bare numbers is asked for."""
        return self.table or self.html is not None or self.trace is not None


def run_scenario(file: Path, overrides: Sequence[str], outputs: Outputs) -> bool:
    """Simulate and answer; whether the scenario fits in memory."""
    scenario = Scenario.load(file, overrides)
    _require_writable(outputs.files)
    from clustersim.simulation import simulate

    with waiting_for("simulating"):
        result = simulate(scenario)
        _write_json(result, outputs.json)
        if outputs.drawn:
            from clustersim.report.answer import page_view

            view = page_view(result)
            _write(view, outputs)
    if outputs.table:
        _print(view, outputs.files.values())
    return result.fits


def _require_writable(files: dict[str, Path]) -> None:
    """Refuse what cannot be written before any time is spent on it."""
    if len({path.resolve() for path in files.values()}) < len(files):
        raise InputError(f"{' and '.join(files)} need different files")
    for path in files.values():
        require_writable(path)


def _write_json(result: "Result", path: str | None) -> None:
    if path is None:
        return
    text = json_format.dumps(result.to_json(), indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        write_text_atomically(path, text)


def _write(view: "PageView", outputs: Outputs) -> None:
    if outputs.trace is not None:
        from clustersim.report.perfetto import write_trace

        write_trace(view.timeline, outputs.trace)
    if outputs.html is not None:
        from clustersim.report.page import write_page

        write_page(view, outputs.html)


def _print(view: "PageView", written: Iterable[Path]) -> None:
    from rich.console import Console

    from clustersim.report.table import render_table

    Console().print(render_table(view.subject, view.verdict, view.breakdown, view.trust))
    for path in written:
        print(f"wrote {path}")
