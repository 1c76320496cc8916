"""What may a scenario file say about costs and energy?"""

import math
import re
from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator

from clustersim.common import data_files
from clustersim.common.errors import InputError, format_value
from clustersim.common.units import Dimension, parse_quantity
from clustersim.hardware.power import PowerOverrides
from clustersim.hardware.prices import Price, is_price_list_name, parse_price
from clustersim.scenario.config_reader import ConfigModel, config_error, fraction_parser, quantity_label, value_parser
from clustersim.scenario.settings import EconomicsSettings

MAX_PUE: Final = 10.0
_TOKEN_COUNT_PATTERN: Final = re.compile(r"\s*(\d+\.?\d*|\.\d+)(?:[eE]\+?(\d{1,2}))?\s*([MBT]?)\s*$")
_SUFFIX_FACTORS: Final = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


def _parse_price(value: object) -> Price | str | None:
    """A price, or the name of a price list."""
    if value is None or is_price_list_name(value):
        return value if isinstance(value, str) else None
    try:
        return parse_price(value)
    except InputError as error:
        raise config_error(str(error)) from error


def _parse_token_count(value: object) -> float | None:
    """Parse a token count, such as 15.6T, 300B or 1.5e+13."""
    if value is None:
        return None
    match = _TOKEN_COUNT_PATTERN.match(value) if isinstance(value, str) else None
    if match:
        value = float(match[1]) * 10.0 ** int(match[2] or 0) * _SUFFIX_FACTORS[match[3]]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise config_error(f"{format_value(value)} is not a number of tokens above zero; write e.g. 15.6T or 300B")
    return float(value)


def _parse_pue(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1.0 <= value <= MAX_PUE:
        raise config_error(
            f"{format_value(value)} is not between 1 and {MAX_PUE:g}; 1.2 means 20 % on top of what computers draw"
        )
    return float(value)


def _quantity_parser(dimension: Dimension, *, allow_zero: bool = False) -> BeforeValidator:
    """A validator that parses a finite quantity with its unit, above zero (or zero, where allowed)."""

    def parse(value: object) -> float | None:
        if value is None:
            return None
        try:
            amount = parse_quantity(value, dimension)
        except InputError as error:
            raise config_error(str(error)) from error
        if not math.isfinite(amount) or amount < 0.0 or (amount == 0.0 and not allow_zero):
            reason = "not finite" if not math.isfinite(amount) else "below zero" if allow_zero else "not above zero"
            raise config_error(f"{format_value(value)} is {reason}; write e.g. {dimension.example!r}")
        return amount

    return value_parser(parse, quantity_label(dimension), dimension.example)


_PowerWatts = Annotated[float | None, _quantity_parser(Dimension.POWER)]
_PowerWattsOrZero = Annotated[float | None, _quantity_parser(Dimension.POWER, allow_zero=True)]
_PowerFraction = Annotated[float | None, fraction_parser(0.0, 1.0)]


class PowerConfig(ConfigModel):
    """`economics.power`: power draw of every GPU at TDP and idle, and by activity as a fraction of TDP."""

    shorthand_key: ClassVar[str | None] = "tdp"
    tdp: _PowerWatts = None
    """maximum power of a GPU; left out: the accelerator's"""
    idle: _PowerWatts = None
    """idle power of a GPU; left out: the accelerator's"""
    rest: _PowerWattsOrZero = None
    """a GPU's share of the node's other power; left out: the accelerator's"""
    matmul: _PowerFraction = None
    """fraction of tdp in matmuls; left out: topologies/power"""
    memory_bound: _PowerFraction = None
    """fraction of tdp in memory-bound kernels; left out: topologies/power"""
    exposed_communication: _PowerFraction = None
    """fraction of tdp in exposed communication; left out: topologies/power"""

    def power_settings(self) -> PowerOverrides:
        """The power settings as the simulator represents them."""
        return PowerOverrides(**{name: getattr(self, name) for name in type(self).model_fields})


_PRICE_DESCRIPTION: Final = f"an amount with its currency, or a list: {', '.join(data_files.list_names('prices'))}"


class EconomicsConfig(ConfigModel):
    """`economics`: prices, power, and length of the run; does not affect durations."""

    price_per_gpu_hour: Annotated[Price | str | None, value_parser(_parse_price, _PRICE_DESCRIPTION, "2.49 USD")] = None
    """a contract price (an amount and a currency; the list price is reported with it), or a price list.

    Left out: the list of the cluster's own cloud, else the median of all
    """
    pue: Annotated[float, value_parser(_parse_pue, f"1 to {MAX_PUE:g}", schema_type=float)] = 1.0
    """power usage effectiveness: facility power over IT power"""
    carbon_intensity: Annotated[float | None, _quantity_parser(Dimension.FOOTPRINT, allow_zero=True)] = None
    """CO2 per kWh; left out: emissions are not reported"""
    tokens: Annotated[
        float | None, value_parser(_parse_token_count, "a number, also in M, B or T", "15.6T", "300B", "1.5e+13")
    ] = None
    """training tokens of the run; left out: costs are reported per trillion tokens"""
    power: PowerConfig = PowerConfig()
    """power draw of GPUs and nodes"""

    def economics_settings(self) -> EconomicsSettings:
        """The economics settings as the simulator represents them."""
        return EconomicsSettings(
            self.price_per_gpu_hour, self.pue, self.carbon_intensity, self.tokens, self.power.power_settings()
        )
