"""What does a machine look like to a job that has some of its GPUs?

Ranks are the job's own numbers 0 ... n-1; each stands on a GPU of the machine, its place. Everything above hardware
speaks of ranks, links keep the machine's numbers and names. GPUs that the job does not use have the numbers after its
own, so that a placed fabric has as many GPUs, links and ends as its machine.

Nodes and NVLink domains are numbered as their first ranks come: so does NCCL (`initTransportsRank` in src/init.cc
orders nodes by their lowest rank), whose rings and trees then go from node to node in the order of ranks, however far
apart the nodes are. Where nodes are not scattered these are the machine's own numbers, without those left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.pickling import FieldState
from clustersim.hardware.direct_links import Paired, PairLinks
from clustersim.hardware.rotation import Turn, Turning
from clustersim.hardware.topology import Ends, Fabric, Link, LinkTable, Paths, Tier

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, eq=False)
class Placed(FieldState):
    """A machine as ranks see it. places: [ranks] the GPU of the machine on which each rank runs, all different.

    Not slotted: what is worked out once is kept.
    """

    machine: Fabric
    places: IntArray

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placed):
            return NotImplemented
        return self.machine == other.machine and np.array_equal(self.places, other.places)

    def __hash__(self) -> int:
        return hash((self.machine, self.places.tobytes()))

    @cached_property
    def _gpu(self) -> IntArray:
        """The GPU of every rank, and after them those that the job does not use: [gpus]."""
        idle = np.ones(self.machine.gpus, np.bool_)
        idle[self.places] = False
        return np.concatenate([self.places, np.flatnonzero(idle)])

    @cached_property
    def _rank(self) -> IntArray:
        """The number here of every GPU of the machine: [gpus]."""
        return np.argsort(self._gpu)

    @property
    def gpus(self) -> int:
        """How many GPUs the machine connects."""
        return self.machine.gpus

    @property
    def links(self) -> LinkTable:
        """Properties of every link."""
        return self.machine.links

    @cached_property
    def _domains(self) -> IntArray:
        return _as_they_come(self.machine.domains(self._gpu))

    @cached_property
    def _nodes(self) -> IntArray:
        return _as_they_come(self.machine.nodes(self._gpu))

    def domains(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each rank (any shape)."""
        return self._domains[gpus]

    def nodes(self, gpus: IntArray) -> IntArray:
        """The node of each rank (any shape)."""
        return self._nodes[gpus]

    def paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]."""
        return self.machine.paths(self._gpu[sources], self._gpu[targets])

    def link(self, number: int) -> Link:
        """One link, for people."""
        return self.machine.link(number)

    @cached_property
    def ends(self) -> Ends:
        """What stands at the ends of every link."""
        ends = self.machine.ends
        number = np.concatenate([self._rank, np.arange(self.gpus, ends.vertices)])
        return replace(ends, source=number[ends.source], target=number[ends.target])

    def find(self, source: str, target: str) -> int:
        """The number of the link between two ends, named as in the machine."""
        return self.machine.find(source, target)

    def members(self, number: int) -> int:
        """How many parallel links one link stands for."""
        return self.machine.members(number)

    def nics(self, gpus: IntArray) -> IntArray:
        """Links of the NICs that serve ranks, both directions, each link once."""
        return self.machine.nics(self._gpu[gpus])

    def changed(self, left: FloatArray) -> "Placed":
        """The same ranks on the machine with the left part of every link's bandwidth, [links]."""
        return Placed(self.machine.changed(left), self.places)

    def tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The highest tier that traffic among these ranks crosses."""
        return self.machine.tier(self._gpu[np.asarray(gpus, np.int64)])

    def tiers(self) -> tuple[Tier, ...]:
        """What the machine is built of, from the GPUs up."""
        return self.machine.tiers()

    def graph(self) -> "nx.DiGraph[str]":
        """The whole machine as a graph."""
        return self.machine.graph()

    @property
    def pairs(self) -> PairLinks | None:
        """The links of pairs of the machine's GPUs; None where switches join them."""
        return self.machine.pairs if isinstance(self.machine, Paired) else None

    def seats(self, gpus: IntArray) -> IntArray:
        """Where ranks stand (any shape): the numbers of their GPUs in the machine."""
        return self._gpu[gpus]

    def seated(self, seats: IntArray) -> IntArray:
        """Which ranks stand there (any shape)."""
        return self._rank[seats]

    @cached_property
    def turn(self) -> Turn | None:
        """How ranks can change places: as the machine's GPUs can, where every node has its ranks in its GPUs' order."""
        turn = self.machine.turn if isinstance(self.machine, Turning) else None
        if turn is None or len(self.places) % turn.places:
            return None
        nodes = self.places.reshape(-1, turn.places)
        whole = (nodes[:, 0] % turn.places == 0).all() and (np.diff(nodes, axis=1) == 1).all()
        return turn if whole else None


def _as_they_come(labels: IntArray) -> IntArray:
    """Labels renumbered 0, 1, ... in the order in which each is first met."""
    _, first, label = np.unique(labels, return_index=True, return_inverse=True)
    order: IntArray = np.argsort(np.argsort(first))[label.reshape(-1)]
    return order
