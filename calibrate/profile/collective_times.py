"""How long does each collective of the profiled steps take, and how long do its members wait for each other?

The member that arrives last begins the transfer, and its duration is that; what the others last longer is waiting.
Both are means over everywhere the collective ran, as those of kernels are, so that they sum to what was measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibrate.import_kineto import call_or_reason
from calibrate.profile.samples import statistics
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CollectiveCall, CollectiveSample, TimeStatistics
from clustersim.hardware.cluster import Cluster
from clustersim.interop.kineto import ProfilerTraces
from clustersim.results.profiled_step import collective_durations


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """A collective of a step. transfer: from the arrival of its last member; waiting: of a member for that one."""

    call: CollectiveCall
    transfer: TimeStatistics
    waiting: Seconds
    source: str

    def sample(self, waiting_share: float = 0.0, scale: float = 1.0) -> CollectiveSample:
        """The sample of a record, with a share of the waiting; scale: of all of its times."""
        added, transfer = self.waiting * waiting_share, self.transfer
        waited = replace(transfer, seconds=transfer.seconds + added, p5=transfer.p5 + added, p95=transfer.p95 + added)
        return CollectiveSample(self.call, waited.scaled(scale), self.source)


def collective_times(traces: ProfilerTraces, cluster: Cluster, steps: Iterable[int]) -> tuple[CollectiveTime, ...]:
    """The collectives whose groups and payloads are known, in some steps (their numbers)."""
    seconds: dict[CollectiveCall, list[Sequence[Seconds]]] = {}
    for step in steps:
        index = traces.ranks[0].step_numbers.index(step)
        for (collective, _), seconds_by_rank in collective_durations(traces.ranks, index).items():
            call = call_or_reason(collective, cluster)
            if isinstance(call, CollectiveCall):
                seconds.setdefault(call, []).append([*seconds_by_rank.values()])
    return tuple(
        CollectiveTime(
            call,
            statistics(min(members) for members in executions),
            float(np.mean([np.mean(members) - min(members) for members in executions])),
            traces.source,
        )
        for call, executions in seconds.items()
    )
