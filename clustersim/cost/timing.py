"""How long does a single kernel or collective take, and what is the provenance of that duration?"""

from dataclasses import dataclass
from typing import Final, Protocol

from clustersim.common.arrays import FloatArray
from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes, Seconds
from clustersim.model.kernels import Kernel
from clustersim.program.task import CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix


class Provenance(IdentityEnum):
    """Where a duration comes from, best first."""

    MEASURED = "measured"  # this kernel and shape was timed
    INTERPOLATED = "interpolated"  # between timed shapes
    FITTED = "fitted"  # from a model whose constants are fitted to a calibration record of this hardware
    DERIVED = "derived"  # from a record of similar hardware, or of a newer library, scaled
    PUBLISHED = "published"  # from a model whose constants are fitted to published measurements of this hardware
    ROOFLINE = "roofline"  # analytic, from datasheet peaks


LOCALLY_MEASURED: Final = (Provenance.MEASURED, Provenance.INTERPOLATED, Provenance.FITTED)
"""Provenances that are based on a record of this machine."""


class Bottleneck(IdentityEnum):
    """The resource that limits a kernel or collective."""

    COMPUTE = "compute"
    MEMORY = "memory bandwidth"
    LAUNCH = "kernel launch"
    LATENCY = "network latency"
    BANDWIDTH = "network bandwidth"
    HOST_LINK = "the link to the host"
    HOST_MEMORY = "bandwidth of the host's memory"


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Duration of one kernel or collective in isolation on its hardware.

    error: expected relative error, from the dispersion of measurements or from how a model fits them; None:
    nothing was measured here; in_situ_slowdown: factor by which the kernel takes longer within a step than in
    isolation (`cost.sustained_rate`), already included in `seconds`.
    """

    seconds: Seconds
    provenance: Provenance
    bottleneck: Bottleneck
    error: float | None = None
    in_situ_slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class CommTiming:
    """Duration of one collective in every group of its communicator.

    seconds: [groups]; for display, algorithm: of the slowest group; tier: the highest network tier between any
    two of its members (a ring may stay below it); error: as in `KernelTiming`; nvlink_share: [groups] share of the
    transfer for which NVLink or xGMI ports are busy (1: they limit it; 0: no byte crosses one, or what moves is
    negligible), None: it crosses none.
    """

    seconds: FloatArray
    provenance: Provenance
    bottleneck: Bottleneck
    algorithm: str
    tier: str
    error: float | None = None
    nvlink_share: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class LinkDemand:
    """Demand of one collective on shared links in every group of its communicator.

    latency: [groups] seconds in which nothing moves; transfer: [groups] seconds of the transfer without
    contention; per_byte: [groups] transfer seconds per byte of `payload`, once pipelines are full; flow:
    [groups] bytes of its largest flow, the weight in max-min sharing; link_loads: links that each group keeps
    busy, in seconds per byte of `payload`. A group that crosses no link is all latency.
    """

    latency: FloatArray
    transfer: FloatArray
    per_byte: FloatArray
    flow: FloatArray
    payload: Bytes
    link_loads: LinkLoadMatrix


class KernelCost(Protocol):
    """Interface of sources of kernel durations."""

    def time_kernel(self, kernel: Kernel) -> KernelTiming:
        """Time one kernel in isolation on one GPU."""


class CommCost(Protocol):
    """Interface of sources of collective durations."""

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Time one collective in all groups of its communicator at once."""


class LinkDemandCost(Protocol):
    """Interface of sources of link demands, for the engine's shared network."""

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """Link demand of one collective in each group of its communicator."""
