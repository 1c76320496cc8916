"""How long does one scenario take, and how much memory, in a process of its own?

`measure_in_process` starts the process, which reads a job from stdin and prints its measurements. Memory is
the peak resident set of the process (interpreter and imports included), so it must not have run anything
before. Linux counts the resident set of the parent at the start of the process as well, so the parent stays
small: it never simulates.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any
from unittest import mock

import simpy

from tests.benchmarks.timing import TIMEOUTS, run_bare_timeouts, time_call

ROOT = Path(__file__).parents[2]
MEMORY_LIMIT = 12 * 2**30  # bytes of address space: a process that needs more fails, instead of exhausting the machine
TIME_LIMIT = 300.0  # seconds


class ResourceLimitError(Exception):
    """A run exceeded the time limit or the memory limit."""


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """Measurements of one process.

    seconds: fastest simulate(); cpu_seconds: minimum over the runs, summed over threads; timeouts_per_s: bare
    simpy timeouts, maximum over as many runs; events: processed by simpy environments, None if not counted;
    ranks: of the scenario; simulated_ranks: those simulated one by one.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    timeouts_per_s: float
    events: int | None
    ranks: int
    simulated_ranks: int


def measure_in_process(
    mapping: dict[str, Any], *, times: int = 1, events: bool = False, timeout: float = TIME_LIMIT
) -> RunMeasurement:
    """Simulate a scenario `times` times in one new process; raise ResourceLimitError where a limit is exceeded."""
    job = json.dumps({"mapping": mapping, "times": times, "events": events})
    try:
        process = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.isolated_process"],
            input=job, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ResourceLimitError(f"over {timeout:.0f} s") from None
    if process.returncode and "MemoryError" in process.stderr:
        raise ResourceLimitError(f"over {MEMORY_LIMIT / 1e9:.0f} GB")
    if process.returncode:
        raise SystemExit(process.stderr)
    return RunMeasurement(**json.loads(process.stdout))


def measure_best(mapping: dict[str, Any], times: int = 3) -> RunMeasurement:
    """The fastest of several runs, each in its own process, with the maximum peak memory of all."""
    runs = [measure_in_process(mapping) for _ in range(times)]
    fastest = min(runs, key=lambda run: run.seconds)
    return RunMeasurement(**{**asdict(fastest), "peak_bytes": max(run.peak_bytes for run in runs)})


def count_events(work: Callable[[], object]) -> int:
    """Number of events that all simpy environments process during a call."""
    event_count, process_event = 0, simpy.Environment.step

    def count_event(environment: simpy.Environment) -> None:
        nonlocal event_count
        process_event(environment)
        event_count += 1

    with mock.patch.object(simpy.Environment, "step", count_event):
        work()
    return event_count


def _measure(mapping: dict[str, Any], times: int, events: bool) -> RunMeasurement:
    from clustersim import Scenario, simulate  # not in the parent

    scenario = Scenario.from_mapping(mapping)
    results: list[Any] = []

    def work() -> None:
        results[:] = [simulate(scenario)]

    seconds, cpu_times, timeouts = [], [], []
    for _ in range(times):
        timeouts.append(time_call(run_bare_timeouts))
        results.clear()
        start_time = process_time()
        seconds.append(time_call(work))
        cpu_times.append(process_time() - start_time)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
    result = results[0]
    return RunMeasurement(
        seconds=min(seconds),
        cpu_seconds=min(cpu_times),
        peak_bytes=peak,
        timeouts_per_s=TIMEOUTS / min(timeouts),
        events=count_events(work) if events else None,
        ranks=result.rank_count,
        simulated_ranks=result.simulated_rank_count,
    )


def main() -> None:
    """Read a job, print what was measured."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    print(json.dumps(asdict(_measure(**json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
