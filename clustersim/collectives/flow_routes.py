"""Which links do the flows of a phase load, and how much?

All groups of a role communicate at the same time, so a link's load is the sum over the flows of all groups, as a
fraction of one group's payload.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np

from clustersim.collectives.multi_ring import woven
from clustersim.collectives.phase import Flows, Phase
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.hardware.rotation import Turn
from clustersim.hardware.topology import Fabric, LinkTable

_NONE: Final = np.uint64(2**64 - 1)  # link -1, without its sign


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of flows that carry equally much. links: [hops, groups, flows], -1 for no link.

    latency: [groups, flows] seconds; share: what each flow carries.
    """

    links: IntArray
    latency: FloatArray
    share: float


@dataclass(frozen=True, slots=True)
class Routed:
    """A phase on a fabric. parts: routes of the phase's parts; load: [links + 1] payloads per link, 0 for no link.

    orbits: links are orbits, because flows stand for their images.
    """

    phase: Phase
    parts: tuple[Routes, ...]
    load: FloatArray
    orbits: bool = False


def route(phase: Phase, fabric: Fabric, turn: Turn | None = None) -> Routed:
    """Find the routes of all flows of a phase and add up the links' loads.

    turn: the flows are those of one place in each node, which stand for those of all.
    """
    parts = tuple(_routes(flows, fabric, turn) for part in phase.parts for flows in woven(part, fabric))
    if turn is None:
        return Routed(phase, parts, _loads(parts, len(fabric.links.bandwidth)))
    return Routed(phase, parts, _loads(parts, len(turn.first)) * np.append(turn.copies, 0.0), orbits=True)


def _routes(part: Flows, fabric: Fabric, turn: Turn | None) -> Routes:
    paths = fabric.paths(part.sources.reshape(-1), part.targets.reshape(-1))
    links = paths.links.T if turn is None else turn.orbit[paths.links.T]
    shape = len(part.sources), part.sources[0].size
    return Routes(links.reshape(-1, *shape), paths.latency.reshape(shape), part.share)


def _loads(parts: Sequence[Routes], links: int) -> FloatArray:
    load = np.zeros(links + 1)
    for part in parts:
        for column in part.links:
            first = _lowest(column)
            if first >= 0:
                crossed = np.bincount(column[column >= 0] - first)
                load[first : first + len(crossed)] += crossed * part.share
    return load


def _lowest(links: IntArray) -> int:
    """The lowest link where -1 means none; -1 if there is no other."""
    return int(links.view(np.uint64).min(initial=_NONE).astype(np.int64))


@dataclass(frozen=True, slots=True)
class LinkClasses:
    """The kinds, bandwidths and technologies of links that a fabric has. table: one link of each class.

    starts: [runs] first numbers of runs of links of one class; number: [runs] that class.
    """

    table: LinkTable
    starts: IntArray
    number: IntArray

    def of(self, links: IntArray) -> IntArray:
        """The class of each link, of any shape; nonsense for -1."""
        return self.number[np.searchsorted(self.starts, links, side="right") - 1]

    def among(self, links: IntArray) -> list[int]:
        """The classes among links, where -1 means none; there may be more, since only the ends are looked at."""
        first = _lowest(links)
        if first < 0:
            return []
        begin, end = np.searchsorted(self.starts, [first, int(links.max())], side="right").tolist()
        return sorted(set(self.number[begin - 1 : end].tolist()))


def link_classes(table: LinkTable) -> LinkClasses:
    """Tell links apart by kind, bandwidth and technology; links of one class mostly have successive numbers."""
    if not len(table.kind):
        return LinkClasses(table, np.zeros(0, np.int64), np.zeros(0, np.int64))
    columns = (table.kind, table.bandwidth, table.technology)
    changes = reduce(np.logical_or, (np.diff(column) != 0 for column in columns))
    starts = np.append(0, np.flatnonzero(changes) + 1)
    seen = np.stack([column[starts] for column in columns])
    _, first, number = np.unique(seen, axis=1, return_index=True, return_inverse=True)
    return LinkClasses(table.of(starts[first]), starts, number.reshape(-1))
