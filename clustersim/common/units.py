"""Units of quantities: SI floats internally, strings with units at the interfaces.

Internally: seconds, bytes, FLOP, bytes/s, FLOP/s, watts, joules and grams, as floats; signatures say so with
the aliases below. In files and options every quantity is a string with its unit. G is 10^9, Gi is 2^30; `b`
and `bit` are bits, `B` is a byte.
"""

import math
import re
from enum import Enum
from typing import Final

from clustersim.common.errors import InputError, format_value

Seconds = float
Bytes = float
BytesPerSecond = float
Flop = float
FlopPerSecond = float
Watts = float
Joules = float
Grams = float

JOULES_PER_KWH: Final = 3.6e6
"""Joules in a kilowatt hour."""
_DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: Final = {f"{prefix}i": 2.0 ** (10 * power) for power, prefix in enumerate("KMGTPE", start=1)}
_PREFIXES: Final = {**_DECIMAL, **_BINARY}
_QUANTITY_PATTERN: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\s\d].*?)\s*$")
_TWO_UNIT_RANGES: Final = (
    (2 * 3600.0, "min", "s", 1.0, 60),
    (48 * 3600.0, "h", "min", 60.0, 60),
    (math.inf, "d", "h", 3600.0, 24),
)
"""Upper bound in seconds, larger and smaller unit, seconds of the smaller one, and how many of it make the
larger one.
"""


def _prefixed_units(*bases: tuple[str, float]) -> dict[str, float]:
    return {prefix + base: factor * scale for base, scale in bases for prefix, factor in _PREFIXES.items()}


class Dimension(Enum):
    """Physical dimension of a quantity; the value holds an example for error messages and every unit's factor."""

    TIME = (
        "1.3 us",
        {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0},
    )
    SIZE = ("80 GiB", _prefixed_units(("B", 1.0), ("bit", 0.125), ("b", 0.125)))
    BANDWIDTH = (
        "400 Gbit/s",
        {**_prefixed_units(("B/s", 1.0), ("bit/s", 0.125), ("b/s", 0.125)), **_prefixed_units(("bps", 0.125))},
    )
    LENGTH = ("1000 km", {"m": 1.0, "km": 1e3})
    COMPUTE = ("989 TFLOP/s", {prefix + "FLOP/s": factor for prefix, factor in _DECIMAL.items()})
    POWER = ("700 W", {"W": 1.0, "kW": 1e3, "MW": 1e6})
    FOOTPRINT = (
        "400 g/kWh",
        {"g/kWh": 1.0 / JOULES_PER_KWH, "kg/kWh": 1e3 / JOULES_PER_KWH},
    )  # grams of CO2 for a joule

    @property
    def example(self) -> str:
        """A quantity of this dimension as a user would write it."""
        return self.value[0]

    @property
    def factors(self) -> dict[str, float]:
        """SI value of every legal unit."""
        return self.value[1]


def parse_quantity(text: object, dimension: Dimension) -> float:
    """Parse a string with a unit into SI base units; raise InputError naming the value and an example.

    >>> parse_quantity("400 Gbit/s", Dimension.BANDWIDTH)
    50000000000.0
    >>> parse_quantity("80 GiB", Dimension.SIZE)
    85899345920.0
    """
    kind = dimension.name.lower()
    if isinstance(text, bool) or not isinstance(text, str):
        raise InputError(f"{format_value(text)} has no unit; a {kind} is a string such as {dimension.example!r}")
    match = _QUANTITY_PATTERN.match(text)
    if match is None:
        raise InputError(f"{text!r} is not a {kind}; write a number and a unit such as {dimension.example!r}")
    amount, unit = float(match[1]), match[2]
    if unit not in dimension.factors:
        raise InputError(f"{text!r} has unit {unit!r}, which is not a unit of {kind}; write e.g. {dimension.example!r}")
    return amount * dimension.factors[unit]


def parse_share(text: str) -> float:
    """Parse a share that an option states, from 0 to below 1; raise ValueError for what is none.

    >>> parse_share("0.1"), parse_share("95 %")
    (0.1, 0.95)
    """
    share = float(text.strip().removesuffix("%")) / (100.0 if "%" in text else 1.0)
    if not 0.0 <= share < 1.0:
        raise ValueError(text)
    return share


