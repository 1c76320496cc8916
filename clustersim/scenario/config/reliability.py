"""What may a scenario file, or a preset, say of failures and of what is done about them?

What a scenario leaves out is its preset's, and what that leaves out is the typical one's, key by key.
"""

import csv
import math
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, cast

from pydantic import Field, ValidationError

from clustersim.common import data_files
from clustersim.common.errors import InputError, nearest, shown
from clustersim.common.units import Dimension, Seconds, parse_quantity
from clustersim.hardware.failures import (
    NO_TIME,
    Component,
    Effect,
    Failure,
    Length,
    Rate,
    Slower,
    Takes,
    parse_length,
    parse_rate,
)
from clustersim.scenario.config_reader import Duration, Name, Section, Size, member, mistake, quantity, reads, share
from clustersim.scenario.error_messages import refuse, translate
from clustersim.scenario.reliability import (
    TYPICAL,
    Checkpoints,
    Elastic,
    Interval,
    Maintenance,
    Reliability,
    Restart,
    Spares,
    Write,
)

MOST_NODES: Final = 2**20
MOST_SCALE: Final = 1e6
MOST_SPREAD: Final = 10.0
LEAST_SHAPE, MOST_SHAPE = 0.2, 10.0
BEST: Final = "best"
_TIMES: Final = {"time_s": 1.0, "time_h": 3600.0, "time_d": 86400.0}
S = TypeVar("S", bound=Section)


def _length(value: object) -> Length | None:
    if value is None or isinstance(value, Length):
        return value
    try:
        return parse_length(value)
    except InputError as error:
        raise mistake(str(error)) from error


def _rate(value: object) -> Rate | None:
    if value is None:
        return None
    try:
        return parse_rate(value)
    except InputError as error:
        raise mistake(str(error)) from error


def _interval(value: object) -> Interval | Seconds | None:
    words = {interval.value: interval for interval in Interval}
    if value is None or (isinstance(value, str) and value in words):
        return None if value is None else words[str(value)]
    try:
        seconds = parse_quantity(value, Dimension.TIME)
    except InputError as error:
        raise mistake(f"{error}, or one of {', '.join(words)}") from error
    if not 0.0 < seconds < math.inf:
        raise mistake(f"{shown(value)} is not a finite time above zero; write such as 30 min, or {', '.join(words)}")
    return seconds


def _bandwidth(value: object) -> float | None:
    if value is None:
        return None
    try:
        rate = parse_quantity(value, Dimension.BANDWIDTH)
    except InputError as error:
        raise mistake(str(error)) from error
    if not 0.0 < rate < math.inf:
        raise mistake(f"{shown(value)} is not a finite bandwidth above zero; write such as 200 GB/s")
    return rate


def _nodes(value: object) -> object:
    if value is None or value == BEST:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_NODES:
        raise mistake(f"{shown(value)} is not a number of nodes from 0 to {MOST_NODES:,}, or {BEST}")
    return value


_Length = Annotated[
    Length | None, reads(_length, "a time with its unit; lognormal: {median: 2 h, mean: 20 h}", "5 min")
]
_Bandwidth = Annotated[float | None, reads(_bandwidth, quantity(Dimension.BANDWIDTH), "200 GB/s")]
_Share = Annotated[float | None, share(0.001, 1.0)]


_RATES: Final = f"events of each component ({', '.join(component.value for component in Component)}) per time"
_RATE_EXAMPLES: Final = ("6.5 per 1000 node-days", "148 in 54 days of 16384 gpus", "0.06 % per link-month")
_INTERVALS: Final = ", ".join(item.value for item in Interval)


