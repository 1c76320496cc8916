"""With which probability does a predicted peak fit into memory, and how much of it must a prediction leave free?

An error is a ratio: measured over predicted peak memory of a published run, the largest of the peaks that it
states. Runs are grouped by the family of their framework, since frameworks of a family share an allocator and
its habits. The probability that a layout fits is the share of these errors for which predicted x ratio is
within the capacity, with three rules against hope:

- every source has the same weight, however many runs it published;
- one more source is assumed, whose errors are as large as the largest of any family: the next software may be
  as bad as the worst so far;
- of n runs, none of which would exceed the capacity, the next one is still assumed to with 1 / (n + 1) (rule of
  succession).

A family with fewer than `MIN_SOURCES` sources, and a framework that no run is published of, takes the lowest
probability of all families that have enough.

The default headroom is the least free share of a device at which that probability is `SAFE_PROBABILITY`: what
`MIN_SOURCES` sources and the assumed one can vouch for.

`python -m calibrate fit-memory-error` writes the errors, in topologies/uncertainty/memory.yaml.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Self

from clustersim.common.data_files import find_file, parse_mapping, read_text
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Bytes

MIN_SOURCES: Final = 4
SAFE_PROBABILITY: Final = MIN_SOURCES / (MIN_SOURCES + 1)
MIN_HEADROOM: Final = 0.05
"""Least default headroom, as a share of the device."""
MEMORY_ERRORS: Final = "memory"
_HEADROOM_STEPS: Final = 1000  # a headroom is rounded up to a thousandth of the device
_ROUNDING: Final = 1e-9  # of capacity over peak


@dataclass(frozen=True, slots=True)
class MemoryErrorFamily:
    """Errors of a family of frameworks.

    frameworks: names of its files; ratios_by_source: measured over predicted peak of each run.
    """

    name: str
    frameworks: frozenset[str]
    ratios_by_source: Mapping[str, tuple[float, ...]]

    @property
    def has_enough_sources(self) -> bool:
        """Whether its own errors suffice."""
        return len(self.ratios_by_source) >= MIN_SOURCES

    @property
    def ratios(self) -> list[float]:
        """Ratios of all runs."""
        return [ratio for ratios in self.ratios_by_source.values() for ratio in ratios]

    def source_shares(self, margin: float) -> list[float]:
        """By source, the share of runs whose ratio is at most this capacity over predicted peak."""
        limit = margin * (1.0 + _ROUNDING)
        return [sum(ratio <= limit for ratio in ratios) / len(ratios) for ratios in self.ratios_by_source.values()]

    def without(self, source: str) -> Self:
        """The family without the runs of a source."""
        ratios = {name: ratios for name, ratios in self.ratios_by_source.items() if name != source}
        return type(self)(self.name, self.frameworks, ratios)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryErrorModel:
    """Published errors of predicted peak memory, by family of frameworks; equal to itself alone."""

    families: tuple[MemoryErrorFamily, ...]
    _ratios: tuple[float, ...] = field(init=False, repr=False)
    """All ratios of all families, ascending."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ratios", tuple(sorted(chain.from_iterable(f.ratios for f in self.families))))
        if not any(family.has_enough_sources for family in self.families):
            raise InputError(
                f"memory errors: no family has {MIN_SOURCES} sources, of which a probability needs as many"
            )

    def fit_probability(self, framework: str, peak: Bytes, capacity: Bytes) -> float:
        """Probability that a run of this framework with this predicted peak fits into this capacity."""
        margin = capacity / peak if peak else math.inf
        return min(self._family_probability(family, margin) for family in self._families_for(framework))

    def default_headroom(self, framework: str) -> float:
        """The free share of a device at which a prediction for this framework is safe; at least `MIN_HEADROOM`."""
        margins = self._ratios
        safe = bisect_left(margins, SAFE_PROBABILITY, key=lambda margin: self.fit_probability(framework, 1.0, margin))
        margin = margins[safe]
        return max(MIN_HEADROOM, math.ceil((1.0 - 1.0 / margin) * _HEADROOM_STEPS) / _HEADROOM_STEPS)

    def out_of_sample_coverage(self, family: MemoryErrorFamily) -> float:
        """Share of a family's runs that the other sources' default headroom covers, macro-averaged over sources."""
        return fmean(self._source_coverage(family, source) for source in family.ratios_by_source)

    def _source_coverage(self, family: MemoryErrorFamily, source: str) -> float:
        others = MemoryErrorModel(tuple(other.without(source) for other in self.families))
        margin, ratios = 1.0 / (1.0 - others.default_headroom(min(family.frameworks))), family.ratios_by_source[source]
        return sum(ratio <= margin for ratio in ratios) / len(ratios)

    def _families_for(self, framework: str) -> Iterable[MemoryErrorFamily]:
        """The family of a framework, or all that have enough sources if it has none of its own."""
        families = [family for family in self.families if family.has_enough_sources]
        return [family for family in families if framework in family.frameworks] or families

    def _family_probability(self, family: MemoryErrorFamily, margin: float) -> float:
        shares = [*family.source_shares(margin), float(self._ratios[-1] <= margin * (1.0 + _ROUNDING))]
        runs = len(family.ratios)
        return min(fmean(shares), runs / (runs + 1))


