"""What may a scenario file, or a preset, say about failures and recovery?

Values merge key by key: the scenario's override its preset's, which override the default preset's.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, cast

from pydantic import Field, ValidationError

from clustersim.common import data_files
from clustersim.common.errors import InputError, combined_error, format_value, suggest_nearest
from clustersim.common.input_files import NUMBER_ALPHABET, parse_table, quote_cell
from clustersim.common.units import Dimension, Seconds, parse_quantity
from clustersim.hardware.failures import (
    ZERO_DURATION,
    DurationDistribution,
    FailureComponent,
    FailureDomain,
    FailureEffect,
    FailureMode,
    FailureRate,
    FailureSlowdown,
    parse_duration_distribution,
    parse_rate,
)
from clustersim.scenario.config_reader import (
    ConfigModel,
    Duration,
    NonEmptyText,
    SizeBytes,
    config_error,
    enum_parser,
    fraction_parser,
    quantity_label,
    value_parser,
)
from clustersim.scenario.reliability import (
    DEFAULT_PRESET,
    CheckpointIntervalRule,
    CheckpointPolicy,
    CheckpointWrite,
    ElasticPolicy,
    MaintenanceWindow,
    ReliabilityModel,
    RestartTimes,
    SparePool,
)

MAX_NODES: Final = 2**20
MAX_SCALE: Final = 1e6
MAX_SPREAD: Final = 10.0
MIN_SHAPE, MAX_SHAPE = 0.2, 10.0
BEST_WORD: Final = "best"
_SECONDS_PER_COLUMN_UNIT: Final = {"time_s": 1.0, "time_h": 3600.0, "time_d": 86400.0}
ConfigT = TypeVar("ConfigT", bound=ConfigModel)


def _parse_length(value: object) -> DurationDistribution | None:
    if value is None or isinstance(value, DurationDistribution):
        return value
    try:
        return parse_duration_distribution(value)
    except InputError as error:
        raise config_error(str(error)) from error


def _parse_rate(value: object) -> FailureRate | None:
    if value is None:
        return None
    try:
        return parse_rate(value)
    except InputError as error:
        raise config_error(str(error)) from error


def _parse_interval(value: object) -> CheckpointIntervalRule | Seconds | None:
    rules_by_name = {
        checkpoint_interval_rule.value: checkpoint_interval_rule for checkpoint_interval_rule in CheckpointIntervalRule
    }
    if value is None or (isinstance(value, str) and value in rules_by_name):
        return None if value is None else rules_by_name[str(value)]
    try:
        seconds = parse_quantity(value, Dimension.TIME)
    except InputError as error:
        raise config_error(f"{error}, or one of {', '.join(rules_by_name)}") from error
    if not 0.0 < seconds < math.inf:
        raise config_error(
            f"{format_value(value)} is not a finite time above zero; write such as 30 min, or "
            f"{', '.join(rules_by_name)}"
        )
    return seconds


def _parse_bandwidth(value: object) -> float | None:
    if value is None:
        return None
    try:
        rate = parse_quantity(value, Dimension.BANDWIDTH)
    except InputError as error:
        raise config_error(str(error)) from error
    if not 0.0 < rate < math.inf:
        raise config_error(f"{format_value(value)} is not a finite bandwidth above zero; write such as 200 GB/s")
    return rate


def _parse_spare_nodes(value: object) -> object:
    if value is None or value == BEST_WORD:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NODES:
        raise config_error(f"{format_value(value)} is not a number of nodes from 0 to {MAX_NODES:,}, or {BEST_WORD}")
    return value


_DurationDistribution = Annotated[
    DurationDistribution | None,
    value_parser(_parse_length, "a time with its unit; lognormal: {median: 2 h, mean: 20 h}", "5 min"),
]
_Bandwidth = Annotated[float | None, value_parser(_parse_bandwidth, quantity_label(Dimension.BANDWIDTH), "200 GB/s")]
_RemainingFraction = Annotated[float | None, fraction_parser(0.001, 1.0)]


_RATE_DESCRIPTION: Final = (
    "events of each component "
    f"({', '.join(failure_component.value for failure_component in FailureComponent)}) per time"
)
_RATE_EXAMPLES: Final = ("6.5 per 1000 node-days", "148 in 54 days of 16384 gpus", "0.06 % per link-month")
_INTERVAL_NAMES: Final = ", ".join(rule.value for rule in CheckpointIntervalRule)


class FailureConfig(ConfigModel):
    """An entry of `reliability.failures`: rate, effect on the job, affected nodes, and detection and repair times."""

    example: ClassVar[str] = "{rate: 6.5 per 1000 node-days, detection: 1 min}"
    rate: Annotated[FailureRate | None, value_parser(_parse_rate, _RATE_DESCRIPTION, *_RATE_EXAMPLES)] = None
    """failures per component and time; left out: the preset's, or trace"""
    trace: NonEmptyText | None = None
    """a CSV of failure times (a column time_s, time_h or time_d) instead of a rate; left out: none"""
    effect: Annotated[FailureEffect | None, enum_parser(FailureEffect)] = None
    """effect on the job; corrupt: silent, detected later; planned: after a checkpoint; left out: stop"""
    failure_domain: Annotated[FailureDomain | None, enum_parser(FailureDomain)] = None
    """what must be replaced; left out: node"""
    shape: Annotated[float | None, Field(ge=MIN_SHAPE, le=MAX_SHAPE, strict=False)] = None
    """Weibull shape of the times between failures; left out: 1, exponential"""
    detection: _DurationDistribution = None
    """time to detection; left out: that of all failures"""
    latent_detection: _DurationDistribution = None
    """time to detection of slow or corrupt components; left out: needed for those"""
    repair: _DurationDistribution = None
    """time to repair of its nodes; left out: that of all failures"""
    gpu: _RemainingFraction = None
    """remaining fraction of a slow GPU's speed; left out: none is slow"""
    nic: _RemainingFraction = None
    """remaining fraction of a slow NIC's bandwidth; left out: none is slow"""

    def failure(
        self, name: str, base_dir: Path, defaults: "ReliabilityConfig", rate_factor: float | None
    ) -> FailureMode:
        """The failure as the simulator represents it; raises InputError for keys that exclude each other.

        defaults: durations for failures that state none; rate_factor: multiplies the rate, None for a rate of the
        scenario.
        """
        if (self.rate is None) == (self.trace is None):
            raise InputError("needs a rate or a trace, and not both")
        effect = self.effect or FailureEffect.STOP
        if (effect is FailureEffect.SLOW) != (self.gpu is not None or self.nic is not None):
            raise InputError("gpu or nic says what is left of a part that is slow (effect: slow), and of no other")
        if self.gpu is not None and self.nic is not None:
            raise InputError("is of a gpu or of a nic; make two entries of it")
        if effect in {FailureEffect.SLOW, FailureEffect.CORRUPT} and self.latent_detection is None:
            raise InputError("latent_detection is missing: how long it takes until it is noticed, such as 2 h")
        trace_times, trace_end = (
            ((), 0.0) if self.trace is None else read_trace(data_files.resolve_relative(base_dir, self.trace))
        )
        remaining_fraction = self.gpu or self.nic
        rate = self.rate or FailureRate(FailureComponent.JOB, len(trace_times) / trace_end)
        return FailureMode(
            name=name,
            rate=rate if rate_factor is None else FailureRate(rate.component, rate_factor * rate.per_second),
            effect=effect,
            failure_domain=self.failure_domain
            or (FailureDomain.NOTHING if effect is FailureEffect.PLANNED else FailureDomain.NODE),
            weibull_shape=1.0 if self.shape is None else self.shape,
            event_times=trace_times,
            trace_duration=trace_end,
            detection_time=self.detection
            or (defaults.timeout if effect is FailureEffect.HANG else defaults.detection)
            or ZERO_DURATION,
            discovery_time=self.latent_detection or ZERO_DURATION,
            repair_time=self.repair or defaults.repair or ZERO_DURATION,
            slowdown=None
            if remaining_fraction is None
            else FailureSlowdown(remaining_fraction, affects_nic=self.nic is not None),
            is_rate_uncertain=rate_factor is not None,
        )


