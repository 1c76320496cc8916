"""How are benchmark figures measured and printed?

Times are the best of several runs. The rate of bare simpy timeouts in the same run is printed as well,
because machines differ.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import simpy

TIMEOUTS = 100_000


def time_call(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start_time = perf_counter()
    work()
    return perf_counter() - start_time


def best_time(work: Callable[[], object], times: int = 3) -> float:
    """Wall-clock seconds of the fastest of several calls."""
    return min(time_call(work) for _ in range(times))


def run_bare_timeouts(count: int = TIMEOUTS) -> None:
    """Let one simpy process wait `count` times."""
    environment = simpy.Environment()

    def wait_repeatedly() -> simpy.events.ProcessGenerator:
        for _ in range(count):
            yield environment.timeout(1.0)

    environment.process(wait_repeatedly())
    environment.run()


def build_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Argument parser of a benchmark."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{module}", description=description)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON to FILE, or to stdout for -")
    return parser


def write_figures(figures: Mapping[str, Any], target: str | None) -> bool:
    """Write the figures to the `--json` target; print them, and return True, unless JSON goes to stdout."""
    text = json.dumps(figures, indent=2)
    if target == "-":
        print(text)
        return False
    if target:
        Path(target).write_text(text + "\n", encoding="utf-8")
    for name, value in figures.items():
        if isinstance(value, int | float):
            print(f"{name:32s} {value:,.4g}")
    return True
