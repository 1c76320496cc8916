"""How much of the time do replicas work if each stalls whenever one of its chips fails?

As the simulator of decoupled DiLoCo has it (arXiv:2604.21428, its chaos engineering): every chip fails at the same
rate, only its replica stops, for a fixed time, and goes on with what is left. What fails meanwhile is left out at the
end of the same stall, so a replica of failure rate r works 1 / (1 + r x stall) of the time. (A job that begins its
restart again at each failure, as `reliability.job_simulation` does, would work exp(-r x stall) of it.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.units import Seconds
from clustersim.reliability.job_simulation import HEALTHY, RESTART
from clustersim.reliability.replica_outages import Presence
from clustersim.results.goodput import TimelineInterval

_FAILURES: Final = 4000
"""Simulated failures of all replicas: a sampling error of half a point."""


@dataclass(frozen=True, slots=True)
class FailingReplicas:
    """count: replicas; chip_rate: failures of all chips per second; stall: seconds; quorum: replicas that go on."""

    count: int
    chip_rate: float
    stall: Seconds
    quorum: int

    def goodput(self) -> float:
        """Mean fraction of the time that chips work."""
        horizon, rng = _FAILURES / self.chip_rate, np.random.default_rng(0)
        timelines = [list(self._timeline(horizon, rng)) for _ in range(self.count)]
        weights = np.full(self.count, 1.0 / self.count)
        return Presence.build(timelines, (), (), horizon).worked(weights, self.quorum)[1]

    def _timeline(self, horizon: Seconds, rng: np.random.Generator) -> Iterator[TimelineInterval]:
        time = 0.0
        while time < horizon:
            failure = time + float(rng.exponential(self.count / self.chip_rate))
            yield TimelineInterval(time, failure, HEALTHY)
            time = failure + self.stall
            yield TimelineInterval(failure, time, RESTART)
