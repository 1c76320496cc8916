"""What else uses the links while a step runs?

Background traffic: collectives and messages of other jobs, among any GPUs of the cluster, once or
periodically; and links that lose a fraction of their bandwidth for a while. Both are flows concurrent with
the step's, on the same links by the same rules: background traffic takes its library's fastest algorithm and
shares links max-min fair; the lost fraction of a slow link is modelled as a flow with strict priority. Routes
and algorithms stay as without them.

Assumed: background flows start at fixed times and wait only for their own previous run, so they and the
step slow each other, but what the other jobs compute is not modelled.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from clustersim.collectives.library import Library
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.hardware.degradation import Degradations, SlowLinkEffect
from clustersim.hardware.topology import Fabric
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp

STRICT_PRIORITY_SHARE = 1e12
"""Weight in max-min sharing of a flow with strict priority (shares of other flows are seconds per byte)."""
_BACKGROUND = "others"


@dataclass(frozen=True, slots=True)
class TrafficPattern:
    """A collective or message of background traffic.

    gpu_ids: GPUs of the cluster, root or sender first; start_seconds: first start; period_seconds: time between
    starts (a run that takes longer delays the next), infinite: runs once; end_seconds: no run starts after this
    time.
    """

    gpu_ids: tuple[int, ...]
    collective: CollectiveType
    payload: Bytes
    start_seconds: Seconds = 0.0
    period_seconds: Seconds = inf
    end_seconds: Seconds = inf


@dataclass(frozen=True, slots=True, eq=False)
class BackgroundFlow:
    """A background flow and the load it puts on links.

    link_ids: [links]; link_seconds: [links] seconds that each is busy per second of the flow; latency: seconds
    before any byte moves; transfer_seconds: duration of the transfer without contention; fair_share: weight by
    which links are shared; start_seconds, period_seconds, end_seconds: as in `TrafficPattern`.
    """

    link_ids: IntArray
    link_seconds: FloatArray
    latency: Seconds
    transfer_seconds: Seconds
    fair_share: float
    start_seconds: Seconds
    period_seconds: Seconds
    end_seconds: Seconds


def background_flows(
    patterns: Iterable[TrafficPattern], degradations: Degradations, fabric: Fabric, library: Library
) -> tuple[BackgroundFlow, ...]:
    """All background flows on the links of a step. fabric: the cluster's, whose links the job uses as well.

    Raises InputError, whose message begins with the entry, for a collective that the library has no algorithm
    for.
    """
    return (*_traffic_flows(patterns, fabric, library), *_slow_link_flows(degradations, fabric))


def loaded_links(flows: Iterable[BackgroundFlow]) -> IntArray:
    """Ids of the links that any of the background flows loads, ascending."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(flow.link_ids for flow in flows)]))


def _traffic_flows(patterns: Iterable[TrafficPattern], fabric: Fabric, library: Library) -> Iterator[BackgroundFlow]:
    """Flows of background collectives and messages."""
    for pattern_index, pattern in enumerate(patterns):
        members = np.array(pattern.gpu_ids, np.int64)[None]
        model = CollectiveCost(fabric, library, {_BACKGROUND: ProcessGroups(_BACKGROUND, members, ordered=True)})
        try:
            demand = model.link_demand(CommOp(_BACKGROUND, pattern.collective, _BACKGROUND, pattern.payload))
        except InputError as error:
            raise InputError(f"traffic.{pattern_index}: {error}") from error
        if demand.transfer[0] > 0.0:
            yield BackgroundFlow(
                link_ids=demand.link_loads.link_index,
                link_seconds=demand.link_loads.seconds_per_byte / demand.per_byte[0],
                latency=float(demand.latency[0]),
                transfer_seconds=float(demand.transfer[0]),
                fair_share=float(demand.transfer[0] / demand.flow[0]),
                start_seconds=pattern.start_seconds,
                period_seconds=pattern.period_seconds,
                end_seconds=pattern.end_seconds,
            )


def _slow_link_flows(degradations: Degradations, fabric: Fabric) -> Iterator[BackgroundFlow]:
    """Flows that stand for the bandwidth that slow links lose for a while."""
    for degradation in degradations.temporary_links:
        if degradation.active_period is not None and isinstance(degradation.effect, SlowLinkEffect):
            (start, end), lost_share = degradation.active_period, 1.0 - degradation.effect.bandwidth_fraction
            for link_id in degradation.link_ids(fabric) if lost_share > 0.0 else ():
                yield BackgroundFlow(
                    np.array([link_id]),
                    np.array([lost_share]),
                    0.0,
                    end - start,
                    STRICT_PRIORITY_SHARE,
                    start,
                    inf,
                    inf,
                )
