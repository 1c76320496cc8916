"""How is a figure taken, and how is it shown?

Times are the best of some runs. Machines differ, so the rate of bare simpy timeouts of the same run stands beside them.
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
    """Wall time of one run."""
    start_time = perf_counter()
    work()
    return perf_counter() - start_time


def best_time(work: Callable[[], object], times: int = 3) -> float:
    """Seconds of the fastest of some runs."""
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
    """Command line of a benchmark."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{module}", description=description)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON to FILE, or to stdout for -")
    return parser


def write_figures(figures: Mapping[str, Any], target: str | None) -> bool:
    """Write figures where `--json` says; print them and say so where they are not the only thing on stdout."""
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
