"""Failure modes: what fails, how often, what that does to a job, and how long it lasts.

A rate is events per second per component of a kind. Components of a job: its GPUs, its nodes, their NICs, the
links from these to the first switch, those switches, its racks (NVLink domains of several nodes, or nodes in
a rack), its sites (data centres) and the links between them (wan), and the job itself. Assumed: failures are
independent, except that one can take down a rack, all nodes at a switch, or a site; a link between sites that is down
cuts one of its sites off; a replaced component is as good as new; rates are per time in use, so spares do not fail.
"""

import math
import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.common.units import Dimension, Seconds, parse_quantity

_UNIT_SECONDS: Final = {"hour": 3600.0, "day": 86400.0, "week": 604800.0, "month": 2629800.0, "year": 31557600.0}
_MULTIPLIERS: Final = {"": 1.0, "thousand": 1e3, "million": 1e6, "billion": 1e9}
_NUMBER_PATTERN: Final = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
_RATE_PER_TIME: Final = re.compile(
    rf"\s*{_NUMBER_PATTERN}\s*(%?)\s*(?:per|/)\s*(?:{_NUMBER_PATTERN}|(thousand|million|billion))?\s*([a-z]+)-([a-z]+?)s?\s*$"
)
_COUNT_IN_PERIOD: Final = re.compile(
    rf"\s*{_NUMBER_PATTERN}\s+in\s+{_NUMBER_PATTERN}\s*([a-z]+?)s?\s+of\s+{_NUMBER_PATTERN}\s+([a-z]+)\s*$"
)
_UNIT_ABBREVIATIONS: Final = {"h": "hour", "d": "day", "w": "week"}
RATE_EXAMPLE: Final = "'6.5 per 1000 node-days' or '148 in 54 days of 16384 gpus'"


class FailureComponent(Enum):
    """What fails; the value is its name in files."""

    GPU = "gpu"
    NODE = "node"
    NIC = "nic"
    LINK = "link"
    SWITCH = "switch"
    RACK = "rack"
    SITE = "site"
    WAN = "wan"
    JOB = "job"


class FailureEffect(Enum):
    """Effect on the job.

    STOP: it terminates. HANG: it stalls until a timeout. CORRUPT: it continues with wrong numbers until detected.
    SLOW: it continues, slower. PLANNED: it is stopped after a checkpoint.
    """

    STOP = "stop"
    HANG = "hang"
    CORRUPT = "corrupt"
    SLOW = "slow"
    PLANNED = "planned"