class RestartConfig(ConfigModel):
    """`reliability.restart`: durations of the sequential phases of every restart."""

    diagnosis: _DurationDistribution = None
    """root-cause diagnosis; left out: the preset's"""
    drain: _DurationDistribution = None
    """termination of the old processes; left out: the preset's"""
    schedule: _DurationDistribution = None
    """queueing and allocation by the scheduler; left out: the preset's"""
    image: _DurationDistribution = None
    """container start; left out: the preset's"""
    init: _DurationDistribution = None
    """initialization of processes and communicators; left out: the preset's"""
    init_per_rank: Duration | None = None
    """additional initialization per rank; left out: the preset's"""
    load: _DurationDistribution = None
    """loading of the checkpoint; left out: its bytes over read_bandwidth"""
    warmup: _DurationDistribution = None
    """time until steps run at full speed; left out: the preset's"""
    only_failed: bool | None = None
    """if a spare is available, healthy nodes are neither rescheduled nor restarted; left out: the preset's"""

    def restart_times(self) -> RestartTimes:
        """The restart times as the simulator represents them."""
        return RestartTimes(**_stated_values(self))


class CheckpointConfig(ConfigModel):
    """`reliability.checkpoint`: checkpoint interval and cost; a bare word or duration is the interval."""

    shorthand_key: ClassVar[str | None] = "interval"
    write: Annotated[CheckpointWrite | None, enum_parser(CheckpointWrite)] = None
    """blocking to storage, asynchronous, or to another node's memory; left out: the preset's"""
    interval: Annotated[
        CheckpointIntervalRule | float | None,
        value_parser(_parse_interval, f"a time with its unit, or {_INTERVAL_NAMES}", "30 min"),
    ] = None
    """a time, or the rule that chooses it; left out: the preset's"""
    size: SizeBytes | None = None
    """of the full job's state; left out: trained weights, master weights and moments"""
    bandwidth: _Bandwidth = None
    """aggregate write bandwidth of storage; left out: the preset's"""
    read_bandwidth: _Bandwidth = None
    """aggregate read bandwidth of storage; left out: the preset's"""
    bandwidth_per_node: _Bandwidth = None
    """maximum per node; left out: no limit"""
    overhead: Duration | None = None
    """fixed time of each checkpoint; left out: the preset's"""
    snapshot: Duration | None = None
    """time that training is blocked while the state is copied off the device; left out: the preset's"""
    interference: Annotated[float | None, fraction_parser(0.0, 0.99)] = None
    """fractional slowdown of steps during an asynchronous write; left out: the preset's"""
    stored_every: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    """with peers: every n-th checkpoint goes to storage, too; left out: the preset's"""

    def checkpoint_policy(self) -> CheckpointPolicy:
        """The checkpoint policy as the simulator represents it; raises InputError for a missing bandwidth."""
        stated = _stated_values(self)
        for key in ("bandwidth", "read_bandwidth"):
            if key not in stated:
                raise InputError(f"checkpoint.{key} is missing; write such as 200 GB/s")
        return CheckpointPolicy(**stated)