class FailureSection(Section):
    """An entry of `reliability.failures`: how often, what it does to the job, which nodes it takes, how long for."""

    example: ClassVar[str] = "{rate: 6.5 per 1000 node-days, detection: 1 min}"
    rate: Annotated[Rate | None, reads(_rate, _RATES, *_RATE_EXAMPLES)] = None
    """events by component and time; left out: the preset's, or trace"""
    trace: Name | None = None
    """a CSV of times (a column time_s, time_h or time_d) in place of a rate; left out: none"""
    effect: Annotated[Effect | None, member(Effect)] = None
    """what it does to the job; corrupt: silent, found later; planned: behind a checkpoint; left out: stop"""
    takes: Annotated[Takes | None, member(Takes)] = None
    """what must be replaced; left out: node"""
    shape: Annotated[float | None, Field(ge=LEAST_SHAPE, le=MOST_SHAPE, strict=False)] = None
    """of a Weibull distribution; left out: 1, exponential"""
    detection: _Length = None
    """until it is noticed; left out: that of all failures"""
    found: _Length = None
    """until what is slow or corrupt is noticed; left out: needed there"""
    repair: _Length = None
    """until its nodes are whole again; left out: that of all failures"""
    gpu: _Share = None
    """what is left of a slow GPU's speed; left out: none is slow"""
    nic: _Share = None
    """what is left of a slow NIC's bandwidth; left out: none is slow"""

    def failure(self, name: str, base: Path, others: "ReliabilitySection", scale: float | None) -> Failure:
        """The same as the inside knows it; raise InputError for what does not go together.

        others: has the lengths of failures that say none; scale: times the rate, None: of one that is the scenario's.
        """
        if (self.rate is None) == (self.trace is None):
            raise InputError("needs a rate or a trace, and not both")
        effect = self.effect or Effect.STOP
        if (effect is Effect.SLOW) != (self.gpu is not None or self.nic is not None):
            raise InputError("gpu or nic says what is left of a part that is slow (effect: slow), and of no other")
        if self.gpu is not None and self.nic is not None:
            raise InputError("is of a gpu or of a nic; make two entries of it")
        if effect in {Effect.SLOW, Effect.CORRUPT} and self.found is None:
            raise InputError("found is missing: how long it takes until it is noticed, such as 2 h")
        times, ends = ((), 0.0) if self.trace is None else read_trace(data_files.beside(base, self.trace))
        left = self.gpu or self.nic
        rate = self.rate or Rate(Component.JOB, len(times) / ends)
        return Failure(
            name=name,
            rate=rate if scale is None else Rate(rate.component, scale * rate.per_second),
            effect=effect,
            takes=self.takes or (Takes.NOTHING if effect is Effect.PLANNED else Takes.NODE),
            shape=1.0 if self.shape is None else self.shape,
            trace=times,
            trace_ends=ends,
            detection=self.detection or (others.timeout if effect is Effect.HANG else others.detection) or NO_TIME,
            found=self.found or NO_TIME,
            repair=self.repair or others.repair or NO_TIME,
            slower=None if left is None else Slower(left, nic=self.nic is not None),
            uncertain=scale is not None,
        )


class RestartSection(Section):
    """`reliability.restart`: what every restart takes, one behind the other."""

    diagnosis: _Length = None
    """until the cause is known; left out: the preset's"""
    drain: _Length = None
    """until the old processes are gone; left out: the preset's"""
    schedule: _Length = None
    """until the scheduler has placed the job; left out: the preset's"""
    image: _Length = None
    """until the container is there; left out: the preset's"""
    init: _Length = None
    """of processes and communicators; left out: the preset's"""
    init_per_rank: Duration | None = None
    """the same, for each rank; left out: the preset's"""
    load: _Length = None
    """of the checkpoint; left out: its bytes over read_bandwidth"""
    warmup: _Length = None
    """until steps are at full speed; left out: the preset's"""
    only_failed: bool | None = None
    """with a spare at hand nothing else is scheduled or started anew; left out: the preset's"""

    def restart(self) -> Restart:
        """The same as the inside knows it."""
        return Restart(**_said(self))


class CheckpointSection(Section):
    """`reliability.checkpoint`: how the state is kept; a bare word or duration is the interval."""

    short: ClassVar[str | None] = "interval"
    write: Annotated[Write | None, member(Write)] = None
    """beside nothing, beside steps, or into another node's memory; left out: the preset's"""
    interval: Annotated[
        Interval | float | None, reads(_interval, f"a time with its unit, or {_INTERVALS}", "30 min")
    ] = None
    """a time, or how it is found; left out: the preset's"""
    size: Size | None = None
    """of the whole job's state; left out: trained weights, master weights and moments"""
    bandwidth: _Bandwidth = None
    """of storage, writing; left out: the preset's"""
    read_bandwidth: _Bandwidth = None
    """of storage, reading; left out: the preset's"""
    bandwidth_per_node: _Bandwidth = None
    """that a node reaches at most; left out: no limit"""
    overhead: Duration | None = None
    """of each checkpoint; left out: the preset's"""
    snapshot: Duration | None = None
    """until the state is copied on the device's side; left out: the preset's"""
    interference: Annotated[float | None, share(0.0, 0.99)] = None
    """part by which steps take longer beside a checkpoint; left out: the preset's"""
    stored_every: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    """with peers: each so-manieth goes to storage, too; left out: the preset's"""

    def checkpoints(self) -> Checkpoints:
        """The same as the inside knows it; raise InputError where a bandwidth is missing."""
        said = _said(self)
        for key in ("bandwidth", "read_bandwidth"):
            if key not in said:
                raise InputError(f"checkpoint.{key} is missing; write such as 200 GB/s")
        said["per_node"] = said.pop("bandwidth_per_node", None)
        return Checkpoints(**said)


