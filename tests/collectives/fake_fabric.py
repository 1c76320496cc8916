"""A fabric for tests: NVLink domains, one NIC per GPU, a non-blocking or oversubscribed spine between racks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.hardware.link_technology import TECHNOLOGIES, LinkTechnology
from clustersim.hardware.topology import LINK_KINDS, LinkInfo, LinkKind, LinkTable, Paths


@dataclass(frozen=True)
class FakeFabric:
    """Links: NVLink out, in, NIC out, in (per GPU), then spine up, down (per rack of `rack` GPUs)."""

    gpu_count: int
    per_domain: int
    nvlink: float = 100e9
    nic: float = 10e9
    spine: float = 1e15
    rack: int = 1 << 40
    local_latency: float = 1e-6
    latency: float = 5e-6
    nvlink_technology: LinkTechnology = LinkTechnology.NVLINK4

    @property
    def links(self) -> LinkTable:
        racks = -(-self.gpu_count // self.rack)
        kinds = [LinkKind.NVLINK] * 2 + [LinkKind.NIC] * 2 + [LinkKind.LEAF] * 2
        rates = [self.nvlink] * 2 + [self.nic] * 2 + [self.spine] * 2
        counts = [self.gpu_count] * 4 + [racks] * 2
        technologies = [
            TECHNOLOGIES.index(link_technology)
            for link_technology in [self.nvlink_technology] * 2 + [LinkTechnology.INFINIBAND] * 4
        ]
        technology = np.repeat(np.array(technologies, np.int8), counts)
        kind = np.repeat(np.array([LINK_KINDS.index(link_kind) for link_kind in kinds], np.int8), counts)
        return LinkTable(kind, np.repeat(rates, counts), np.zeros(sum(counts)), technology)

    def domain_ids(self, gpus: IntArray) -> IntArray:
        return gpus // self.per_domain

    def node_ids(self, gpus: IntArray) -> IntArray:
        return gpus // self.per_domain

    def find_paths(self, sources: IntArray, targets: IntArray) -> Paths:
        same_domain = sources // self.per_domain == targets // self.per_domain
        n, racks = self.gpu_count, -(-self.gpu_count // self.rack)
        crosses_racks = sources // self.rack != targets // self.rack
        first = np.where(same_domain, sources, 2 * n + sources)
        last = np.where(same_domain, n + targets, 3 * n + targets)
        up = np.where(crosses_racks, 4 * n + sources // self.rack, -1)
        down = np.where(crosses_racks, 4 * n + racks + targets // self.rack, -1)
        links = np.where(sources == targets, -1, np.stack([first, up, down, last]))
        return Paths(links.T, np.where(same_domain, self.local_latency, self.latency))

    def link_info(self, link_id: int) -> LinkInfo:
        raise NotImplementedError(link_id)

    def highest_tier(self, gpus: Sequence[int]) -> str:
        return "leaf" if len({gpu // self.per_domain for gpu in gpus}) > 1 else "nvlink"

    def to_graph(self) -> object:
        raise NotImplementedError
