"""What lies between two GPUs?

A fabric is a set of directed links, each with a bandwidth (per direction) and a latency, and a routing rule that
says which links a transfer from one GPU to another loads. Links are numbered; a `LinkTable` holds their properties
as arrays, and `Fabric.paths` answers for many pairs at once, because one collective of 16,384 ranks asks for tens of
thousands of routes. A bundle of parallel links over which traffic is spread evenly (ideal ECMP) is one link of the
bundle's whole bandwidth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from clustersim.units import BytesPerSecond, Seconds

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class LinkKind(Enum):
    """What a link is made of; collectives' efficiencies and latencies depend on it."""

    NVLINK = "nvlink"  # a GPU's port into its NVLink (or xGMI) domain, one per direction
    PCIE = "pcie"  # between a GPU and its host's root complex or NIC
    HOST = "host"  # inside a host, between root complexes
    NIC = "nic"  # a network interface's port, one per direction
    LEAF = "leaf"  # between leaf (top-of-rack, rail) and spine switches
    SPINE = "spine"  # between spine (aggregation) and core switches


LINK_KINDS: tuple[LinkKind, ...] = tuple(LinkKind)


@dataclass(frozen=True, slots=True)
class Link:
    """One directed link, described for people."""

    kind: LinkKind
    source: str
    target: str
    bandwidth: BytesPerSecond
    latency: Seconds


@dataclass(frozen=True, slots=True)
class LinkTable:
    """All links of a fabric as arrays of one length.

    kind: index into LINK_KINDS; bandwidth: bytes/s; latency: s.
    """

    kind: IntArray
    bandwidth: FloatArray
    latency: FloatArray


@dataclass(frozen=True, slots=True)
class Paths:
    """The routes of n transfers.

    links: [n, hops] link numbers, -1 where a route has fewer hops; latency: [n] seconds, the sum along the route
    (links and the switches between them).
    """

    links: IntArray
    latency: FloatArray


class Fabric(Protocol):
    """The seam between collectives and the machine: what a topology must answer."""

    @property
    def gpus(self) -> int:
        """How many GPUs the fabric connects; GPU numbers are 0 ... gpus-1, node by node."""

    @property
    def links(self) -> LinkTable:
        """Properties of every link."""

    def domains(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each GPU (any shape): GPUs of one domain reach each other without a NIC."""

    def nodes(self, gpus: IntArray) -> IntArray:
        """The node (host) of each GPU (any shape)."""

    def paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]; equal ends have a route of no links."""

    def link(self, number: int) -> Link:
        """One link, for people."""

    def tier(self, gpus: Sequence[int]) -> str:
        """The highest tier that traffic among these GPUs crosses: gpu, nvlink, host, leaf, spine or core."""

    def graph(self) -> "nx.DiGraph[str]":
        """The whole fabric as a graph: nodes have `kind`, edges have `kind`, `bandwidth` and `latency`."""