class MaintenanceConfig(ConfigModel):
    """`reliability.maintenance`: period and duration of planned downtime of the full cluster; or `none`."""

    example: ClassVar[str] = "{every: 30 d, lasts: 4 h}"
    every: Duration
    """time from one start to the next"""
    lasts: Duration
    """duration of each"""

    def maintenance_window(self) -> MaintenanceWindow:
        """The maintenance window as the simulator represents it."""
        if self.every <= self.lasts:
            raise InputError("maintenance: every is not longer than it lasts")
        return MaintenanceWindow(self.every, self.lasts)


class SparesConfig(ConfigModel):
    """`reliability.spares`: spare nodes; a bare number, or `best`, is the shared pool."""

    shorthand_key: ClassVar[str | None] = "nodes"
    nodes: Annotated[
        int | Literal["best"] | None, value_parser(_parse_spare_nodes, f"0 to {MAX_NODES:,}, or {BEST_WORD}")
    ] = None
    """spare nodes usable anywhere, or best: the optimal number; left out: best"""
    per_rack: Annotated[int | None, Field(ge=0, le=MAX_NODES)] = None
    """spare nodes per rack, usable only there; left out: 0"""

    def spare_pool(self) -> SparePool:
        """The spare pool as the simulator represents it."""
        return SparePool(None if self.nodes == "best" else self.nodes, self.per_rack or 0)


_MaintenanceOrNone = MaintenanceConfig | Literal["none"] | None


def _parse_maintenance(value: object) -> object:
    """False for the word `none`: no planned downtime, unlike a missing value, which is the preset's."""
    return False if value == "none" else value


