"""How fast is one answer? `python -m tests.benchmarks.step [--json FILE|-]`.

Times are the best of three. Beside them, from the same run, stands the rate of bare simpy timeouts: machines differ,
the ratio does not.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import simpy

from clustersim import Scenario, simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3_405b_16k.yaml"
TIMEOUTS = 100_000


def best(work: Callable[[], object], times: int = 3) -> float:
    """Seconds of the fastest of some runs."""
    seconds = []
    for _ in range(times):
        started = perf_counter()
        work()
        seconds.append(perf_counter() - started)
    return min(seconds)


def bare_timeouts(count: int = TIMEOUTS) -> None:
    """Let one simpy process wait `count` times."""
    environment = simpy.Environment()

    def waits() -> simpy.events.ProcessGenerator:
        for _ in range(count):
            yield environment.timeout(1.0)

    environment.process(waits())
    environment.run()


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that Python allocates meanwhile."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def command(*arguments: str) -> Callable[[], object]:
    """A cold process."""
    return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def measure() -> dict[str, float]:
    """All figures by name; seconds, bytes, counts."""
    scenario = Scenario.load(EXAMPLE)
    result = simulate(scenario)
    with tempfile.TemporaryDirectory() as folder:
        page = str(Path(folder) / "page.html")
        cold = best(command("-m", "clustersim.cli", "run", str(EXAMPLE), "--html", page))
    timeout = best(bare_timeouts) / TIMEOUTS
    rows = len(result.trace)
    return {
        "simulate_405b_16k_s": best(lambda: simulate(scenario)),
        "simulate_405b_16k_peak_bytes": peak_bytes(lambda: simulate(scenario)),
        "trace_rows": rows,
        "spans": result.spans,
        "bare_timeouts_per_s": 1 / timeout,
        "bare_timeouts_of_trace_rows_s": rows * timeout,
        "run_html_cold_s": cold,
        "import_clustersim_s": best(command("-c", "import clustersim")) - best(command("-c", "pass")),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.step", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON to FILE, or to stdout for -")
    options = parser.parse_args()
    figures = measure()
    if options.json == "-":
        print(json.dumps(figures, indent=2))
        return
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for name, value in figures.items():
        print(f"{name:32s} {value:,.4g}")


if __name__ == "__main__":
    main()