def format_number(value: float) -> str:
    """Format a number: four significant digits, thousands separated, no exponent where it is large.

    >>> format_number(82583.4), format_number(158.8), format_number(0.01234)
    ('82,580', '158.8', '0.01234')
    """
    rounded = float(f"{value:.4g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.4g}"


def _format_with_prefix(value: float, unit: str, prefixes: dict[str, float]) -> str:
    chosen, factor = "", 1.0
    for prefix, size in prefixes.items():
        if prefix != "k" and abs(value) >= size > factor:
            chosen, factor = prefix, size
    return f"{value / factor:.4g} {chosen}{unit}"


def format_bytes(value: Bytes) -> str:
    """Format bytes with binary prefixes.

    >>> format_bytes(80 * 2**30)
    '80 GiB'
    """
    return _format_with_prefix(value, "B", {"": 1.0, **_BINARY})


def format_bandwidth(value: BytesPerSecond) -> str:
    """Format bytes per second with decimal prefixes.

    >>> format_bandwidth(50e9)
    '50 GB/s'
    """
    return _format_with_prefix(value, "B/s", _DECIMAL)


def format_flops(value: FlopPerSecond) -> str:
    """Format FLOP per second.

    >>> format_flops(989e12)
    '989 TFLOP/s'
    """
    return _format_with_prefix(value, "FLOP/s", _DECIMAL)


def format_power(value: Watts) -> str:
    """Format watts.

    >>> format_power(653.2), format_power(16.7e6)
    ('653.2 W', '16.7 MW')
    """
    return f"{value / 1e3:.4g} kW" if 1e3 <= abs(value) < 1e6 else _format_with_prefix(value, "W", _DECIMAL)


def format_energy(value: Joules) -> str:
    """Format joules as watt hours.

    >>> format_energy(3.6e6), format_energy(1.2e14)
    ('1 kWh', '33.33 GWh')
    """
    hours = value / 3600.0
    return f"{hours / 1e3:.4g} kWh" if 1e3 <= abs(hours) < 1e6 else _format_with_prefix(hours, "Wh", _DECIMAL)


def format_seconds(value: Seconds) -> str:
    """Format seconds: one unit up to 120 s, then two.

    >>> format_seconds(0.0042), format_seconds(1.3e-6), format_seconds(12.5), format_seconds(0.0)
    ('4.2 ms', '1.3 us', '12.5 s', '0 s')
    >>> format_seconds(754.0), format_seconds(20_000.0), format_seconds(2.736e5)
    ('12 min 34 s', '5 h 33 min', '3 d 4 h')
    """
    if 120 < abs(value) < math.inf:
        return _format_two_units(value)
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns" if value else "0 s"


def format_step_time(value: Seconds) -> str:
    """Format seconds with four significant digits, zeros too, so that step times can be compared.

    Above 120 s two units.

    >>> format_step_time(7.0), format_step_time(6.98), format_step_time(0.99996), format_step_time(754.0)
    ('7.000 s', '6.980 s', '1.000 s', '12 min 34 s')
    """
    if not 0 < abs(value) <= 120:
        return format_seconds(value)
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(value) >= 0.99995 * size:
            return f"{value / size:#.4g} {unit}"
    return f"{value / 1e-9:#.4g} ns"


def format_signed_seconds(value: Seconds) -> str:
    """Format a time difference, with its sign.

    >>> format_signed_seconds(-0.5), format_signed_seconds(0.0), format_signed_seconds(2.0)
    ('-500 ms', '+0 s', '+2 s')
    """
    return f"{'-' if value < 0 else '+'}{format_seconds(abs(value))}"


def _format_two_units(value: Seconds) -> str:
    """Minutes and seconds up to two hours, hours and minutes up to two days, then days and hours."""
    _, large, small, size, small_per_large = next(
        unit_range for unit_range in _TWO_UNIT_RANGES if abs(value) < unit_range[0]
    )
    large_count, small_count = divmod(round(abs(value) / size), small_per_large)
    return f"{'-' if value < 0 else ''}{large_count:,} {large} {small_count} {small}"


def format_probability(probability: float) -> str:
    """A probability as text, rounded down: what happens with 99.6 % is not certain.

    >>> format_probability(0.996), format_probability(0.29)
    ('99%', '29%')
    """
    return f"{math.floor(100.0 * probability + 1e-9)}%"
