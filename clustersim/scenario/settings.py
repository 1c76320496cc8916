"""Where do durations come from, and how much of the cluster is simulated rank by rank?"""

from dataclasses import dataclass, field
from enum import Enum

from clustersim.collectives.switches import Switches
from clustersim.cost.record import Record


class Symmetry(Enum):
    """AUTO simulates one of the ranks that provably do the same, OFF simulates every rank."""

    AUTO = "auto"
    OFF = "off"


class Contention(Enum):
    """SHARED lets collectives and messages that overlap share the network's links; NONE times each by itself.

    Without it a network port may carry more than its bandwidth, and layouts that send all over it look too fast.
    """

    NONE = "uncontended"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class CostSettings:
    """coalesce: tasks that no other rank can observe are one event; switches: what the library was told to take.

    interference: the part by which kernels take longer beside a collective, None: the record's or the accelerator's
    own; record: what was measured on the accelerator that it names, None: nothing.
    """

    symmetry: Symmetry = Symmetry.AUTO
    coalesce: bool = True
    network: Contention = Contention.SHARED
    switches: Switches = field(default_factory=Switches)
    interference: float | None = None
    record: Record | None = None
