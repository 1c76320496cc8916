"""What else is on the links while a step runs?

Collectives and messages of others, among any GPUs of the machine, once or again and again; and links that for a while
have a part of their bandwidth. Both are loads beside the step's own, on the same links by the same rules: what others
send takes its library's fastest algorithm and shares links max-min fair; what a slow link lacks is kept busy by
nobody's traffic, before all others. Routes and algorithms stay as they would be without.

Assumed: others begin at times of their own and wait for nothing but their own last time, so a step slows them and they
slow the step, but what they compute is not looked at.
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
"""The share of what comes before all others: theirs are seconds for each byte of a flow."""
_BACKGROUND = "others"


@dataclass(frozen=True, slots=True)
class TrafficPattern:
    """A collective or message of others.

    gpus: the machine's numbers, the root or sender first; start: when it first begins; every: after so many seconds
    again, or when the last time has ended if that is later, infinite: not again; until: it does not begin after that.
    """

    gpu_ids: tuple[int, ...]
    collective: CollectiveType
    payload: Bytes
    start_seconds: Seconds = 0.0
    period_seconds: Seconds = inf
    end_seconds: Seconds = inf


@dataclass(frozen=True, slots=True, eq=False)
class BackgroundFlow:
    """What others ask of links. link: [links] numbers; busy: [links] seconds of each for a second of work.

    latency: seconds before anything moves; seconds: of work; share: by which links are divided; start, every, until: as
    in `TrafficPattern`.
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
    """All that is on links beside a step. fabric: the machine's, whose links are the job's, too.

    Raises InputError, whose sentence begins with the entry, for a collective that the library cannot do.
    """
    return (*_traffic_flows(patterns, fabric, library), *_slow_link_flows(degradations, fabric))


def loaded_links(flows: Iterable[BackgroundFlow]) -> IntArray:
    """The links that any of the others loads, ascending."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(flow.link_ids for flow in flows)]))


def _traffic_flows(patterns: Iterable[TrafficPattern], fabric: Fabric, library: Library) -> Iterator[BackgroundFlow]:
    """What moves bytes over links."""
    for entry, pattern in enumerate(patterns):
        members = np.array(pattern.gpu_ids, np.int64)[None]
        model = CollectiveCost(fabric, library, {_BACKGROUND: ProcessGroups(_BACKGROUND, members, ordered=True)})
        try:
            demand = model.link_demand(CommOp(_BACKGROUND, pattern.collective, _BACKGROUND, pattern.payload))
        except InputError as error:
            raise InputError(f"traffic.{entry}: {error}") from error
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
    """What slow links lack for a while."""
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
