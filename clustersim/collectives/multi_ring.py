"""Which links does a collective take where no switch joins the GPUs of a domain?

Algorithms list flows between neighbours in the group's order. Over links of pairs (`hardware.direct_links`) a library
chooses its neighbours, and several rings at once: what a member sends to another one of its domain is spread over its
links to all of them, as the rings pass them, so that members send and receive as much as before. Chains and trees in a
domain are taken as such rings cut open. A message for one target takes that pair's own links.

Assumption: latency is that of one ring; the ceiling of the LL protocol holds for each link, not for all of a GPU.
"""

import numpy as np

from clustersim.collectives.phase import Flows
from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.hardware.direct_links import Paired, PairLinks
from clustersim.hardware.topology import Fabric


def woven(part: Flows, fabric: Fabric) -> tuple[Flows, ...]:
    """The flows as rings over links of pairs carry them; themselves where there are none."""
    if not isinstance(fabric, Paired) or fabric.pairs is None or part.message:
        return (part,)
    pairs, whole = fabric.pairs, (ends.reshape(len(ends), -1) for ends in (part.sources, part.targets))
    sources, targets = (fabric.seats(ends) for ends in whole)
    shares = _shares(sources, targets, pairs)
    spread = shares.any(axis=2)
    threads = [] if spread.all() else [(sources, np.where(spread, sources, targets), 1.0)]
    here, first = sources[:, :, None], (sources - sources % pairs.places)[:, :, None]
    for share in np.unique(shares[shares > 0.0]).tolist():
        there = np.where(shares == share, first + np.arange(pairs.places), here)
        threads.append((np.broadcast_to(here, there.shape), there, share))
    return tuple(Flows(fabric.seated(start), fabric.seated(end), part.share * share) for start, end, share in threads)


def _shares(sources: IntArray, targets: IntArray, pairs: PairLinks) -> FloatArray:
    """Part of each flow that goes to each place of its domain, [groups, flows, places]; none of what stays as it is.

    sources, targets: [groups, flows] seats.
    """
    local = (sources // pairs.places == targets // pairs.places) & (sources != targets)
    sets = _members(sources, targets, local, pairs.places)
    shares = np.zeros((*sources.shape, pairs.places))
    for members in np.unique(sets[local]).tolist():
        spread = pairs.shares(members)
        if spread is not None:
            own = local & (sets == members)
            shares[own] = spread[sources[own] % pairs.places]
    return shares


def _members(sources: IntArray, targets: IntArray, local: BoolArray, places: int) -> IntArray:
    """Which places of a flow's domain belong to its group, a bit for each: [groups, flows]."""
    domain = sources // places
    ends = np.bitwise_or(1 << sources % places, 1 << targets % places)
    group = np.broadcast_to(np.arange(len(sources))[:, None], sources.shape)
    _, place = np.unique(group * (int(domain.max(initial=0)) + 1) + domain, return_inverse=True)
    place = place.reshape(sources.shape)
    bits = np.zeros(int(place.max(initial=0)) + 1, np.int64)
    np.bitwise_or.at(bits, place[local], ends[local])
    found: IntArray = bits[place]
    return found
