"""What do the largest loads take? `python -m tests.benchmarks.load [--json FILE|-] [--only NAME ...]`.

Each case is one command in a process of its own, as a user types it: wall seconds, CPU seconds of all its processes and
memory of the largest of them, with the interpreter, the imports and reading the files. Its targets are half of what it
took when loads were first measured (27 November 2026). Steps that are jittered say how far they are apart.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np

from tests.benchmarks import cases
from tests.benchmarks.isolated_process import ROOT
from tests.benchmarks.timing import build_parser, write_figures

FIGURES: Final = {"seconds": ("s", 1.0), "cpu_seconds": ("CPU s", 1.0), "peak_bytes": ("GB", 1e9)}
"""Unit of each figure as it is printed."""


@dataclass(frozen=True, slots=True)
class Load:
    """A command. arguments: {plan} is the scenario's file, {folder} is for outputs; days: of the run that it is about.

    first_measured: figures when loads were first measured, in the units of `FIGURES`; each target is half of it.
    """

    mapping: Callable[[], cases.Mapping]
    arguments: tuple[str, ...]
    first_measured: Mapping[str, float]
    days: float | None = None


@dataclass(frozen=True, slots=True)
class LoadMeasurement:
    """What a command took. step_spread: largest of its steps' times over the least, less one; None for one step."""

    seconds: float
    cpu_seconds: float
    peak_bytes: float
    step_spread: float | None = None


def _run_json(steps: int) -> Load:
    first = {"peak_bytes": 7.2} if steps == 10 else {"seconds": 193.0}
    return Load(lambda: {**cases.jitter_16k(), "steps": steps}, ("run", "{plan}", "--json", "{folder}/run.json"), first)


_EXPLORE: Final = ("explore", "{plan}", "--html", "{folder}/page.html")
_GOODPUT: Final = ("goodput", "{plan}", "--runs")
LOADS: Final[dict[str, Load]] = {
    "gpus_1m": Load(cases.folded_1m, ("run", "{plan}"), {"peak_bytes": 9.3}),
    "experts_200_layers": Load(cases.uneven_experts_200_layers, ("run", "{plan}"), {"cpu_seconds": 69.0}),
    "jitter_10_steps": _run_json(10),
    "jitter_20_steps": _run_json(20),
    "explore_131k": Load(cases.folded_131k, _EXPLORE, {"seconds": 44.0, "peak_bytes": 3.3}),
    "goodput_year": Load(cases.goodput_16k, (*_GOODPUT, "1000"), {"seconds": 181.0}, days=365.0),
    "goodput_54_days": Load(cases.goodput_16k, (*_GOODPUT, "10000"), {"seconds": 63.0}, days=54.0),
}


def measure(load: Load) -> LoadMeasurement:
    """Run a load once."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        mapping = load.mapping()
        if load.days is not None:
            mapping["economics"] = {**mapping.get("economics", {}), "tokens": _tokens_of(mapping, load.days)}
        plan.write_text(json.dumps(mapping), encoding="utf-8")
        arguments = [argument.format(plan=plan, folder=folder) for argument in load.arguments]
        seconds, cpu_seconds, peak_bytes = _run_command(arguments)
        results = Path(folder) / "run.json"
        return LoadMeasurement(seconds, cpu_seconds, peak_bytes, _step_spread(results) if results.is_file() else None)


def _run_command(arguments: Sequence[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak bytes of a command and the processes that it starts."""
    started = perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "clustersim.cli", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 3):  # 3: it does not fit in memory
        raise SystemExit(errors)
    return perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0  # Linux counts KiB


def _tokens_of(mapping: cases.Mapping, days: float) -> int:
    """Tokens of so many days without failures."""
    with tempfile.TemporaryDirectory() as folder:
        plan, results = Path(folder) / "plan.json", Path(folder) / "run.json"
        plan.write_text(json.dumps(mapping), encoding="utf-8")
        _run_command(["run", str(plan), "--quiet", "--json", str(results)])
        step_time = json.loads(results.read_text())["step_time_s"]
    training = mapping["training"]
    return round(training["global_batch"] * training["sequence"] * days * 86400.0 / step_time)


def _step_spread(results: Path) -> float:
    times = np.array(json.loads(results.read_text())["step_times_s"])
    return float(times.max() / times.min() - 1.0)


def figures_by_name(measurements: Mapping[str, LoadMeasurement]) -> dict[str, float]:
    """All figures by name: seconds and bytes."""
    return {
        f"{name}_{figure}": value
        for name, measurement in measurements.items()
        for figure in (*FIGURES, "step_spread")
        if (value := getattr(measurement, figure)) is not None
    }


def table_lines(measurements: Mapping[str, LoadMeasurement]) -> Iterator[str]:
    """A table of loads against their targets."""
    yield f"{'load':20s} {'wall s':>9s} {'CPU s':>9s} {'MB':>7s}  targets"
    for name, measured in measurements.items():
        columns = f"{measured.seconds:9.1f} {measured.cpu_seconds:9.1f} {measured.peak_bytes / 1e6:7,.0f}"
        spread = "" if measured.step_spread is None else f"; steps {measured.step_spread:.2%} apart"
        yield f"{name:20s} {columns}  {'; '.join(_verdicts(LOADS[name], measured))}{spread}"


def _verdicts(load: Load, measured: LoadMeasurement) -> Iterator[str]:
    for figure, first in load.first_measured.items():
        unit, scale = FIGURES[figure]
        value, target = getattr(measured, figure) / scale, first / 2.0
        yield f"{first:g} -> {value:.3g} {unit}, at most {target:g}: {'met' if value <= target else 'NOT MET'}"


def main() -> None:
    """Print the table."""
    parser = build_parser("load", __doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(LOADS), default=tuple(LOADS), metavar="NAME",
                        help=f"only some of {', '.join(LOADS)}")  # fmt: skip
    options = parser.parse_args()
    measurements: dict[str, LoadMeasurement] = {}
    for name in options.only:
        measurements[name] = measure(LOADS[name])
        print(*list(table_lines({name: measurements[name]}))[1:], file=sys.stderr, flush=True)
    if write_figures(figures_by_name(measurements), options.json):
        print("", *table_lines(measurements), sep="\n")


if __name__ == "__main__":
    main()
