"""Settings of the cost model (sources of durations, symmetry, contention) and of economics (prices, power)."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from clustersim.collectives.nccl_overrides import NcclOverrides
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.power import PowerDraw, PowerOverrides
from clustersim.hardware.prices import Price, PriceKind, PriceQuote, quote_from_list, quote_list_price

if TYPE_CHECKING:
    from clustersim.cost.calibration_record import CalibrationRecord


class Symmetry(Enum):
    """AUTO simulates one representative of each class of equivalent ranks, OFF simulates every rank."""

    AUTO = "auto"
    OFF = "off"


class Contention(Enum):
    """SHARED: overlapping collectives and messages share link bandwidth; UNCONTENDED: each is timed in isolation.

    Without sharing, a network port may carry more than its bandwidth, and layouts with much cross-node traffic
    look too fast.
    """

    UNCONTENDED = "uncontended"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Settings of the cost model.

    coalesce: merge tasks that no other rank can observe into one event; nccl_overrides: restrictions on the
    library's choice of algorithm and protocol; interference: fraction by which kernels slow down while a
    collective is in flight (collectives do not), None: both from the record or the accelerator; record:
    calibration measurements of the accelerator it names, None: none.
    """

    symmetry: Symmetry = Symmetry.AUTO
    coalesce: bool = True
    network: Contention = Contention.SHARED
    nccl_overrides: NcclOverrides = field(default_factory=NcclOverrides)
    interference: float | None = None
    record: "CalibrationRecord | None" = None


@dataclass(frozen=True, slots=True)
class EconomicsSettings:
    """Settings of costs and energy; they do not affect durations.

    gpu_hour_price: contract price of one GPU hour, or a price list's name, None: the accelerator's or the default
    list; pue: facility power over IT power; carbon_intensity: grams of CO2 per joule, None: not reported;
    training_tokens: tokens of the whole run, None: not stated.
    """

    gpu_hour_price: Price | str | None = None
    pue: float = 1.0
    carbon_intensity: float | None = None
    training_tokens: float | None = None
    powers: PowerOverrides = field(default_factory=PowerOverrides)

    def gpu_hour_quote(self, accelerator: Accelerator, cluster: str) -> PriceQuote | None:
        """The price of a GPU hour that costs use, and its source; None if unknown. Raises InputError."""
        match self.gpu_hour_price:
            case None if accelerator.price is not None:
                return PriceQuote(accelerator.price, "price_per_gpu_hour of the accelerator", PriceKind.CONTRACT)
            case None:
                return quote_list_price(accelerator.name, cluster)
            case str() as name:
                return quote_from_list(name, accelerator.name)
        return PriceQuote(self.gpu_hour_price, "economics.price_per_gpu_hour", PriceKind.CONTRACT)

    def compared_list_quote(self, accelerator: Accelerator, cluster: str) -> PriceQuote | None:
        """The list price of a GPU hour, to compare a contract price with; None without a contract price or a list."""
        return quote_list_price(accelerator.name, cluster) if isinstance(self.gpu_hour_price, Price) else None

    def power_draw(self, accelerator: Accelerator) -> PowerDraw | None:
        """Power draw of a GPU with its share of the node; None if unknown. Raises InputError."""
        return self.powers.resolve_draw(accelerator.power)
