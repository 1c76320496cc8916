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

from clustersim.common.errors import InputError, nearest, shown
from clustersim.common.units import Dimension, Seconds, parse_quantity

_SECONDS: Final = {"hour": 3600.0, "day": 86400.0, "week": 604800.0, "month": 2629800.0, "year": 31557600.0}
_MANY: Final = {"": 1.0, "thousand": 1e3, "million": 1e6, "billion": 1e9}
_NUMBER: Final = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
_PER: Final = re.compile(
    rf"\s*{_NUMBER}\s*(%?)\s*(?:per|/)\s*(?:{_NUMBER}|(thousand|million|billion))?\s*([a-z]+)-([a-z]+?)s?\s*$"
)
_COUNTED: Final = re.compile(rf"\s*{_NUMBER}\s+in\s+{_NUMBER}\s*([a-z]+?)s?\s+of\s+{_NUMBER}\s+([a-z]+)\s*$")
_SHORT: Final = {"h": "hour", "d": "day", "w": "week"}
RATE_EXAMPLE: Final = "'6.5 per 1000 node-days' or '148 in 54 days of 16384 gpus'"


class Component(Enum):
    """What breaks; the value is what files call it."""

    GPU = "gpu"
    NODE = "node"
    NIC = "nic"
    LINK = "link"
    SWITCH = "switch"
    RACK = "rack"
    JOB = "job"


class Effect(Enum):
    """What it does to the job.

    STOP: it ends. HANG: it stands still until a timeout. CORRUPT: it goes on with wrong numbers until that is found.
    SLOW: it goes on, slower. PLANNED: it is ended behind a checkpoint.
    """

    STOP = "stop"
    HANG = "hang"
    CORRUPT = "corrupt"
    SLOW = "slow"
    PLANNED = "planned"


class Takes(Enum):
    """Which nodes are lost with it, until they are repaired."""

    NOTHING = "nothing"
    NODE = "node"
    RACK = "rack"
    LEAF = "leaf"


@dataclass(frozen=True, slots=True)
class Rate:
    """Events per second of each component of a kind."""

    component: Component
    per_second: float


@dataclass(frozen=True)
class Length:
    """How long something takes: always the median, or, where the mean is above it, lognormal."""

    median: Seconds
    mean: Seconds

    @classmethod
    def always(cls, seconds: Seconds) -> "Length":
        """The same each time."""
        return cls(seconds, seconds)

    @property
    def varies(self) -> bool:
        """Whether it is not always the same."""
        return self.mean > self.median

    @cached_property
    def sigma(self) -> float:
        """Standard deviation of the logarithm: a lognormal mean is exp(sigma^2 / 2) medians."""
        return math.sqrt(2.0 * math.log(self.mean / self.median)) if self.varies else 0.0

    def at(self, deviation: float) -> Seconds:
        """How long it takes so many standard deviations above the middle."""
        return self.median * math.exp(self.sigma * deviation) if self.mean > self.median else self.median


NO_TIME: Final = Length.always(0.0)


@dataclass(frozen=True, slots=True)
class Slower:
    """What is left of a part that is slow: of a GPU's speed, or of a NIC's bandwidth (`nic`)."""

    left: float
    nic: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A kind of failure.

    rate: None where `trace` has the times, in seconds from its beginning, and `trace_ends`, how long it is; shape: of a
    Weibull distribution of the life of a component (1: exponential, a rate that does not depend on age); detection:
    until the job is known to have ended; found: until what is slow or wrong is noticed; repair: until lost nodes are
    spares; uncertain: its rate is of other clusters.
    """

    name: str
    rate: Rate
    effect: Effect = Effect.STOP
    takes: Takes = Takes.NODE
    shape: float = 1.0
    trace: tuple[Seconds, ...] = ()
    trace_ends: Seconds = 0.0
    detection: Length = NO_TIME
    found: Length = NO_TIME
    repair: Length = NO_TIME
    slower: Slower | None = None
    uncertain: bool = False


def parse_rate(text: object) -> Rate:
    """Read how often something happens to each component; raise InputError that names the value and an example.

    >>> round(86400.0 * parse_rate("6.5 per 1000 node-days").per_second, 9)
    0.0065
    >>> round(54 * 86400.0 * 16384 * parse_rate("148 in 54 days of 16384 gpus").per_second, 9)
    148.0
    """
    if not isinstance(text, str):
        raise InputError(f"{shown(text)} has no unit; a rate is a text such as {RATE_EXAMPLE}")
    if match := _COUNTED.match(text):
        count, length, unit, number, component = match.groups()
        over = float(length) * _time(text, unit) * float(number)
        return _rate(text, component, float(count), over)
    if match := _PER.match(text):
        count, percent, many, word, component, unit = match.groups()
        over = (float(many) if many else _MANY[word or ""]) * _time(text, unit)
        return _rate(text, component, float(count) * (0.01 if percent else 1.0), over)
    raise InputError(f"{shown(text)} is not a rate; write such as {RATE_EXAMPLE}")


def _time(text: str, unit: str) -> float:
    full = _SHORT.get(unit, unit)
    if full not in _SECONDS:
        raise InputError(f"{shown(text)} has unit {unit!r}, which is no time; {nearest(unit, _SECONDS)}")
    return _SECONDS[full]


def _rate(text: str, component: str, count: float, over: float) -> Rate:
    named = {item.value: item for item in Component}
    component = next(
        (element for element in (component, component[:-1], component[:-2]) if element in named), component
    )
    if component not in named:
        raise InputError(f"{shown(text)}: {component!r} is no component; {nearest(component, named)}")
    if not 0.0 <= count < math.inf or not 0.0 < over < math.inf:
        raise InputError(f"{shown(text)} is not a finite rate from zero up; write such as {RATE_EXAMPLE}")
    return Rate(named[component], count / over)


def parse_length(value: object) -> Length:
    """Read a duration, or the median and the mean of durations that differ; raise InputError.

    >>> parse_length({"median": "222 s", "mean": "2334 s"}).mean
    2334.0
    """
    if not isinstance(value, dict):
        return Length.always(_seconds(value))
    if sorted(value) != ["mean", "median"]:
        raise InputError(f"{shown(value)} is not a duration; write such as 5 min, or {{median: 222 s, mean: 2334 s}}")
    found = Length(_seconds(value["median"]), _seconds(value["mean"]))
    if found.mean < found.median or (found.median == 0.0 and found.mean > 0.0):
        raise InputError(f"{shown(value)}: the mean of a lognormal duration is not below its median, which is above 0")
    return found


def _seconds(value: object) -> Seconds:
    seconds = parse_quantity(value, Dimension.TIME)
    if not 0.0 <= seconds < math.inf:
        raise InputError(f"{shown(value)} is {'below zero' if seconds < 0.0 else 'not finite'}; write such as 5 min")
    return seconds
