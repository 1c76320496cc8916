"""How long does one scenario take, and how much memory, in a process of its own?

`measure_in_process` starts the process, which reads a job from stdin and prints what it measured. Memory is the most that the
process ever held (its resident set, interpreter and imports included), so it must not have done other things before.
Since Linux counts what the parent held when it started the process, too, the parent stays small: it never simulates.
"""

import json
import resource
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from heapq import heappop
from pathlib import Path
from time import process_time
from typing import Any, TypeVar
from unittest import mock

from tests.benchmarks.timing import TIMEOUTS, run_bare_timeouts, time_call

ROOT = Path(__file__).parents[2]
MEMORY_LIMIT = 12 * 2**30  # bytes of address space: a process that needs more ends, and not the machine
TIME_LIMIT = 300.0  # seconds
ItemT = TypeVar("ItemT")


class ResourceLimitError(Exception):
    """A run took too long or too much memory."""


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """What one process found.

    seconds: of the fastest simulate(); cpu_seconds: of all its threads, the least of any run; timeouts_per_s: bare
    simpy timeouts, the best of as many runs; events: that simpy environments processed, None if not counted; ranks,
    simulated: in the scenario, and run one by one.
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
    """Simulate a scenario so many times in one new process; raise OutOfReachError where it does not get there."""
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
    """The fastest of some runs, each in its own process; with the most memory of any."""
    runs = [measure_in_process(mapping) for _ in range(times)]
    fastest = min(runs, key=lambda run: run.seconds)
    return RunMeasurement(**{**asdict(fastest), "peak_bytes": max(run.peak_bytes for run in runs)})


class _CountingDeque(deque[ItemT]):
    """A queue that knows how often something was taken from its front."""

    pop_count = 0

    def popleft(self) -> ItemT:
        self.pop_count += 1
        return super().popleft()


def count_events(work: Callable[[], object]) -> int:
    """How many events all clocks let happen meanwhile."""
    deques: list[_CountingDeque[Any]] = []

    def new_deque() -> _CountingDeque[Any]:
        deques.append(_CountingDeque())
        return deques[-1]

    heappop_patch = mock.patch("clustersim.engine.kernel.environment.heappop", wraps=heappop)
    with heappop_patch as heappop_mock, mock.patch("clustersim.engine.kernel.environment.deque", new_deque):
        work()
    return heappop_mock.call_count + sum(counting_deque.pop_count for counting_deque in deques)


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
        ranks=result.ranks,
        simulated_ranks=result.simulated_ranks,
    )


def main() -> None:
    """Read a job, print what was measured."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    print(json.dumps(asdict(_measure(**json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
