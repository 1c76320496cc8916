"""What does `clustersim run` do? Read a scenario, simulate it, write what was asked for, say whether it fits."""

import json as json_format
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from clustersim.cli.waiting import waiting_for
from clustersim.errors import InputError
from clustersim.report.files import atomic_file
from clustersim.scenario import Scenario

if TYPE_CHECKING:
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


def run_scenario(file: Path, overrides: Sequence[str], outputs: Outputs) -> bool:
    """Simulate and write; whether the scenario fits in memory. Files appear only if everything could be written."""
    scenario = Scenario.load(file, overrides)
    with _opened(outputs.files) as files:
        from clustersim.simulation import simulate

        with waiting_for("simulating"):
            result = simulate(scenario)
        for option, opened in files.items():
            opened.write(_WRITERS[option](result))
    _print(scenario, result, outputs)
    return result.fits


@contextmanager
def _opened(files: dict[str, Path]) -> Iterator[dict[str, IO[bytes]]]:
    """Open all files before the work starts, so that one that cannot be written costs no waiting."""
    paths = [path.resolve() for path in files.values()]
    if len(set(paths)) < len(paths):
        raise InputError(f"{' and '.join(files)} need different files")
    with ExitStack() as stack:
        yield {option: stack.enter_context(atomic_file(path)) for option, path in files.items()}


def _json(result: "Result") -> bytes:
    return (json_format.dumps(result.to_json(), indent=2, allow_nan=False) + "\n").encode()


def _page(result: "Result") -> bytes:
    return result.to_html().encode()


def _trace(result: "Result") -> bytes:
    return result.to_perfetto()


_WRITERS = {"--json": _json, "--html": _page, "--trace": _trace}


def _print(scenario: Scenario, result: "Result", outputs: Outputs) -> None:
    if outputs.json == STDOUT:
        sys.stdout.write(_json(result).decode())
    if outputs.table:
        from rich.console import Console

        from clustersim.cli.table import print_answer

        title = f"{scenario.name}: {scenario.model.name} on {scenario.cluster.gpus:,} GPUs"
        print_answer(Console(), title, result.to_json())
        for path in outputs.files.values():
            print(f"wrote {path}")
