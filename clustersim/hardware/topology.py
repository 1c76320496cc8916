"""The fabric interface: which links and routes are there between GPUs?

A fabric is a set of directed links, each with a bandwidth (per direction) and a latency, and a routing
function that returns the links of a transfer from one GPU to another. Links have integer ids; a `LinkTable`
holds their properties as arrays, and `Fabric.find_paths` is vectorized over pairs, because one collective of
16,384 ranks needs tens of thousands of routes. A bundle of parallel links over which traffic is spread evenly
(ideal ECMP) is one link of the summed bandwidth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from clustersim.common.arrays import FloatArray, IndexArray, IntArray, SmallIntArray
from clustersim.common.units import BytesPerSecond, Seconds

if TYPE_CHECKING:  # importing networkx takes 0.15 s and only graphs need it
    import networkx as nx


class LinkKind(Enum):
    """Kind of a link by its position; collectives' efficiencies and latencies depend on it."""

    NVLINK = "nvlink"  # a GPU's port into its NVLink (or xGMI) domain, one per direction
    PCIE = "pcie"  # between a GPU and its host's root complex or NIC
    HOST = "host"  # inside a host, between root complexes
    NIC = "nic"  # a network interface's port, one per direction
    LEAF = "leaf"  # between leaf (top-of-rack, rail) and spine switches
    SPINE = "spine"  # between spine (aggregation) and core switches
    WAN = "wan"  # between sites (data centres), and from a site's highest switches to its border


LINK_KINDS: tuple[LinkKind, ...] = tuple(LinkKind)
NETWORK_KINDS: tuple[LinkKind, ...] = (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE, LinkKind.WAN)

VERTEX_KINDS: tuple[str, ...] = ("gpu", "nvswitch", "host", "nic", "leaf", "switch", "spine", "core", "site")


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """One directed link, for display."""

    kind: LinkKind
    source: str
    target: str
    bandwidth: BytesPerSecond
    latency: Seconds


@dataclass(frozen=True, slots=True)
class LinkTable:
    """All links of a fabric as arrays of one length.

    kind: index into LINK_KINDS; bandwidth: bytes/s; latency: s, including the switch or adapter that the link leaves;
    technology: index into TECHNOLOGIES.
    """

    kind: SmallIntArray
    bandwidth: FloatArray
    latency: FloatArray
    technology: SmallIntArray

    def select(self, link_ids: IntArray) -> "LinkTable":
        """Properties of some of the links."""
        return LinkTable(
            self.kind[link_ids], self.bandwidth[link_ids], self.latency[link_ids], self.technology[link_ids]
        )


@dataclass(frozen=True, slots=True)
class LinkEndpoints:
    """Endpoint vertices of every link, [links] each; vertices 0 ... gpus-1 are the GPUs."""

    source: IndexArray
    target: IndexArray
    vertex_count: int

    def port_owner(self, gpu_count: int) -> IntArray:
        """[links] the GPU whose port each link is (of two, the sender), -1 where neither endpoint is a GPU."""
        return np.where(self.source < gpu_count, self.source, np.where(self.target < gpu_count, self.target, -1))


@dataclass(frozen=True, slots=True)
class Paths:
    """The routes of n transfers.

    links: [n, hops] link ids in the order of travel, -1 in any column that a route does not use; latency: [n]
    seconds, the sum of the latencies of the route's links; site_latency: [n] the part of it between sites, None where
    there are none.
    """

    links: IntArray
    latency: FloatArray
    site_latency: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class FabricTier:
    """One tier of a fabric, for display.

    kind: gpu, nvswitch, host, nic, leaf, spine, core or site; count: number of its vertices; bandwidth: bytes/s that
    one of them sends to the tier above (the top tier: to the tier below), per direction; oversubscription:
    bandwidth from below over bandwidth to above, None where nothing is above.
    """

    kind: str
    count: int
    bandwidth: BytesPerSecond
    oversubscription: float | None


class Fabric(Protocol):
    """Protocol between collectives and the machine: what every topology provides."""

    def __hash__(self) -> int:
        """Equal for equal fabrics: results cached for one are reused for all equal ones."""

    @property
    def gpu_count(self) -> int:
        """Number of GPUs that the fabric connects; GPU ids are 0 ... gpu_count-1, node by node."""

    @property
    def links(self) -> LinkTable:
        """Properties of every link."""

    def domain_ids(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each GPU (any shape): GPUs of one domain reach each other without a NIC."""

    def node_ids(self, gpus: IntArray) -> IntArray:
        """The node (host) of each GPU (any shape)."""

    def find_paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]; source == target has a route of no links."""

    def link_info(self, link_id: int) -> LinkInfo:
        """One link, for display."""

    @property
    def link_endpoints(self) -> LinkEndpoints:
        """Endpoint vertices of every link."""

    def find_link(self, source: str, target: str) -> int:
        """Id of the link between two endpoints named as in `link_info`; raise InputError with a suggestion."""

    def parallel_link_count(self, link_id: int) -> int:
        """Number of physical links that one link stands for."""

    def nic_links(self, gpus: IntArray) -> IntArray:
        """Links of the NICs that serve GPUs, both directions, each link once; none without a network."""

    def with_degraded_links(self, bandwidth_fraction: FloatArray) -> "Fabric":
        """The same machine with every link's bandwidth scaled by bandwidth_fraction, [links].

        Links at 0 are not routed over.

        Routes between disconnected GPUs must not be requested (see `connectivity.find_partition`).
        """

    def highest_tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The highest tier that traffic among these GPUs crosses: gpu, nvlink, host, leaf, spine, core or wan."""

    def describe_tiers(self) -> tuple[FabricTier, ...]:
        """The tiers of the fabric, from the GPUs up; computed without building the graph."""

    def to_graph(self) -> "nx.DiGraph[str]":
        """The complete fabric as a graph: nodes have `kind`, edges have `kind`, `bandwidth` and `latency`.

        Graph attributes hold the ECMP settings, as files do (`ecmp`, `seed`).
        """


@runtime_checkable
class HasBorder(Protocol):
    """A fabric that can be one of several sites: its highest switches may be joined to those of others."""

    def border_paths(self, gpus: IntArray, *, outwards: bool) -> Paths:
        """Routes from GPUs [n] to the highest switches (outwards), or from these to the GPUs."""


@runtime_checkable
class HasSites(Protocol):
    """A fabric that may consist of several sites."""

    def site_ids(self, gpus: IntArray) -> IntArray | None:
        """The site of each GPU (any shape); None if there is only one."""


def find_site_ids(fabric: "Fabric", gpus: IntArray) -> IntArray | None:
    """The site of each GPU of a fabric (any shape); None if there is only one."""
    return fabric.site_ids(gpus) if isinstance(fabric, HasSites) else None
