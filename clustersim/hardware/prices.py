"""What does an hour of one GPU cost?

List prices of public clouds, on demand, are data: a file for each cloud (`topologies/prices`), with its source and the
day on which it was read. A cluster that is one of a cloud's has that cloud's price; any other, and a GPU that its cloud
does not list, the median of all lists that have it, clouds counted alike. What nobody lists has no price. Contracts
cost less: so costs are to be compared with each other, or to be had from one's own price.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from statistics import median
from typing import Final

from clustersim.common.data_files import find, names, read_mapping
from clustersim.common.errors import InputError, nearest, shown
from clustersim.common.mapping_reader import Section

_PRICE: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Z]{3})\s*$")
_EXAMPLE: Final = "'2.49 USD'"
_NAME: Final = re.compile(r"(?!nan$|inf$)[a-z][a-z0-9_-]*$")


@dataclass(frozen=True, slots=True)
class Price:
    """An amount of money. currency: its three letters (ISO 4217)."""

    amount: float
    currency: str

    def __str__(self) -> str:
        return f"{self.amount:.12g} {self.currency}"


@dataclass(frozen=True, slots=True)
class PriceList:
    """What a cloud asks for an hour of a GPU, by accelerator. clusters: those that are its own; read: the day."""

    name: str
    description: str
    read: date
    gpu_hour: Mapping[str, Price]
    clusters: tuple[str, ...]
    sources: Mapping[str, str]

    def quote(self, accelerator: str) -> "Quote":
        """Its price of an accelerator; raise InputError that names those that it has."""
        if accelerator not in self.gpu_hour:
            raise InputError(f"{self.name} has no price of {accelerator}; it has those of {', '.join(self.gpu_hour)}")
        return Quote(self.gpu_hour[accelerator], f"{self.description}, read {self.read}")


@dataclass(frozen=True, slots=True)
class Quote:
    """The price of an hour of one GPU, and where it is from, in words."""

    price: Price
    source: str


def parse_price(value: object) -> Price:
    """Read an amount with its currency; raise InputError that names the value and an example.

    >>> parse_price("2.49 USD")
    Price(amount=2.49, currency='USD')
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise InputError(f"{shown(value)} has no currency; write e.g. {_EXAMPLE}")
    match = _PRICE.match(value) if isinstance(value, str) else None
    if match is None:
        raise InputError(f"{shown(value)} is not a price; write an amount and a currency such as {_EXAMPLE}")
    amount = float(match[1])
    if not 0.0 <= amount < math.inf:
        raise InputError(f"{shown(value)} is {'below zero' if amount < 0.0 else 'not finite'}; write e.g. {_EXAMPLE}")
    return Price(amount, match[2])


def is_list(value: object) -> bool:
    """Whether a value is meant as the name of a price list.

    >>> is_list("oci"), is_list("2.49 USD"), is_list("nan")
    (True, False, False)
    """
    return isinstance(value, str) and _NAME.match(value) is not None


@cache
def load_prices(name_or_path: str) -> PriceList:
    """Read topologies/prices/NAME.yaml, or a file of the same form."""
    path = find("prices", name_or_path)
    section = Section(path, read_mapping(path))
    described, read = section.text("description"), _day(section)
    gpu_hour = _prices(section.section("gpu_hour"))
    clusters, sources = tuple(section.words("clusters")), section.section("sources").texts()
    section.finish()
    return PriceList(path.stem, described, read, gpu_hour, clusters, sources)


def quote(accelerator: str, cluster: str) -> Quote | None:
    """The list price of an accelerator in a cluster, by their names; None where nobody lists it."""
    lists = [found for found in map(load_prices, names("prices")) if accelerator in found.gpu_hour]
    own = [found for found in lists if cluster in found.clusters]
    if own or len(lists) == 1:
        return (own or lists)[0].quote(accelerator)
    return _median([found.gpu_hour[accelerator] for found in lists], [found.read for found in lists])


def quote_of(name: str, accelerator: str) -> Quote:
    """The price of an accelerator in a list; raise InputError where there is no such list, or no such price."""
    return load_prices(name).quote(accelerator)


def _median(prices: list[Price], read: list[date]) -> Quote | None:
    """The middle of list prices, all in one currency (a test holds the shelf to it)."""
    if not prices:
        return None
    amounts = sorted(price.amount for price in prices)
    low, high = Price(amounts[0], prices[0].currency), Price(amounts[-1], prices[0].currency)
    days = f"{min(read)} to {max(read)}" if min(read) < max(read) else f"{min(read)}"
    words = f"median of {len(prices)} clouds' list prices ({low.amount:g} to {high}), read {days}"
    return Quote(Price(median(amounts), prices[0].currency), words)


def _prices(section: Section) -> dict[str, Price]:
    known = names("accelerators")
    found = {}
    for key in section.names():
        if key not in known:
            raise section.refuse(key, f"there is no such accelerator; {nearest(key, known)}")
        try:
            found[key] = parse_price(section.value(key))
        except InputError as error:
            raise section.refuse(key, str(error)) from error
    return found


def _day(section: Section) -> date:
    text = section.text("read")
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise section.refuse("read", f"{shown(text)} is not a day; write e.g. '2026-11-23'") from error
