"""Price of a GPU hour.

On-demand list prices of public clouds are data: a file for each cloud (`topologies/prices`), with its source
and the day on which it was read. A cluster of a cloud has that cloud's price; any other, and a GPU that its
cloud does not list, the median of all lists that have it, one vote per cloud. An accelerator in no list has
no price. Contract prices are lower: so use costs for comparisons, or supply a price. A price that the user
states is a contract price, and the list price is reported with it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from enum import Enum
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Final

from clustersim.common.data_files import find_file, list_names, parse_mapping, read_text
from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.common.mapping_reader import MappingReader

_PRICE: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Z]{3})\s*$")
_EXAMPLE: Final = "'2.49 USD'"
_NAME: Final = re.compile(r"(?!nan$|inf$)[a-z][a-z0-9_-]*$")


@dataclass(frozen=True, slots=True)
class Price:
    """An amount of money. currency: ISO 4217 code."""

    amount: float
    currency: str

    def __str__(self) -> str:
        return f"{self.amount:.12g} {self.currency}"


class PriceKind(Enum):
    """Whose price it is."""

    CONTRACT = "contract"  # stated by the user
    LIST = "list"  # published by a cloud


@dataclass(frozen=True, slots=True)
class PriceList:
    """A cloud's prices per GPU hour, by accelerator. clusters: names of its clusters; read_date: when it was read."""

    name: str
    description: str
    read_date: date
    price_per_gpu_hour: Mapping[str, Price]
    clusters: tuple[str, ...]
    sources: Mapping[str, str]

    def quote_price(self, accelerator: str) -> "PriceQuote":
        """Its price of an accelerator; raise InputError that names those that it has."""
        if accelerator not in self.price_per_gpu_hour:
            raise InputError(
                f"{self.name} has no price of {accelerator}; it has those of {', '.join(self.price_per_gpu_hour)}"
            )
        return PriceQuote(self.price_per_gpu_hour[accelerator], f"{self.description}, read {self.read_date}")


@dataclass(frozen=True, slots=True)
class PriceQuote:
    """The price of a GPU hour, a description of its source, and whose price it is."""

    price: Price
    source: str
    kind: PriceKind = PriceKind.LIST


def parse_price(value: object) -> Price:
    """Parse an amount with its currency; raise InputError that names the value and an example.

    >>> parse_price("2.49 USD")
    Price(amount=2.49, currency='USD')
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise InputError(f"{format_value(value)} has no currency; write e.g. {_EXAMPLE}")
    match = _PRICE.match(value) if isinstance(value, str) else None
    if match is None:
        raise InputError(f"{format_value(value)} is not a price; write an amount and a currency such as {_EXAMPLE}")
    amount = float(match[1])
    if not 0.0 <= amount < math.inf:
        raise InputError(
            f"{format_value(value)} is {'below zero' if amount < 0.0 else 'not finite'}; write e.g. {_EXAMPLE}"
        )
    return Price(amount, match[2])


def is_price_list_name(value: object) -> bool:
    """Whether a value is the name of a price list rather than a price.

    >>> is_price_list_name("oci"), is_price_list_name("2.49 USD"), is_price_list_name("nan")
    (True, False, False)
    """
    return isinstance(value, str) and _NAME.match(value) is not None


def load_price_list(name_or_path: str) -> PriceList:
    """Load topologies/prices/NAME.yaml, or a file of the same form."""
    path = find_file("prices", name_or_path)
    return _parse_price_list(path, read_text(path))


@lru_cache(maxsize=32)
def _parse_price_list(path: Path, text: str) -> PriceList:
    """Cached by the text, which may change."""
    section = MappingReader(path, parse_mapping(path, text))
    description, read_date = section.get_text("description"), _read_date(section)
    gpu_hour = _read_prices(section.get_section("gpu_hour"))
    clusters, sources = section.get_text_list("clusters"), section.get_section("sources").get_text_mapping()
    section.reject_unknown_keys()
    return PriceList(path.stem, description, read_date, gpu_hour, clusters, sources)


def quote_list_price(accelerator: str, cluster: str) -> PriceQuote | None:
    """The list price of an accelerator in a cluster, by their names; None if no list has it."""
    lists = [
        price_list
        for price_list in map(load_price_list, list_names("prices"))
        if accelerator in price_list.price_per_gpu_hour
    ]
    cluster_lists = [price_list for price_list in lists if cluster in price_list.clusters]
    if cluster_lists or len(lists) == 1:
        return (cluster_lists or lists)[0].quote_price(accelerator)
    return _median_quote(
        [price_list.price_per_gpu_hour[accelerator] for price_list in lists],
        [price_list.read_date for price_list in lists],
    )


def quote_from_list(name: str, accelerator: str) -> PriceQuote:
    """The price of an accelerator in a named list; raise InputError if the list or the price does not exist."""
    return load_price_list(name).quote_price(accelerator)


def _median_quote(prices: list[Price], read_dates: list[date]) -> PriceQuote | None:
    """The median of list prices, all in one currency (a test ensures it)."""
    if not prices:
        return None
    amounts = sorted(price.amount for price in prices)
    low, high = Price(amounts[0], prices[0].currency), Price(amounts[-1], prices[0].currency)
    days = f"{min(read_dates)} to {max(read_dates)}" if min(read_dates) < max(read_dates) else f"{min(read_dates)}"
    description = f"median of {len(prices)} clouds' list prices ({low.amount:g} to {high}), read {days}"
    return PriceQuote(Price(median(amounts), prices[0].currency), description)


def _read_prices(section: MappingReader) -> dict[str, Price]:
    accelerators = list_names("accelerators")
    prices = {}
    for key in section.key_names():
        if key not in accelerators:
            raise section.input_error(key, f"there is no such accelerator; {suggest_nearest(key, accelerators)}")
        try:
            prices[key] = parse_price(section.get_value(key))
        except InputError as error:
            raise section.input_error(key, str(error)) from error
    return prices


def _read_date(section: MappingReader) -> date:
    text = section.get_text("read")
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise section.input_error("read", f"{format_value(text)} is not a day; write e.g. '2026-11-23'") from error