class MaintenanceSection(Section):
    """`reliability.maintenance`: how often the whole cluster is down on purpose, and for how long; or `none`."""

    example: ClassVar[str] = "{every: 30 d, lasts: 4 h}"
    every: Duration
    """time between two"""
    lasts: Duration
    """of one"""

    def maintenance(self) -> Maintenance:
        """The same as the inside knows it."""
        if self.every <= self.lasts:
            raise InputError("maintenance: every is not longer than it lasts")
        return Maintenance(self.every, self.lasts)


class SparesSection(Section):
    """`reliability.spares`: nodes that stand by; a bare number, or `best`, is those for any place."""

    short: ClassVar[str | None] = "nodes"
    nodes: Annotated[int | Literal["best"] | None, reads(_nodes, f"0 to {MOST_NODES:,}, or {BEST}")] = None
    """that stand by for any place, or best: as many as are worth it; left out: best"""
    per_rack: Annotated[int | None, Field(ge=0, le=MOST_NODES)] = None
    """that stand by for their rack; left out: 0"""

    def spares(self) -> Spares:
        """The same as the inside knows it."""
        return Spares(None if self.nodes == "best" else self.nodes, self.per_rack or 0)


_Maintained = MaintenanceSection | Literal["none"] | None


def _maintenance(value: object) -> object:
    """The word `none` is a cluster that is never down on purpose, unlike nothing, which is the preset's."""
    return False if value == "none" else value


class ReliabilitySection(Section):
    """`reliability`: what breaks, how often, and what is done about it; a bare word is a preset. It moves no step."""

    short: ClassVar[str | None] = "preset"
    preset: Name | None = None
    """a file of topologies/reliability; left out: typical"""
    failures: dict[str, FailureSection | None] = Field({}, examples=["{gpu: {rate: 0.2 per 1000 gpu-days}}"])
    """over the preset's, by name; null leaves one out; left out: the preset's"""
    rates: Annotated[float | None, Field(ge=0.0, le=MOST_SCALE, strict=False)] = None
    """times all rates; left out: 1"""
    spread: Annotated[float | None, Field(ge=1.0, le=MOST_SPREAD, strict=False)] = None
    """geometric standard deviation of what a preset's rates are elsewhere, drawn for each run; left out: the
    preset's"""
    detection: _Length = None
    """of failures that do not say their own; left out: the preset's"""
    timeout: _Length = None
    """of failures that hang; left out: the preset's"""
    repair: _Length = None
    """of nodes; left out: the preset's"""
    restart: RestartSection = RestartSection()
    """what every restart takes, one behind the other"""
    checkpoint: CheckpointSection = CheckpointSection()
    """how the state is kept"""
    spares: SparesSection = SparesSection()
    """nodes that stand by"""
    elastic: Annotated[Elastic | None, member(Elastic)] = None
    """without a spare: wait for repair, or go on with fewer replicas, which do more microbatches or a smaller batch;
    left out: wait"""
    rack: Annotated[int | None, Field(ge=1, le=MOST_NODES)] = None
    """nodes of one; left out: those of an NVLink domain, or 4"""
    quarantine: bool | None = None
    """a node with a slow part is replaced when that is found; left out: true"""
    crews: Annotated[int | None, Field(ge=1, le=MOST_NODES)] = None
    """nodes that are repaired at a time; left out: all"""
    maintenance: Annotated[
        MaintenanceSection | bool | None, reads(_maintenance, "a mapping, or none", of=_Maintained)
    ] = None
    """of the whole cluster, or none; left out: the preset's"""

    def settings(self, base: Path) -> Reliability:
        """The settings with those of the preset; raise InputError, whose sentence begins with a key of the section."""
        name = self.preset or TYPICAL
        try:
            preset = _preset(_place(name, base))
            if not self.model_fields_set - {"preset"}:
                return load_reliability(_place(name, base))
        except InputError as error:
            raise InputError(f"preset: {error}") from error
        return _settings(name, _over(preset.model_copy(update={"rates": None}), self), base, preset, self.failures)


class PresetSection(ReliabilitySection):
    """A file of `topologies/reliability`. sources: of each value, by its dotted key."""

    short: ClassVar[str | None] = None
    description: Name = Field(examples=["Failures of a cluster"])
    """what it is"""
    sources: dict[str, str] = Field({})
    """of each value, by its dotted key"""


@cache
def load_reliability(name_or_path: str) -> Reliability:
    """Read topologies/reliability/NAME.yaml or a file of the same form, over the typical one; raise InputError."""
    preset = _preset(name_or_path)
    said = preset.model_copy(update={"rates": None})
    return _settings(name_or_path, said, Path(name_or_path).parent, preset, {})


def _place(name: str, base: Path) -> str:
    return str(data_files.beside(base, name)) if data_files.is_path(name) else name