class ReliabilityConfig(ConfigModel):
    """`reliability`: failures, checkpoints, restart and spares; a bare word is a preset. No effect on step times."""

    shorthand_key: ClassVar[str | None] = "preset"
    preset: NonEmptyText | None = None
    """a file of topologies/reliability; left out: typical"""
    failures: dict[str, FailureConfig | None] = Field({}, examples=["{gpu: {rate: 0.2 per 1000 gpu-days}}"])
    """overrides of the preset's failures, by name; null removes one; left out: the preset's"""
    rates: Annotated[float | None, Field(ge=0.0, le=MAX_SCALE, strict=False)] = None
    """factor on all failure rates; left out: 1"""
    spread: Annotated[float | None, Field(ge=1.0, le=MAX_SPREAD, strict=False)] = None
    """geometric standard deviation of the preset's rates across clusters, drawn for each run.

    Left out: the preset's
    """
    detection: _DurationDistribution = None
    """default time to detection; left out: the preset's"""
    timeout: _DurationDistribution = None
    """default time to detection of hangs; left out: the preset's"""
    repair: _DurationDistribution = None
    """default time to repair of nodes; left out: the preset's"""
    restart: RestartConfig = RestartConfig()
    """durations of the sequential phases of every restart"""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """checkpoint interval and cost"""
    spares: SparesConfig = SparesConfig()
    """spare nodes"""
    elastic: Annotated[ElasticPolicy | None, enum_parser(ElasticPolicy)] = None
    """without a spare: wait for repair, or continue with fewer replicas, with more microbatches each or a smaller
    batch; left out: wait
    """
    nodes_per_rack: Annotated[int | None, Field(ge=1, le=MAX_NODES)] = None
    """nodes per rack; left out: those of an NVLink domain, or 4"""
    quarantine: bool | None = None
    """a node with a slow component is replaced on detection; left out: true"""
    repair_slots: Annotated[int | None, Field(ge=1, le=MAX_NODES)] = None
    """nodes repaired concurrently; left out: all"""
    maintenance: Annotated[
        MaintenanceConfig | bool | None,
        value_parser(_parse_maintenance, "a mapping, or none", schema_type=_MaintenanceOrNone),
    ] = None
    """planned downtime of the full cluster, or none; left out: the preset's"""

    def reliability_model(self, base_dir: Path) -> ReliabilityModel:
        """The reliability model merged with its preset; raises InputError that starts with a key of the section."""
        name = self.preset or DEFAULT_PRESET
        try:
            preset = _load_preset(_resolve_preset_path(name, base_dir))
            if not self.model_fields_set - {"preset"}:
                return load_reliability(_resolve_preset_path(name, base_dir))
        except InputError as error:
            raise InputError(f"preset: {error}") from error
        return _build_model(
            name, _merge(preset.model_copy(update={"rates": None}), self), base_dir, preset, self.failures
        )


class ReliabilityPresetConfig(ReliabilityConfig):
    """A file of `topologies/reliability`. sources: provenance of each value, by its dotted key."""

    shorthand_key: ClassVar[str | None] = None
    description: NonEmptyText = Field(examples=["Failures of a cluster"])
    """one sentence about the cluster"""
    sources: dict[str, str] = Field({})
    """provenance of each value, by its dotted key"""


def load_reliability(name_or_path: str) -> ReliabilityModel:
    """Load topologies/reliability/NAME.yaml or a file of that form, over the default preset; raises InputError."""
    preset = _load_preset(name_or_path)
    preset_values = preset.model_copy(update={"rates": None})
    return _build_model(name_or_path, preset_values, Path(name_or_path).parent, preset, {})


def _resolve_preset_path(name: str, base_dir: Path) -> str:
    return str(data_files.resolve_relative(base_dir, name)) if data_files.is_path(name) else name


def _load_preset(name: str) -> ReliabilityPresetConfig:
    path = data_files.find_file("reliability", name)
    return _parse_preset(name, path, data_files.read_text(path))


@lru_cache(maxsize=8)
def _parse_preset(name: str, path: Path, text: str) -> ReliabilityPresetConfig:
    """Cached by the text, which may change."""
    content = data_files.parse_mapping(path, text)
    try:
        preset = ReliabilityPresetConfig.model_validate(content)
    except ValidationError as error:
        from clustersim.scenario.error_messages import translate_validation_error

        raise combined_error(
            data_files.display_name(path),
            translate_validation_error(error, ReliabilityPresetConfig, content, ["reliability"]),
        ) from None
    if name == DEFAULT_PRESET:
        return preset
    if preset.preset not in {None, DEFAULT_PRESET}:
        raise InputError(f"{data_files.display_name(path)}: preset: only {DEFAULT_PRESET} is below a preset")
    default_preset = _load_preset(DEFAULT_PRESET)
    # failure causes of different clusters are not merged: a cluster that lists its own replaces all defaults
    default_preset = (
        default_preset.model_copy(update={"failures": {}, "rates": None}) if preset.failures else default_preset
    )
    return _merge(default_preset, preset)


def _merge(base: ConfigT, override: ConfigModel) -> ConfigT:
    """A copy of `base` with the values that `override` states."""
    update: dict[str, Any] = {}
    for name in override.model_fields_set & set(type(base).model_fields):
        override_value, base_value = getattr(override, name), getattr(base, name)
        if isinstance(override_value, ConfigModel) and isinstance(base_value, ConfigModel):
            update[name] = _merge(base_value, override_value)
        elif name == "failures":
            update[name] = _merge_failures(base_value, override_value)
        elif override_value is not None:
            update[name] = override_value
    return base.model_copy(update=update)


