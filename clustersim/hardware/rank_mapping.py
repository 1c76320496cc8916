"""A machine re-indexed by the ranks of a job that has some of its GPUs.

Ranks are the job's own ids 0 ... n-1; each is mapped to a GPU of the machine. All code above the hardware
package uses ranks; links keep the machine's ids and names. GPUs that the job does not use are numbered after
its own, so that a rank-mapped fabric has as many GPUs, links and vertices as its machine.

Nodes and NVLink domains are numbered in the order of their first ranks, as in NCCL (`initTransportsRank` in
src/init.cc orders nodes by their lowest rank), whose rings and trees then go from node to node in the order
of ranks, however far apart the nodes are. Where nodes are not shuffled these are the machine's own ids,
without unused ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.pickling import FieldPickling
from clustersim.hardware.direct_links import DirectLinks, HasDirectLinks
from clustersim.hardware.rotation import FabricRotation, HasRotation
from clustersim.hardware.topology import Fabric, FabricTier, LinkEndpoints, LinkInfo, LinkTable, Paths, find_site_ids

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, eq=False)
class RankMappedFabric(FieldPickling):
    """A machine as seen by ranks. gpu_ids: [ranks] machine id of the GPU of each rank, all different.

    Not slotted: cached properties.
    """

    machine: Fabric
    gpu_ids: IntArray

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankMappedFabric):
            return NotImplemented
        return self.machine == other.machine and np.array_equal(self.gpu_ids, other.gpu_ids)

    def __hash__(self) -> int:
        return hash((self.machine, self.gpu_ids.tobytes()))

    @cached_property
    def _gpu_of_rank(self) -> IntArray:
        """[gpus] machine id of the GPU of every rank, followed by the GPUs that the job does not use."""
        is_idle = np.ones(self.machine.gpu_count, np.bool_)
        is_idle[self.gpu_ids] = False
        return np.concatenate([self.gpu_ids, np.flatnonzero(is_idle)])

    @cached_property
    def _rank_of_gpu(self) -> IntArray:
        """[gpus] rank of every GPU of the machine."""
        return np.argsort(self._gpu_of_rank)

    @property
    def gpu_count(self) -> int:
        """Number of GPUs that the machine connects."""
        return self.machine.gpu_count

    @property
    def links(self) -> LinkTable:
        """Properties of every link."""
        return self.machine.links

    @cached_property
    def _domain_ids(self) -> IntArray:
        return _renumber_by_first_use(self.machine.domain_ids(self._gpu_of_rank))

    @cached_property
    def _node_ids(self) -> IntArray:
        return _renumber_by_first_use(self.machine.node_ids(self._gpu_of_rank))

    def domain_ids(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each rank (any shape)."""
        return self._domain_ids[gpus]

    def node_ids(self, gpus: IntArray) -> IntArray:
        """The node of each rank (any shape)."""
        return self._node_ids[gpus]

    def site_ids(self, gpus: IntArray) -> IntArray | None:
        """The site of each rank (any shape); None if there is only one."""
        return find_site_ids(self.machine, self._gpu_of_rank[gpus])

    def find_paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]."""
        return self.machine.find_paths(self._gpu_of_rank[sources], self._gpu_of_rank[targets])

    def link_info(self, link_id: int) -> LinkInfo:
        """One link, for display."""
        return self.machine.link_info(link_id)

    @cached_property
    def link_endpoints(self) -> LinkEndpoints:
        """Endpoint vertices of every link."""
        endpoints = self.machine.link_endpoints
        vertex_ids = np.concatenate([self._rank_of_gpu, np.arange(self.gpu_count, endpoints.vertex_count)])
        return replace(endpoints, source=vertex_ids[endpoints.source], target=vertex_ids[endpoints.target])

    def find_link(self, source: str, target: str) -> int:
        """Id of the link between two endpoints, named as in the machine."""
        return self.machine.find_link(source, target)

    def parallel_link_count(self, link_id: int) -> int:
        """Number of physical links that one link stands for."""
        return self.machine.parallel_link_count(link_id)

    def nic_links(self, gpus: IntArray) -> IntArray:
        """Links of the NICs that serve ranks, both directions, each link once."""
        return self.machine.nic_links(self._gpu_of_rank[gpus])

    def with_degraded_links(self, bandwidth_fraction: FloatArray) -> "RankMappedFabric":
        """The same ranks on the machine with every link's bandwidth scaled by bandwidth_fraction, [links]."""
        return RankMappedFabric(self.machine.with_degraded_links(bandwidth_fraction), self.gpu_ids)

    def highest_tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The highest tier that traffic among these ranks crosses."""
        return self.machine.highest_tier(self._gpu_of_rank[np.asarray(gpus, np.int64)])

    def describe_tiers(self) -> tuple[FabricTier, ...]:
        """The tiers of the machine, from the GPUs up."""
        return self.machine.describe_tiers()

    def to_graph(self) -> "nx.DiGraph[str]":
        """The complete machine as a graph."""
        return self.machine.to_graph()

    @property
    def direct_links(self) -> DirectLinks | None:
        """Direct links between the machine's GPUs; None where switches join them."""
        return self.machine.direct_links if isinstance(self.machine, HasDirectLinks) else None

    def domain_slots(self, gpus: IntArray) -> IntArray:
        """Position of ranks' GPUs in the machine (any shape): the machine's ids of these GPUs."""
        return self._gpu_of_rank[gpus]

    def gpus_at_slots(self, slots: IntArray) -> IntArray:
        """Ranks at these positions (any shape)."""
        return self._rank_of_gpu[slots]

    @cached_property
    def rotation(self) -> FabricRotation | None:
        """The machine's rotation, where every node runs consecutive ranks on all its GPUs in their order; else None."""
        rotation = self.machine.rotation if isinstance(self.machine, HasRotation) else None
        if rotation is None or len(self.gpu_ids) % rotation.period:
            return None
        node_gpus = self.gpu_ids.reshape(-1, rotation.period)
        has_full_nodes = (node_gpus[:, 0] % rotation.period == 0).all() and (np.diff(node_gpus, axis=1) == 1).all()
        return rotation if has_full_nodes else None


def _renumber_by_first_use(labels: IntArray) -> IntArray:
    """Labels renumbered 0, 1, ... in the order of first occurrence."""
    _, first, label = np.unique(labels, return_index=True, return_inverse=True)
    order: IntArray = np.argsort(np.argsort(first))[label.reshape(-1)]
    return order