def load_memory_error_model() -> MemoryErrorModel:
    """Read the packaged errors of memory predictions, topologies/uncertainty."""
    path = find_file("uncertainty", MEMORY_ERRORS)
    return _parse_model(path, read_text(path))


@lru_cache(maxsize=8)
def _parse_model(path: Path, text: str) -> MemoryErrorModel:
    """Parse the text of a file; cached, since every layout of a search needs it."""
    reader = MappingReader(path, parse_mapping(path, text))
    families = reader.get_section("families")
    model = MemoryErrorModel(tuple(_parse_family(name, families.get_section(name)) for name in families.key_names()))
    reader.get_text("description")
    reader.get_section("sources").get_text_mapping()
    reader.reject_unknown_keys()
    return model


def _parse_family(name: str, section: MappingReader) -> MemoryErrorFamily:
    ratios = section.get_section("ratios")
    section.get_float("coverage")
    ratios_by_source = {source: _parse_ratios(ratios, source) for source in ratios.key_names()}
    return MemoryErrorFamily(name, frozenset(section.get_text_list("frameworks")), ratios_by_source)


def _parse_ratios(section: MappingReader, source: str) -> tuple[float, ...]:
    items = section.get_items(source)
    ratios = tuple(items.get_float(key) for key in items.key_names())
    if not ratios or min(ratios) <= 0.0:
        raise section.input_error(source, "has to be a list of ratios above 0, one for each run")
    return ratios


def memory_errors_to_dict(model: MemoryErrorModel) -> dict[str, Any]:
    """Content of the model's file, without its texts."""
    return {
        "families": {
            family.name: {
                "frameworks": sorted(family.frameworks),
                "coverage": round(model.out_of_sample_coverage(family), 3),
                "ratios": {source: list(ratios) for source, ratios in family.ratios_by_source.items()},
            }
            for family in model.families
        }
    }


def fits_surely(probability: float) -> bool:
    """Whether the probability that a prediction fits is one to rely on: `SAFE_PROBABILITY` or more."""
    return probability >= SAFE_PROBABILITY


def fit_probability(framework: str, peak: Bytes, capacity: Bytes) -> float:
    """Probability that a run with this predicted peak fits, by the packaged errors."""
    return load_memory_error_model().fit_probability(framework, peak, capacity)


def default_headroom(framework: str) -> float:
    """The free share of a device at which a prediction is safe, by the packaged errors."""
    return _default_headroom(load_memory_error_model(), framework)


@lru_cache(maxsize=32)
def _default_headroom(model: MemoryErrorModel, framework: str) -> float:
    """Cached, since every layout of a search needs it and it takes 14 ms."""
    return model.default_headroom(framework)