def _merge_failures(base: dict[str, FailureConfig | None], override: dict[str, FailureConfig | None]) -> dict[str, Any]:
    """Merge entries by name; a rate replaces a trace, and a trace a rate."""
    merged = dict(base)
    for name, override_entry in override.items():
        base_entry = merged.get(name)
        if override_entry is None and base_entry is None:
            raise InputError(f"failures.{name}: there is none to leave out; {suggest_nearest(name, base)}")
        if override_entry is None or base_entry is None:
            merged[name] = override_entry
            continue
        alternative_key = {"rate": "trace", "trace": "rate"}
        replaced_keys = [alternative_key[key] for key in override_entry.model_fields_set & set(alternative_key)]
        merged[name] = _merge(base_entry.model_copy(update=dict.fromkeys(replaced_keys)), override_entry)
    return merged


def _build_model(
    name: str,
    merged: ReliabilityConfig,
    base_dir: Path,
    preset: ReliabilityPresetConfig,
    scenario_failures: dict[str, FailureConfig | None],
) -> ReliabilityModel:
    """Build the model from merged sections; the preset's rates are multiplied by its `rates`.

    scenario_failures: the entries of the scenario itself, whose rates are not multiplied.
    """
    failures = []
    scenario_rates = {
        cause for cause, failure in scenario_failures.items() if failure is not None and (failure.rate or failure.trace)
    }
    preset_factor = 1.0 if preset.rates is None else float(preset.rates)
    for cause, entry in merged.failures.items():
        if entry is not None:
            try:
                failures.append(
                    entry.failure(cause, base_dir, merged, None if cause in scenario_rates else preset_factor)
                )
            except InputError as error:
                raise InputError(f"failures.{cause}: {error}") from error
    maintenance = merged.maintenance
    return ReliabilityModel(
        preset=name,
        description=preset.description,
        failures=tuple(failures),
        rate_factor=1.0 if merged.rates is None else float(merged.rates),
        rate_geometric_std=1.0 if merged.spread is None else float(merged.spread),
        restart=merged.restart.restart_times(),
        checkpoint=merged.checkpoint.checkpoint_policy(),
        spares=merged.spares.spare_pool(),
        elastic=merged.elastic or ElasticPolicy.WAIT,
        rack_nodes=merged.nodes_per_rack,
        replaces_slow_nodes=merged.quarantine is not False,
        repair_slots=merged.repair_slots,
        maintenance=maintenance.maintenance_window() if isinstance(maintenance, MaintenanceConfig) else None,
        sources=preset.sources,
    )


def _stated_values(config: ConfigModel) -> dict[str, Any]:
    """The stated values by field name."""
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: value for name, value in values.items() if value is not None}


def read_trace(path: Path) -> tuple[tuple[Seconds, ...], Seconds]:
    """Failure times from a CSV file, and the length of its observation period.

    A column states the unit: time_s, time_h or time_d. A second column, `what`, may be `end` in the last line,
    which marks the end of observation and is no failure. Raises InputError that names file and line.
    """
    text = data_files.read_text(path)
    try:
        columns, rows = parse_table(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    events = [event for _, event in rows]
    time_columns = [column for column in _SECONDS_PER_COLUMN_UNIT if column in columns]
    if len(time_columns) != 1 or not events:
        raise InputError(
            f"{path}: needs rows, and one column of times that says its unit: {', '.join(_SECONDS_PER_COLUMN_UNIT)}"
        )
    times: list[Seconds] = []
    for line, event in enumerate(events, 2):
        times.append(_parse_event_time(path, line, event[time_columns[0]], _SECONDS_PER_COLUMN_UNIT[time_columns[0]]))
        if len(times) > 1 and times[-1] < times[-2]:
            raise InputError(
                f"{path}, line {line}: {event[time_columns[0]]} comes after a later time; sort the rows by time"
            )
    end = times[-1]
    if (events[-1].get("what") or "").strip() == "end":
        times.pop()
    if end <= 0.0 or not times:
        raise InputError(f"{path}: has no failure after its beginning")
    return tuple(times), end


def _parse_event_time(path: Path, line: int, text: str | None, factor: float) -> Seconds:
    try:
        time = float(cast("str", text)) * factor
    except (TypeError, ValueError):
        time = math.nan
    if not 0.0 <= time < math.inf:
        quoted = quote_cell(text or "", NUMBER_ALPHABET)
        raise InputError(f"{path}, line {line}: {quoted} is no time from zero up")
    return time