@cache
def _preset(name: str) -> PresetSection:
    path = data_files.find("reliability", name)
    content = data_files.read_mapping(path)
    try:
        found = PresetSection.model_validate(content)
    except ValidationError as error:
        raise refuse(data_files.described(path), translate(error, PresetSection, content)) from None
    if name == TYPICAL:
        return found
    if found.preset not in {None, TYPICAL}:
        raise InputError(f"{data_files.described(path)}: preset: only {TYPICAL} is below a preset")
    below = _preset(TYPICAL)
    # causes of one cluster are not added to those of another: a cluster that lists its own has no others
    below = below.model_copy(update={"failures": {}, "rates": None}) if found.failures else below
    return _over(below, found)


def _over(below: S, above: Section) -> S:
    """What is said above, and what is said below where nothing is."""
    update: dict[str, Any] = {}
    for name in above.model_fields_set & set(type(below).model_fields):
        own, under = getattr(above, name), getattr(below, name)
        if isinstance(own, Section) and isinstance(under, Section):
            update[name] = _over(under, own)
        elif name == "failures":
            update[name] = _failures(under, own)
        elif own is not None:
            update[name] = own
    return below.model_copy(update=update)


def _failures(below: dict[str, FailureSection | None], above: dict[str, FailureSection | None]) -> dict[str, Any]:
    """Entries by name, each over the one below it; a rate replaces a trace, and a trace a rate."""
    found = dict(below)
    for name, own in above.items():
        under = found.get(name)
        if own is None and under is None:
            raise InputError(f"failures.{name}: there is none to leave out; {nearest(name, below)}")
        if own is None or under is None:
            found[name] = own
            continue
        other = {"rate": "trace", "trace": "rate"}
        replaced = [other[key] for key in own.model_fields_set & set(other)]
        found[name] = _over(under.model_copy(update=dict.fromkeys(replaced)), own)
    return found


def _settings(
    name: str,
    said: ReliabilitySection,
    base: Path,
    preset: PresetSection,
    own: dict[str, FailureSection | None],
) -> Reliability:
    """What is said over a preset, whose rates are times its `rates`. own: failures of which the scenario says some."""
    failures = []
    known = {cause for cause, entry in own.items() if entry is not None and (entry.rate or entry.trace)}
    of_preset = 1.0 if preset.rates is None else float(preset.rates)
    for cause, entry in said.failures.items():
        if entry is not None:
            try:
                failures.append(entry.failure(cause, base, said, None if cause in known else of_preset))
            except InputError as error:
                raise InputError(f"failures.{cause}: {error}") from error
    maintenance = said.maintenance
    return Reliability(
        preset=name,
        description=preset.description,
        failures=tuple(failures),
        scale=1.0 if said.rates is None else float(said.rates),
        spread=1.0 if said.spread is None else float(said.spread),
        restart=said.restart.restart(),
        checkpoint=said.checkpoint.checkpoints(),
        spares=said.spares.spares(),
        elastic=said.elastic or Elastic.WAIT,
        rack=said.rack,
        quarantine=said.quarantine is not False,
        crews=said.crews,
        maintenance=maintenance.maintenance() if isinstance(maintenance, MaintenanceSection) else None,
        sources=preset.sources,
    )


def _said(section: Section) -> dict[str, Any]:
    """The values that are there."""
    found = {name: getattr(section, name) for name in type(section).model_fields}
    return {name: value for name, value in found.items() if value is not None}


def read_trace(path: Path) -> tuple[tuple[Seconds, ...], Seconds]:
    """Times of failures in a CSV file, and how long it is: its last line but for one may be `end`.

    A column says the unit: time_s, time_h or time_d; a second one, `what`, may say `end` in the last line, which is no
    failure. Raises InputError that names the file and the line.
    """
    rows = list(csv.DictReader(data_files.read_text(path).splitlines()))
    columns = set(rows[0]) if rows else set()
    named = [column for column in _TIMES if column in columns]
    if len(named) != 1:
        raise InputError(f"{path}: needs rows, and one column of times that says its unit: {', '.join(_TIMES)}")
    times: list[Seconds] = []
    for line, row in enumerate(rows, 2):
        times.append(_row_time(path, line, row[named[0]], _TIMES[named[0]]))
        if len(times) > 1 and times[-1] < times[-2]:
            raise InputError(f"{path}, line {line}: {row[named[0]]} comes after a later time; sort the rows by time")
    ends = times[-1]
    if (rows[-1].get("what") or "").strip() == "end":
        times.pop()
    if ends <= 0.0 or not times:
        raise InputError(f"{path}: has no failure after its beginning")
    return tuple(times), ends


def _row_time(path: Path, line: int, text: str | None, factor: float) -> Seconds:
    try:
        time = float(cast("str", text)) * factor
    except (TypeError, ValueError):
        time = math.nan
    if not 0.0 <= time < math.inf:
        raise InputError(f"{path}, line {line}: {shown(text)} is no time from zero up")
    return time
