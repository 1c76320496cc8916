"""How fast is one simulation? `python -m tests.benchmarks.step [--json FILE|-]`.

Times are the best of three. A new process reads compiled modules, as one of an installed package does. The rate of
bare simpy timeouts in the same run is printed as well: absolute times differ between machines, the ratio does not.
"""

import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from clustersim import Scenario, simulate
from tests.benchmarks.cases import EXAMPLE
from tests.benchmarks.timing import TIMEOUTS, best_time, build_parser, run_bare_timeouts, write_figures


def python_peak_bytes(work: Callable[[], object]) -> int:
    """Peak memory that Python allocates during a call (tracemalloc)."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def cold_process(cache: str, *arguments: str) -> Callable[[], object]:
    """A call that runs Python in a new process; cache: directory of compiled modules, which the first call writes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)


def measure() -> dict[str, float]:
    """All figures by name; seconds, bytes, counts."""
    scenario = Scenario.load(EXAMPLE)
    result = simulate(scenario)
    with tempfile.TemporaryDirectory() as folder:
        run = ("-m", "clustersim.cli", "run", str(EXAMPLE))
        run_cold = best_time(cold_process(folder, *run))
        run_html_cold = best_time(cold_process(folder, *run, "--html", str(Path(folder) / "page.html")))
        empty_process = best_time(cold_process(folder, "-c", "pass"))
        import_cold = best_time(cold_process(folder, "-c", "import clustersim")) - empty_process
    timeout = best_time(run_bare_timeouts) / TIMEOUTS
    event_count = len(result.trace)
    return {
        "simulate_405b_16k_s": best_time(lambda: simulate(scenario)),
        "simulate_405b_16k_peak_bytes": python_peak_bytes(lambda: simulate(scenario)),
        "trace_rows": event_count,
        "spans": result.operation_count,
        "bare_timeouts_per_s": 1 / timeout,
        "bare_timeouts_of_trace_rows_s": event_count * timeout,
        "run_cold_s": run_cold,
        "run_html_cold_s": run_html_cold,
        "import_clustersim_s": import_cold,
    }


def main() -> None:
    """Print the figures."""
    options = build_parser("step", __doc__).parse_args()
    write_figures(measure(), options.json)


if __name__ == "__main__":
    main()
