"""What may a scenario file say of costs and energy?"""

import math
import re
from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator

from clustersim.common import data_files
from clustersim.common.errors import InputError, shown
from clustersim.common.units import Dimension, parse_quantity
from clustersim.hardware.power import Powers
from clustersim.hardware.prices import Price, is_list, parse_price
from clustersim.scenario.config_reader import Section, mistake, quantity, reads, share
from clustersim.scenario.settings import EconomicsSettings

MOST_PUE: Final = 10.0
_TOKENS: Final = re.compile(r"\s*(\d+\.?\d*|\.\d+)(?:[eE]\+?(\d{1,2}))?\s*([MBT]?)\s*$")
_MANY: Final = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


def _price(value: object) -> Price | str | None:
    """A price, or the name of a price list."""
    if value is None or is_list(value):
        return value if isinstance(value, str) else None
    try:
        return parse_price(value)
    except InputError as error:
        raise mistake(str(error)) from error


def _tokens(value: object) -> float | None:
    """A number of tokens, such as 15.6T, 300B or 1.5e+13."""
    if value is None:
        return None
    match = _TOKENS.match(value) if isinstance(value, str) else None
    if match:
        value = float(match[1]) * 10.0 ** int(match[2] or 0) * _MANY[match[3]]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise mistake(f"{shown(value)} is not a number of tokens above zero; write e.g. 15.6T or 300B")
    return float(value)


def _pue(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1.0 <= value <= MOST_PUE:
        raise mistake(f"{shown(value)} is not between 1 and {MOST_PUE:g}; 1.2 means 20 % on top of what computers draw")
    return float(value)


def _quantity(dimension: Dimension, *, zero: bool = False) -> BeforeValidator:
    """Read a finite quantity with its unit, above zero (or zero, where that is allowed)."""

    def read(value: object) -> float | None:
        if value is None:
            return None
        try:
            amount = parse_quantity(value, dimension)
        except InputError as error:
            raise mistake(str(error)) from error
        if not math.isfinite(amount) or amount < 0.0 or (amount == 0.0 and not zero):
            wrong = "not finite" if not math.isfinite(amount) else "below zero" if zero else "not above zero"
            raise mistake(f"{shown(value)} is {wrong}; write e.g. {dimension.example!r}")
        return amount

    return reads(read, quantity(dimension), dimension.example)


_Power = Annotated[float | None, _quantity(Dimension.POWER)]
_Rest = Annotated[float | None, _quantity(Dimension.POWER, zero=True)]
_Share = Annotated[float | None, share(0.0, 1.0)]


class PowerSection(Section):
    """`economics.power`: what every GPU draws at most, idle, and by what it does as a part of the most."""

    short: ClassVar[str | None] = "tdp"
    tdp: _Power = None
    """what a GPU draws at most; left out: the accelerator's"""
    idle: _Power = None
    """what it draws idle; left out: the accelerator's"""
    rest: _Rest = None
    """its part of the rest of the node; left out: the accelerator's"""
    products: _Share = None
    """part of tdp in matrix products; left out: topologies/power"""
    streaming: _Share = None
    """part of tdp in other kernels; left out: topologies/power"""
    communicating: _Share = None
    """part of tdp in exposed communication; left out: topologies/power"""

    def powers(self) -> Powers:
        """The same as the inside knows it."""
        return Powers(**{name: getattr(self, name) for name in type(self).model_fields})


_PRICES: Final = f"an amount with its currency, or a list: {', '.join(data_files.names('prices'))}"


class EconomicsSection(Section):
    """`economics`: prices, power, and the run that costs are asked for; it moves no time."""

    price_per_gpu_hour: Annotated[Price | str | None, reads(_price, _PRICES, "2.49 USD")] = None
    """an amount and a currency, or a price list; left out: the list of the cluster's own cloud, else the median of
    all"""
    pue: Annotated[float, reads(_pue, f"1 to {MOST_PUE:g}", of=float)] = 1.0
    """power of the facility over that of its computers"""
    carbon: Annotated[float | None, _quantity(Dimension.FOOTPRINT, zero=True)] = None
    """CO2 of a kWh; left out: none is told"""
    tokens: Annotated[float | None, reads(_tokens, "a number, also in M, B or T", "15.6T", "300B", "1.5e+13")] = None
    """of the whole run; left out: a trillion are told"""
    power: PowerSection = PowerSection()
    """what GPUs and nodes draw"""

    def settings(self) -> EconomicsSettings:
        """The settings as the inside knows them."""
        return EconomicsSettings(self.price_per_gpu_hour, self.pue, self.carbon, self.tokens, self.power.powers())
