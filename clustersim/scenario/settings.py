"""Where do durations come from, how much of the cluster is simulated rank by rank, and what does a GPU hour cost?"""

from dataclasses import dataclass, field
from enum import Enum

from clustersim.collectives.nccl_overrides import NcclOverrides
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.power import PowerDraw, PowerOverrides
from clustersim.hardware.prices import Price, PriceQuote, quote_from_list, quote_list_price


class Symmetry(Enum):
    """AUTO simulates one of the ranks that provably do the same, OFF simulates every rank."""

    AUTO = "auto"
    OFF = "off"


class Contention(Enum):
    """SHARED lets collectives and messages that overlap share the network's links; NONE times each by itself.

    Without it a network port may carry more than its bandwidth, and layouts that send all over it look too fast.
    """

    UNCONTENDED = "uncontended"
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
    nccl_overrides: NcclOverrides = field(default_factory=NcclOverrides)
    interference: float | None = None
    record: CalibrationRecord | None = None


USER_STATED = "given"
"""Where a price is from that somebody said."""


@dataclass(frozen=True, slots=True)
class EconomicsSettings:
    """What is said of costs and energy; it moves no time.

    price: of an hour of one GPU, or the name of a price list, None: as lists have it; pue: power of the whole facility
    over that of its computers; carbon: grams of CO2 for a joule, None: not asked for; tokens: of the whole run, None:
    not said.
    """

    gpu_hour_price: Price | str | None = None
    pue: float = 1.0
    carbon_intensity: float | None = None
    training_tokens: float | None = None
    powers: PowerOverrides = field(default_factory=PowerOverrides)

    def gpu_hour_quote(self, accelerator: Accelerator, cluster: str) -> PriceQuote | None:
        """The price of an hour of a GPU and where it is from; None where there is none. Raises InputError."""
        match self.gpu_hour_price:
            case None:
                return quote_list_price(accelerator.name, cluster)
            case str() as name:
                return quote_from_list(name, accelerator.name)
        return PriceQuote(self.gpu_hour_price, USER_STATED)

    def power_draw(self, accelerator: Accelerator) -> PowerDraw | None:
        """What a GPU and its part of a node draw; None where that is not known. Raises InputError."""
        return self.powers.resolve_draw(accelerator.power)
