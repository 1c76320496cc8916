"""How does a regular cluster route around dead links?

As an irregular machine would (`graph_fabric`): fewest hops, then least latency, by the first rule that leaves a route.
So a GPU whose NIC is dead sends over NVLink to a neighbour and on by its NIC, one whose NVLink is dead uses PCIe and
NIC. Nodes that are neither end forward only where nothing else leads on, so that a search looks at the switches and
two nodes, and comes into a target's node but not out again. One search from each source, over all links of a step at
once. Reference: Moore 1959 (breadth first).
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.hardware.routing_rules import Rule
from clustersim.hardware.topology import LINK_KINDS, VERTEX_KINDS, Ends, LinkTable

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Machine:
    """What a search needs to know: links, which of them are alive [links], and of every vertex its kind and block.

    kinds: [vertices] index into VERTEX_KINDS; blocks: [vertices] which node (or NVLink domain of several nodes) it is
    in, -1 for switches between.
    """

    links: LinkTable
    ends: Ends
    alive: BoolArray
    kinds: IntArray
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class Labels:
    """What a search found: hops and least latency (femtoseconds, whole) to each vertex; [vertices] each.

    home: the only block that routes leave, None: any.
    """

    hops: IntArray
    latency: IntArray
    home: int | None

    def reached(self, vertex: int) -> bool:
        """Whether there is a route to a vertex."""
        return bool(self.hops[vertex] != _NEVER)


class Detours:
    """Searches over the living links of one rule."""

    def __init__(self, machine: Machine, rule: Rule) -> None:
        kinds = [LINK_KINDS.index(kind) for kind in rule.kinds]
        used = np.flatnonzero(machine.alive & np.isin(machine.links.kind, kinds))
        self._numbers = used[np.argsort(machine.ends.target[used], kind="stable")]
        self._source, self._target = machine.ends.source[self._numbers], machine.ends.target[self._numbers]
        self._latency = np.rint(machine.links.latency[self._numbers] * 1e15).astype(np.int64)
        self._passable: BoolArray = ~np.isin(machine.kinds, [VERTEX_KINDS.index(kind) for kind in rule.barred])
        self._first = np.searchsorted(self._target, np.arange(machine.ends.vertices + 1))
        self._blocks = machine.blocks
        self._left = np.where(self._blocks[self._target] < 0, self._blocks[self._source], -1)  # the block, by link
        block = np.maximum(self._blocks[self._source], self._blocks[self._target])
        self._by_block = np.argsort(block, kind="stable")
        self._first_of_block = np.searchsorted(block[self._by_block], np.arange(-1, int(block.max(initial=-1)) + 2))

    def search(self, source: int, targets: IntArray) -> Labels:
        """Label vertices until all targets are found or nothing is left."""
        home = int(self._blocks[source])
        blocks = np.unique(np.append(self._blocks[targets], [home, -1]))
        links = [self._by_block[slice(*self._first_of_block[block + 1 : block + 3])] for block in blocks.tolist()]
        return self._label(source, targets, np.concatenate(links), home)

    def search_everywhere(self, source: int, targets: IntArray) -> Labels:
        """Label vertices, and let all nodes forward."""
        return self._label(source, targets, np.arange(len(self._numbers)), None)

    def _label(self, source: int, targets: IntArray, links: IntArray, home: int | None) -> Labels:
        """Label what some of the links lead to."""
        hops, latency = np.full((2, len(self._passable)), _NEVER)
        hops[source], latency[source], depth = 0, 0, 0
        links = links[self._allowed(links, home)]
        start, end = self._source[links], self._target[links]
        while (hops[targets] == _NEVER).any():
            steps = np.flatnonzero((hops[start] == depth) & (hops[end] > depth))
            steps = steps[self._passable[start[steps]] | (depth == 0)]
            if not len(steps):
                break
            depth += 1
            hops[end[steps]] = depth
            np.minimum.at(latency, end[steps], latency[start[steps]] + self._latency[links[steps]])
        return Labels(hops, latency, home)

    def _allowed(self, links: IntArray, home: int | None) -> BoolArray:
        """Which links leave no block but `home`: [links]."""
        left = self._left[links]
        allowed: BoolArray = (left < 0) | (left == home) if home is not None else np.ones(len(links), np.bool_)
        return allowed

    def trace(self, labels: Labels, target: int, choice: int) -> tuple[int, ...]:
        """Links of one of the shortest routes to a found vertex; `choice` picks among equals, digit by digit."""
        links: list[int] = []
        while labels.hops[target]:
            last = self._last_steps(labels, target)
            choice, digit = divmod(choice, len(last))
            step = last[digit]
            target = int(self._source[step])
            links.append(int(self._numbers[step]))
        return tuple(reversed(links))

    def _last_steps(self, labels: Labels, target: int) -> IntArray:
        """The last steps of all shortest routes to a vertex; those from barred vertices only at the source itself."""
        steps = np.arange(self._first[target], self._first[target + 1])
        source = self._source[steps]
        through = (self._passable[source] | (labels.hops[source] == 0)) & self._allowed(steps, labels.home)
        nearer = through & (labels.hops[source] == labels.hops[target] - 1)
        steps, source = steps[nearer], source[nearer]
        shortest: IntArray = steps[labels.latency[source] + self._latency[steps] == labels.latency[target]]
        return shortest
