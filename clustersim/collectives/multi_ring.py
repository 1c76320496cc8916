"""Which links does a collective use where no switch connects the GPUs of a domain?

Algorithms list flows between neighbours in the group's order. Over point-to-point links
(`hardware.direct_links`) a library chooses its own neighbours, and several link-disjoint rings at once: what
a member sends to another one of its domain is spread over its links to all of them, as the rings do, so that
members send and receive the same volume. Chains and trees in a domain are modelled as such rings cut open. A
p2p message takes the link of its own pair.

Assumption: latency is that of one ring; the rate limit of the LL protocol holds per link, not per GPU.
"""

import numpy as np

from clustersim.collectives.phase import Flows
from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.hardware.direct_links import DirectLinks, HasDirectLinks
from clustersim.hardware.topology import Fabric


def spread_over_rings(flows: Flows, fabric: Fabric) -> tuple[Flows, ...]:
    """Spread flows over the rings of point-to-point links; unchanged where there are none."""
    if not isinstance(fabric, HasDirectLinks) or fabric.direct_links is None or flows.is_p2p:
        return (flows,)
    pairs, flow_ends = fabric.direct_links, (ends.reshape(len(ends), -1) for ends in (flows.sources, flows.targets))
    sources, targets = (fabric.domain_slots(ends) for ends in flow_ends)
    shares = _target_shares(sources, targets, pairs)
    is_spread = shares.any(axis=2)
    ring_flows = [] if is_spread.all() else [(sources, np.where(is_spread, sources, targets), 1.0)]
    source, domain_start = sources[:, :, None], (sources - sources % pairs.domain_size)[:, :, None]
    for share in np.unique(shares[shares > 0.0]).tolist():
        target = np.where(shares == share, domain_start + np.arange(pairs.domain_size), source)
        ring_flows.append((np.broadcast_to(source, target.shape), target, share))
    return tuple(
        Flows(fabric.gpus_at_slots(sources_of_ring), fabric.gpus_at_slots(targets_of_ring), flows.share * share)
        for sources_of_ring, targets_of_ring, share in ring_flows
    )


def _target_shares(sources: IntArray, targets: IntArray, pairs: DirectLinks) -> FloatArray:
    """Fraction of each flow sent to each local GPU of its domain, [groups, flows, local GPUs].

    0 for unchanged flows.

    sources, targets: [groups, flows] GPU slots.
    """
    is_local = (sources // pairs.domain_size == targets // pairs.domain_size) & (sources != targets)
    member_bits = _domain_member_bits(sources, targets, is_local, pairs.domain_size)
    shares = np.zeros((*sources.shape, pairs.domain_size))
    for members in np.unique(member_bits[is_local]).tolist():
        ring_shares = pairs.ring_shares(members)
        if ring_shares is not None:
            selected = is_local & (member_bits == members)
            shares[selected] = ring_shares[sources[selected] % pairs.domain_size]
    return shares


def _domain_member_bits(sources: IntArray, targets: IntArray, is_local: BoolArray, domain_size: int) -> IntArray:
    """Bit mask of the local GPUs of a flow's domain that belong to its group: [groups, flows]."""
    domain = sources // domain_size
    ends = np.bitwise_or(1 << sources % domain_size, 1 << targets % domain_size)
    group = np.broadcast_to(np.arange(len(sources))[:, None], sources.shape)
    _, domain_index = np.unique(group * (int(domain.max(initial=0)) + 1) + domain, return_inverse=True)
    domain_index = domain_index.reshape(sources.shape)
    bits = np.zeros(int(domain_index.max(initial=0)) + 1, np.int64)
    np.bitwise_or.at(bits, domain_index[is_local], ends[is_local])
    member_bits: IntArray = bits[domain_index]
    return member_bits
