"""Which links do the flows of a phase load, and how much?

All groups of a communicator kind communicate at the same time, so a link's load is the sum over the flows of
all groups, as a fraction of one group's payload.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np

from clustersim.collectives.multi_ring import spread_over_rings
from clustersim.collectives.phase import Flows, Phase
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.hardware.rotation import FabricRotation
from clustersim.hardware.topology import Fabric, LinkTable

_NO_LINK: Final = np.uint64(2**64 - 1)  # link -1 as an unsigned integer


@dataclass(frozen=True, slots=True)
class FlowPaths:
    """Paths of flows with equal payload shares. links: [hops, groups, flows], -1 for no link.

    latency: [groups, flows] seconds; share: fraction of the payload that each flow carries; site_latency:
    [groups, flows] the part of the latency between sites, None where there are none.
    """

    links: IntArray
    latency: FloatArray
    share: float
    site_latency: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class FlowRoutes:
    """A phase routed on a fabric. paths: of each of the phase's flows.

    link_load: [links + 1] payloads per link, the last entry (no link) is 0; by_orbit: links are indexed by orbit,
    because flows are representatives of their rotations.
    """

    phase: Phase
    paths: tuple[FlowPaths, ...]
    link_load: FloatArray
    by_orbit: bool = False


def route_phase(phase: Phase, fabric: Fabric, rotation: FabricRotation | None = None) -> FlowRoutes:
    """Find the paths of all flows of a phase and sum the links' loads.

    rotation: the flows are representatives of one local rank per node, and links are counted by orbit.
    """
    paths = tuple(
        _find_paths(ring_flows, fabric, rotation)
        for flows in phase.flows
        for ring_flows in spread_over_rings(flows, fabric)
    )
    if rotation is None:
        return FlowRoutes(phase, paths, _link_loads(paths, len(fabric.links.bandwidth)))
    return FlowRoutes(
        phase,
        paths,
        _link_loads(paths, len(rotation.first_link)) * np.append(rotation.multiplicity, 0.0),
        by_orbit=True,
    )


def _find_paths(flows: Flows, fabric: Fabric, rotation: FabricRotation | None) -> FlowPaths:
    paths = fabric.find_paths(flows.sources.reshape(-1), flows.targets.reshape(-1))
    links = paths.links.T if rotation is None else rotation.orbit_of_link[paths.links.T]
    shape = len(flows.sources), flows.sources[0].size
    site_latency = None if paths.site_latency is None else paths.site_latency.reshape(shape)
    return FlowPaths(links.reshape(-1, *shape), paths.latency.reshape(shape), flows.share, site_latency)


def _link_loads(paths: Sequence[FlowPaths], link_count: int) -> FloatArray:
    load = np.zeros(link_count + 1)
    for flow_paths in paths:
        for hop_links in flow_paths.links:
            first = _lowest_link(hop_links)
            if first >= 0:
                flow_count = np.bincount(hop_links[hop_links >= 0] - first)
                load[first : first + len(flow_count)] += flow_count * flow_paths.share
    return load


def _lowest_link(links: IntArray) -> int:
    """The lowest link id, where -1 means none; -1 if there is none at all."""
    return int(links.view(np.uint64).min(initial=_NO_LINK).astype(np.int64))


@dataclass(frozen=True, slots=True)
class LinkClasses:
    """Distinct (kind, bandwidth, technology) classes of a fabric's links. table: one link of each class.

    run_starts: [runs] first link id of each run of consecutive links of one class; run_class: [runs] its class.
    """

    table: LinkTable
    run_starts: IntArray
    run_class: IntArray

    def class_of(self, links: IntArray) -> IntArray:
        """Class of each link, of any shape; undefined for -1."""
        return self.run_class[np.searchsorted(self.run_starts, links, side="right") - 1]

    def classes_among(self, links: IntArray) -> list[int]:
        """Classes of all links from the lowest to the highest id used (-1: no link): a superset of those that occur."""
        first = _lowest_link(links)
        if first < 0:
            return []
        begin, end = np.searchsorted(self.run_starts, [first, int(links.max())], side="right").tolist()
        return sorted(set(self.run_class[begin - 1 : end].tolist()))


def classify_links(table: LinkTable) -> LinkClasses:
    """Classify links by kind, bandwidth and technology; links of one class mostly have consecutive ids."""
    if not len(table.kind):
        return LinkClasses(table, np.zeros(0, np.int64), np.zeros(0, np.int64))
    columns = (table.kind, table.bandwidth, table.technology)
    changes = reduce(np.logical_or, (np.diff(column) != 0 for column in columns))
    run_starts = np.append(0, np.flatnonzero(changes) + 1)
    run_keys = np.stack([column[run_starts] for column in columns])
    _, first, run_class = np.unique(run_keys, axis=1, return_index=True, return_inverse=True)
    return LinkClasses(table.select(run_starts[first]), run_starts, run_class.reshape(-1))