class FailureDomain(Enum):
    """Which nodes are lost with the component until repaired."""

    NOTHING = "nothing"
    NODE = "node"
    RACK = "rack"
    LEAF = "leaf"
    SITE = "site"


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Events per second of each component of a kind."""

    component: FailureComponent
    per_second: float


@dataclass(frozen=True)
class DurationDistribution:
    """Distribution of a duration: constant, or lognormal where the mean exceeds the median; seconds."""

    median: Seconds
    mean: Seconds

    @classmethod
    def constant(cls, seconds: Seconds) -> "DurationDistribution":
        """A constant duration."""
        return cls(seconds, seconds)

    @property
    def is_random(self) -> bool:
        """Whether it is not constant."""
        return self.mean > self.median

    @cached_property
    def sigma(self) -> float:
        """Standard deviation of the logarithm: a lognormal mean is exp(sigma^2 / 2) medians."""
        return math.sqrt(2.0 * math.log(self.mean / self.median)) if self.is_random else 0.0

    def at_z_score(self, z_score: float) -> Seconds:
        """The duration at a number of standard deviations (of the logarithm) above the median."""
        return self.median * math.exp(self.sigma * z_score) if self.mean > self.median else self.median


ZERO_DURATION: Final = DurationDistribution.constant(0.0)


@dataclass(frozen=True, slots=True)
class FailureSlowdown:
    """Remaining fraction of a GPU's speed, or of a NIC's bandwidth (`affects_nic`)."""

    remaining_fraction: float
    affects_nic: bool = False


@dataclass(frozen=True, slots=True)
class FailureMode:
    """A kind of failure.

    rate: None where `event_times` has the times, in seconds from the start of the trace, and `trace_duration` its
    length; weibull_shape: of the lifetime of a component (1: exponential, a rate independent of age);
    detection_time: until the termination of the job is detected; discovery_time: until slowness or corruption is
    noticed; repair_time: until lost nodes are spares again; is_rate_uncertain: its rate comes from other
    clusters.
    """

    name: str
    rate: FailureRate
    effect: FailureEffect = FailureEffect.STOP
    failure_domain: FailureDomain = FailureDomain.NODE
    weibull_shape: float = 1.0
    event_times: tuple[Seconds, ...] = ()
    trace_duration: Seconds = 0.0
    detection_time: DurationDistribution = ZERO_DURATION
    discovery_time: DurationDistribution = ZERO_DURATION
    repair_time: DurationDistribution = ZERO_DURATION
    slowdown: FailureSlowdown | None = None
    is_rate_uncertain: bool = False


def parse_rate(text: object) -> FailureRate:
    """Parse a failure rate per component; raise InputError that names the value and an example.

    >>> round(86400.0 * parse_rate("6.5 per 1000 node-days").per_second, 9)
    0.0065
    >>> round(54 * 86400.0 * 16384 * parse_rate("148 in 54 days of 16384 gpus").per_second, 9)
    148.0
    """
    if not isinstance(text, str):
        raise InputError(f"{format_value(text)} has no unit; a rate is a text such as {RATE_EXAMPLE}")
    if match := _COUNT_IN_PERIOD.match(text):
        count, length, unit, component_count, component = match.groups()
        component_seconds = float(length) * _unit_seconds(text, unit) * float(component_count)
        return _build_rate(text, component, float(count), component_seconds)
    if match := _RATE_PER_TIME.match(text):
        count, percent, multiplier, multiplier_word, component, unit = match.groups()
        component_seconds = (float(multiplier) if multiplier else _MULTIPLIERS[multiplier_word or ""]) * _unit_seconds(
            text, unit
        )
        return _build_rate(text, component, float(count) * (0.01 if percent else 1.0), component_seconds)
    raise InputError(f"{format_value(text)} is not a rate; write such as {RATE_EXAMPLE}")


def _unit_seconds(text: str, unit: str) -> float:
    unit_name = _UNIT_ABBREVIATIONS.get(unit, unit)
    if unit_name not in _UNIT_SECONDS:
        raise InputError(
            f"{format_value(text)} has unit {unit!r}, which is no time; {suggest_nearest(unit, _UNIT_SECONDS)}"
        )
    return _UNIT_SECONDS[unit_name]


def _build_rate(text: str, component: str, count: float, component_seconds: float) -> FailureRate:
    components = {failure_component.value: failure_component for failure_component in FailureComponent}
    component = next((name for name in (component, component[:-1], component[:-2]) if name in components), component)
    if component not in components:
        raise InputError(
            f"{format_value(text)}: {component!r} is no component; {suggest_nearest(component, components)}"
        )
    if not 0.0 <= count < math.inf or not 0.0 < component_seconds < math.inf:
        raise InputError(f"{format_value(text)} is not a finite rate from zero up; write such as {RATE_EXAMPLE}")
    return FailureRate(components[component], count / component_seconds)


def parse_duration_distribution(value: object) -> DurationDistribution:
    """Parse a duration, or the median and mean of random durations; raise InputError.

    >>> parse_duration_distribution({"median": "222 s", "mean": "2334 s"}).mean
    2334.0
    """
    if not isinstance(value, dict):
        return DurationDistribution.constant(_parse_seconds(value))
    if sorted(value) != ["mean", "median"]:
        raise InputError(
            f"{format_value(value)} is not a duration; write such as 5 min, or {{median: 222 s, mean: 2334 s}}"
        )
    distribution = DurationDistribution(_parse_seconds(value["median"]), _parse_seconds(value["mean"]))
    if distribution.mean < distribution.median or (distribution.median == 0.0 and distribution.mean > 0.0):
        raise InputError(
            f"{format_value(value)}: the mean of a lognormal duration is not below its median, which is above 0"
        )
    return distribution


def _parse_seconds(value: object) -> Seconds:
    seconds = parse_quantity(value, Dimension.TIME)
    if not 0.0 <= seconds < math.inf:
        raise InputError(
            f"{format_value(value)} is {'below zero' if seconds < 0.0 else 'not finite'}; write such as 5 min"
        )
    return seconds
