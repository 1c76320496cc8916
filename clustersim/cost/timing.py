"""How long does one piece take alone, and how do we know?"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Bytes, Seconds
from clustersim.model.kernels import Kernel
from clustersim.program.task import CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix


class Provenance(Enum):
    """Where a duration comes from, best first."""

    MEASURED = "measured"  # this kernel and shape was timed
    INTERPOLATED = "interpolated"  # between timed shapes
    FITTED = "fitted"  # from a model whose constants are fitted to a calibration record of this hardware
    DERIVED = "derived"  # from a record of similar hardware, or of a newer library, scaled
    PUBLISHED = "published"  # from a model whose constants are fitted to published measurements of this hardware
    ROOFLINE = "roofline"  # analytic, from datasheet peaks


LOCALLY_MEASURED: Final = (Provenance.MEASURED, Provenance.INTERPOLATED, Provenance.FITTED)
"""What rests on a record of this machine."""


class Bottleneck(Enum):
    """What limits a piece of work."""

    COMPUTE = "compute"
    MEMORY = "memory bandwidth"
    LAUNCH = "kernel launch"
    LATENCY = "network latency"
    BANDWIDTH = "network bandwidth"
    HOST_LINK = "the link to the host"
    HOST_MEMORY = "bandwidth of the host's memory"


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Duration of one kernel or collective alone on its hardware.

    error: the part by which the real duration is expected to differ, from the dispersion of what was measured or from
    how a model met measurements; None: nothing was measured here; longer: how many times longer than by itself the
    kernel takes for being part of a step (`cost.sustained_rate`), which is in `seconds` already.
    """

    seconds: Seconds
    provenance: Provenance
    bottleneck: Bottleneck
    error: float | None = None
    in_situ_slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class CommTiming:
    """Duration of one collective in every group of its role.

    seconds: [groups]; for people, algorithm: what the slowest group takes; tier: the highest that two of its members
    have between them (a ring may stay below it); error: as in `KernelTiming`.
    """

    seconds: FloatArray
    provenance: Provenance
    bottleneck: Bottleneck
    algorithm: str
    tier: str
    error: float | None = None


@dataclass(frozen=True, slots=True)
class LinkDemand:
    """What one collective asks of shared links in every group of its role.

    latency: [groups] seconds in which nothing moves; transfer: [groups] seconds that its bytes take where the group has
    the links for itself; per_byte: [groups] seconds of them for a byte of `payload`, once pipelines are full; flow:
    [groups] bytes of its largest flow, by which flows share links fairly; crossings: which links it keeps busy, for how
    long per byte of `payload`. What crosses no link is all latency.
    """

    latency: FloatArray
    transfer: FloatArray
    per_byte: FloatArray
    flow: FloatArray
    payload: Bytes
    link_loads: LinkLoadMatrix


class KernelCost(Protocol):
    """The seam between the engine and sources of kernel durations."""

    def time_kernel(self, kernel: Kernel) -> KernelTiming:
        """Time one kernel alone on one GPU."""


class CommCost(Protocol):
    """The seam between the engine and sources of collective durations."""

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Time one collective in each group of its role, all groups of the role at once."""


class LinkDemandCost(Protocol):
    """The seam between the engine's shared network and sources of what collectives ask of it."""

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """What one collective asks of links in each group of its role."""
