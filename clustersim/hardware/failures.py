"""What breaks, how often, what does that do to a job, and how long does it last?

A rate is so many events per second of each component of a kind. Components of a job: its GPUs, its nodes, their NICs,
the links of these to the first switch, those switches, its racks (NVLink domains of several nodes, or nodes in a rack),
and the job itself. Assumed: what breaks does so independently of all else, unless it takes a rack or all nodes at a
switch with it; a component that is put in for another is as good as that was when it was new; times are those of
components in use, so spares do not break.
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
    """What breaks; the value is what files call it."""

    GPU = "gpu"
    NODE = "node"
    NIC = "nic"
    LINK = "link"
    SWITCH = "switch"
    RACK = "rack"
    JOB = "job"


class FailureEffect(Enum):
    """What it does to the job.

    STOP: it ends. HANG: it stands still until a timeout. CORRUPT: it goes on with wrong numbers until that is found.
    SLOW: it goes on, slower. PLANNED: it is ended behind a checkpoint.
    """

    STOP = "stop"
    HANG = "hang"
    CORRUPT = "corrupt"
    SLOW = "slow"
    PLANNED = "planned"


class FailureDomain(Enum):
    """Which nodes are lost with it, until they are repaired."""

    NOTHING = "nothing"
    NODE = "node"
    RACK = "rack"
    LEAF = "leaf"


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Events per second of each component of a kind."""

    component: FailureComponent
    per_second: float


@dataclass(frozen=True)
class DurationDistribution:
    """How long something takes: always the median, or, where the mean is above it, lognormal."""

    median: Seconds
    mean: Seconds

    @classmethod
    def constant(cls, seconds: Seconds) -> "DurationDistribution":
        """The same each time."""
        return cls(seconds, seconds)

    @property
    def is_random(self) -> bool:
        """Whether it is not always the same."""
        return self.mean > self.median

    @cached_property
    def sigma(self) -> float:
        """Standard deviation of the logarithm: a lognormal mean is exp(sigma^2 / 2) medians."""
        return math.sqrt(2.0 * math.log(self.mean / self.median)) if self.is_random else 0.0

    def at_z_score(self, z_score: float) -> Seconds:
        """How long it takes so many standard deviations above the middle."""
        return self.median * math.exp(self.sigma * z_score) if self.mean > self.median else self.median


ZERO_DURATION: Final = DurationDistribution.constant(0.0)


@dataclass(frozen=True, slots=True)
class FailureSlowdown:
    """What is left of a part that is slow: of a GPU's speed, or of a NIC's bandwidth (`nic`)."""

    remaining_fraction: float
    affects_nic: bool = False


@dataclass(frozen=True, slots=True)
class FailureMode:
    """A kind of failure.

    rate: None where `trace` has the times, in seconds from its beginning, and `trace_duration`, how long it is; shape: of a
    Weibull distribution of the life of a component (1: exponential, a rate that does not depend on age); detection:
    until the job is known to have ended; found: until what is slow or wrong is noticed; repair: until lost nodes are
    spares; uncertain: its rate is of other clusters.
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
    """Read how often something happens to each component; raise InputError that names the value and an example.

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
    component = next((item for item in (component, component[:-1], component[:-2]) if item in components), component)
    if component not in components:
        raise InputError(
            f"{format_value(text)}: {component!r} is no component; {suggest_nearest(component, components)}"
        )
    if not 0.0 <= count < math.inf or not 0.0 < component_seconds < math.inf:
        raise InputError(f"{format_value(text)} is not a finite rate from zero up; write such as {RATE_EXAMPLE}")
    return FailureRate(components[component], count / component_seconds)


def parse_duration_distribution(value: object) -> DurationDistribution:
    """Read a duration, or the median and the mean of durations that differ; raise InputError.

    >>> parse_length({"median": "222 s", "mean": "2334 s"}).mean
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
