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
from clustersim.cost.collective_cost import CommunicationCost
from clustersim.hardware.degradation import Disturbances, SlowLink
from clustersim.hardware.topology import Fabric
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp

FIRST = 1e12
"""The share of what comes before all others: theirs are seconds for each byte of a flow."""
_OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Traffic:
    """A collective or message of others.

    gpus: the machine's numbers, the root or sender first; start: when it first begins; every: after so many seconds
    again, or when the last time has ended if that is later, infinite: not again; until: it does not begin after that.
    """

    gpus: tuple[int, ...]
    collective: CollectiveType
    payload: Bytes
    start: Seconds = 0.0
    every: Seconds = inf
    until: Seconds = inf


@dataclass(frozen=True, slots=True, eq=False)
class Other:
    """What others ask of links. link: [links] numbers; busy: [links] seconds of each for a second of work.

    latency: seconds before anything moves; seconds: of work; share: by which links are divided; start, every, until: as
    in `Traffic`.
    """

    link: IntArray
    busy: FloatArray
    latency: Seconds
    seconds: Seconds
    share: float
    start: Seconds
    every: Seconds
    until: Seconds


def others(
    traffic: Iterable[Traffic], disturbances: Disturbances, fabric: Fabric, library: Library
) -> tuple[Other, ...]:
    """All that is on links beside a step. fabric: the machine's, whose links are the job's, too.

    Raises InputError, whose sentence begins with the entry, for a collective that the library cannot do.
    """
    return (*_sent(traffic, fabric, library), *_lacking(disturbances, fabric))


def loaded_by(found: Iterable[Other]) -> IntArray:
    """The links that any of the others loads, ascending."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(other.link for other in found)]))


def _sent(traffic: Iterable[Traffic], fabric: Fabric, library: Library) -> Iterator[Other]:
    """What moves bytes over links."""
    for entry, item in enumerate(traffic):
        members = np.array(item.gpus, np.int64)[None]
        model = CommunicationCost(fabric, library, {_OTHERS: ProcessGroups(_OTHERS, members, ordered=True)})
        try:
            demand = model.demand(CommOp(_OTHERS, item.collective, _OTHERS, item.payload))
        except InputError as error:
            raise InputError(f"traffic.{entry}: {error}") from error
        if demand.transfer[0] > 0.0:
            yield Other(
                link=demand.crossings.link_index,
                busy=demand.crossings.seconds_per_byte / demand.per_byte[0],
                latency=float(demand.latency[0]),
                seconds=float(demand.transfer[0]),
                share=float(demand.transfer[0] / demand.flow[0]),
                start=item.start,
                every=item.every,
                until=item.until,
            )


def _lacking(disturbances: Disturbances, fabric: Fabric) -> Iterator[Other]:
    """What slow links lack for a while."""
    for change in disturbances.passing:
        if change.during is not None and isinstance(change.what, SlowLink):
            (start, end), lacking = change.during, 1.0 - change.what.bandwidth
            for number in change.numbers(fabric) if lacking > 0.0 else ():
                yield Other(np.array([number]), np.array([lacking]), 0.0, end - start, FIRST, start, inf, inf)
