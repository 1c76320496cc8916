"""What lies between two GPUs?

A fabric is a set of directed links, each with a bandwidth (per direction) and a latency, and a routing rule that
says which links a transfer from one GPU to another loads. Links are numbered; a `LinkTable` holds their properties
as arrays, and `find_paths` answers for many pairs at once, because one collective of 16,384 ranks asks for tens of
thousands of routes. A bundle of parallel links over which traffic is spread evenly (ideal ECMP) is one link of the
bundle's whole bandwidth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import BytesPerSecond, Seconds

if TYPE_CHECKING:  # networkx takes 0.15 s to import and only graphs need it
    import networkx as nx


class LinkKind(Enum):
    """What a link is made of; collectives' efficiencies and latencies depend on it."""

    NVLINK = "nvlink"  # a GPU's port into its NVLink (or xGMI) domain, one per direction
    PCIE = "pcie"  # between a GPU and its host's root complex or NIC
    HOST = "host"  # inside a host, between root complexes
    NIC = "nic"  # a network interface's port, one per direction
    LEAF = "leaf"  # between leaf (top-of-rack, rail) and spine switches
    SPINE = "spine"  # between spine (aggregation) and core switches


LINK_KINDS: tuple[LinkKind, ...] = tuple(LinkKind)
NETWORK_KINDS: tuple[LinkKind, ...] = (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE)

VERTEX_KINDS: tuple[str, ...] = ("gpu", "nvswitch", "host", "nic", "leaf", "switch", "spine", "core")


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """One directed link, described for people."""

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

    kind: IntArray
    bandwidth: FloatArray
    latency: FloatArray
    technology: IntArray

    def select(self, link_ids: IntArray) -> "LinkTable":
        """Properties of some of the links."""
        return LinkTable(
            self.kind[link_ids], self.bandwidth[link_ids], self.latency[link_ids], self.technology[link_ids]
        )


@dataclass(frozen=True, slots=True)
class LinkEndpoints:
    """What stands at the ends of every link, [links] each; vertices 0 ... gpus-1 are the GPUs; vertices: how many."""

    source: IntArray
    target: IntArray
    vertex_count: int

    def port_owner(self, gpu_count: int) -> IntArray:
        """The GPU whose port each link is, of two the one that sends, -1 where neither end is one: [links]."""
        return np.where(self.source < gpu_count, self.source, np.where(self.target < gpu_count, self.target, -1))


@dataclass(frozen=True, slots=True)
class Paths:
    """The routes of n transfers.

    links: [n, hops] link numbers in the order of travel, -1 in any column that a route does not use; latency: [n]
    seconds, the sum of the latencies of the route's links.
    """

    links: IntArray
    latency: FloatArray


@dataclass(frozen=True, slots=True)
class FabricTier:
    """One tier of a fabric, described for people.

    kind: gpu, nvswitch, host, nic, leaf, spine or core; count: how many there are; bandwidth: bytes/s that one of them
    sends to the tier above (the top tier: to the tier below), per direction; oversubscription: bandwidth from below
    over bandwidth to above, None where nothing lies above.
    """

    kind: str
    count: int
    bandwidth: BytesPerSecond
    oversubscription: float | None


class Fabric(Protocol):
    """The seam between collectives and the machine: what a topology must answer."""

    def __hash__(self) -> int:
        """Equal for equal fabrics: what is worked out for one is remembered for all that are equal."""

    @property
    def gpu_count(self) -> int:
        """How many GPUs the fabric connects; GPU numbers are 0 ... gpus-1, node by node."""

    @property
    def links(self) -> LinkTable:
        """Properties of every link."""

    def domain_ids(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each GPU (any shape): GPUs of one domain reach each other without a NIC."""

    def node_ids(self, gpus: IntArray) -> IntArray:
        """The node (host) of each GPU (any shape)."""

    def find_paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]; equal ends have a route of no links."""

    def link_info(self, link_id: int) -> LinkInfo:
        """One link, for people."""

    @property
    def link_endpoints(self) -> LinkEndpoints:
        """What stands at the ends of every link."""

    def find_link(self, source: str, target: str) -> int:
        """The number of the link between two ends named as in `link`; raise InputError that says what is near."""

    def parallel_link_count(self, link_id: int) -> int:
        """How many parallel links one link stands for."""

    def nic_links(self, gpus: IntArray) -> IntArray:
        """Links of the NICs that serve GPUs, both directions, each link once; none where there is no network."""

    def with_degraded_links(self, bandwidth_fraction: FloatArray) -> "Fabric":
        """The same machine with the left part of every link's bandwidth, [links]; no route uses a link with 0 left.

        Where GPUs are cut off, asking for a route between them is an error of the caller's (`reach.find_partition`).
        """

    def highest_tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The highest tier that traffic among these GPUs crosses: gpu, nvlink, host, leaf, spine or core."""

    def describe_tiers(self) -> tuple[FabricTier, ...]:
        """What the fabric is built of, from the GPUs up; computed without building the graph."""

    def to_graph(self) -> "nx.DiGraph[str]":
        """The whole fabric as a graph: nodes have `kind`, edges have `kind`, `bandwidth` and `latency`.

        The graph's own attributes say how equal routes are chosen, as files do (`ecmp`, `seed`).
        """
