"""How long does one scenario take, and how much memory, in a process of its own?

`measured` starts the process, which reads a job from stdin and prints what it measured. Memory is the most that the
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

from tests.benchmarks.timing import TIMEOUTS, bare_timeouts, seconds_of

ROOT = Path(__file__).parents[2]
MEMORY = 12 * 2**30  # bytes of address space: a process that needs more ends, and not the machine
LIMIT = 300.0  # seconds
T = TypeVar("T")


class OutOfReachError(Exception):
    """A run took too long or too much memory."""


@dataclass(frozen=True, slots=True)
class Measured:
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
    simulated: int


def measured(mapping: dict[str, Any], *, times: int = 1, events: bool = False, limit: float = LIMIT) -> Measured:
    """Simulate a scenario so many times in one new process; raise OutOfReachError where it does not get there."""
    job = json.dumps({"mapping": mapping, "times": times, "events": events})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.isolated_process"],
            input=job, capture_output=True, text=True, timeout=limit, check=False, cwd=ROOT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OutOfReachError(f"over {limit:.0f} s") from None
    if done.returncode and "MemoryError" in done.stderr:
        raise OutOfReachError(f"over {MEMORY / 1e9:.0f} GB")
    if done.returncode:
        raise SystemExit(done.stderr)
    return Measured(**json.loads(done.stdout))


def best_measured(mapping: dict[str, Any], times: int = 3) -> Measured:
    """The fastest of some runs, each in its own process; with the most memory of any."""
    runs = [measured(mapping) for _ in range(times)]
    fastest = min(runs, key=lambda run: run.seconds)
    return Measured(**{**asdict(fastest), "peak_bytes": max(run.peak_bytes for run in runs)})


class _Counted(deque[T]):
    """A queue that knows how often something was taken from its front."""

    taken = 0

    def popleft(self) -> T:
        self.taken += 1
        return super().popleft()


def events_of(work: Callable[[], object]) -> int:
    """How many events all clocks let happen meanwhile."""
    counted: list[_Counted[Any]] = []

    def made() -> _Counted[Any]:
        counted.append(_Counted())
        return counted[-1]

    popped = mock.patch("clustersim.engine.kernel.environment.heappop", wraps=heappop)
    with popped as later, mock.patch("clustersim.engine.kernel.environment.deque", made):
        work()
    return later.call_count + sum(item.taken for item in counted)


def _measure(mapping: dict[str, Any], times: int, events: bool) -> Measured:
    from clustersim import Scenario, simulate  # not in the parent

    scenario = Scenario.from_mapping(mapping)
    results: list[Any] = []

    def work() -> None:
        results[:] = [simulate(scenario)]

    seconds, busy, timeouts = [], [], []
    for _ in range(times):
        timeouts.append(seconds_of(bare_timeouts))
        results.clear()
        before = process_time()
        seconds.append(seconds_of(work))
        busy.append(process_time() - before)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
    result = results[0]
    return Measured(
        seconds=min(seconds),
        cpu_seconds=min(busy),
        peak_bytes=peak,
        timeouts_per_s=TIMEOUTS / min(timeouts),
        events=events_of(work) if events else None,
        ranks=result.ranks,
        simulated=result.simulated_ranks,
    )


def main() -> None:
    """Read a job, print what was measured."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print(json.dumps(asdict(_measure(**json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
