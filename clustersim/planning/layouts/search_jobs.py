"""Which jobs are searched, and in which values do their layouts differ?

The default values are what planners vary, as far as model, cluster and framework allow: degrees, sequence
parallelism, schedules and chunks, data-parallel strategies, microbatches, recomputation, for MoE models expert
parallelism and, where the file overlaps expert communication, that overlap, and where the file has context
parallelism, its kinds without inner groups, and where the cluster has several sites, whether pipelines or replicas
cross them, and whether optimizer states are sharded in each. The file's own value is always included. Settings of
local training are no dimension of the layouts (`outer_variants`).
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from json import dumps
from typing import Any, Final, TypeVar

from clustersim.common.errors import InputError
from clustersim.model.training import NoRecompute
from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.layer_partition import evened
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import CONTEXT, EXPERT, PIPELINE, TENSOR, Axis
from clustersim.planning.layouts.config_keys import (
    CP,
    CP_KIND,
    DATA_PARALLEL,
    DEGREES,
    DP,
    ENCODER_DEGREES,
    ENCODER_DP,
    EP,
    EP_OVERLAP,
    ETP,
    MICROBATCH,
    ORDER,
    PP,
    RECOMPUTE,
    SAME_AS_TP,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    TP,
)
from clustersim.planning.layouts.outer_variants import OuterVariant, named_outer_keys, outer_variants
from clustersim.reliability.replica_places import replica_places
from clustersim.scenario import Scenario
from clustersim.scenario.loaders import FEWEST_PAIRED_RANKS, bidirectional_degrees
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.schedules.one_f_one_b import OneFOneB

T = TypeVar("T")
UNPAIRED_RANKS: Final = "the schedule needs pairs of pipeline ranks"
_POWERS: Final = tuple(2**power for power in range(11))
_CHUNKS: Final = (2, 3, 4, 5, 6, 7, 8)
_MOE_CHUNKS: Final = (2, 4)  # fewer, since MoE models have more other keys
_MICROBATCHES: Final = (1, 2, 4, 8)
_MOE_MICROBATCHES: Final = (1, 2)  # microbatches, in addition to the file's
_MAX_STAGES: Final = 64
_MAX_EP: Final = 64  # expert-parallel ranks, in addition to the file's
_RECOMPUTE_LAYERS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_MIN_CP_TOKENS: Final = 8192  # minimum tokens per rank with context parallelism
_HYBRID_SHARD_SIZES: Final = 3  # hybrid shard sizes: one NVLink domain, four, sixteen
_SITE_ORDERS: Final = (("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp"))  # pipelines cross sites, or replicas do
_ANY_PIPELINE: Final = f"{PP}={FEWEST_PAIRED_RANKS}"  # a pipeline for which every schedule can be read
_PARSED_KEYS: Final = frozenset((SCHEDULE, DATA_PARALLEL, RECOMPUTE, ORDER))


@dataclass(frozen=True, slots=True)
class SearchJob:
    """A job to search. overrides: differences from the file; resolved: its layout as in the file, unchecked.

    values: the values of every varied key, in the order tried; parsed_values: the objects of non-numeric
    values; allowed_dp: allowed values of layout.dp, None: any; couples_sequence_parallel: whether it is on
    whenever tp > 1; outer_variants: settings of local training that each layout is evaluated with, empty: in step.
    """

    overrides: tuple[str, ...]
    resolved: ResolvedScenario
    values: Mapping[str, tuple[str, ...]]
    parsed_values: Mapping[tuple[str, str], Any] = field(default_factory=dict, repr=False)
    allowed_dp: frozenset[int] | None = None
    couples_sequence_parallel: bool = True
    outer_variants: tuple[OuterVariant, ...] = ()

    @property
    def combination_count(self) -> int:
        """Number of combinations of values."""
        return math.prod(len(value) for value in self.values.values())

    def resolved_with(self, values: Mapping[str, str]) -> ResolvedScenario:
        """The resolved scenario with values of the keys that rules depend on; varied keys without one get defaults.

        Raises InputError for a schedule that is impossible with this many pipeline ranks.
        """
        resolved, configured = self.resolved, self.resolved.layout.as_configured
        schedule = self._parsed_value(SCHEDULE, values, OneFOneB(), resolved.schedule)
        is_bidirectional = schedule.is_bidirectional
        tp, cp, pp = (self._degree(key, values) for key in DEGREES)
        if is_bidirectional and PP in self.values and PP not in values:
            pp = FEWEST_PAIRED_RANKS
        encoder = replace(resolved.layout, tp=tp, **self._encoder_degrees(values))
        stages = pp if encoder.encoder_dp is None else max(1, pp - 1)
        dp = max(1, (resolved.cluster.gpu_count - encoder.encoder_ranks) // (tp * cp * stages))
        run_pp, run_dp = _paired_degrees(pp, dp) if is_bidirectional else (pp, dp)
        same_pipeline = (pp, schedule) == (configured.pp, resolved.schedule)
        etp = values.get(ETP, SAME_AS_TP if configured.etp is None else str(configured.etp))
        layout = replace(
            encoder,
            cp=cp,
            order=self._parsed_value(ORDER, values, configured.order, configured.order),
            cp_kind=ContextParallelKind(values[CP_KIND]) if CP_KIND in values else resolved.layout.cp_kind,
            ep=self._degree(EP, values),
            etp=None if etp == SAME_AS_TP else int(etp),
            sequence_parallel=self._uses_sequence_parallel(values, tp),
            data=self._parsed_value(DATA_PARALLEL, values, configured.data, configured.data),
            overlap_moe_expert_parallel_comm=values.get(
                EP_OVERLAP, str(configured.overlap_moe_expert_parallel_comm)
            ).lower()
            == "true",
            layers_per_stage=configured.layers_per_stage if same_pipeline else evened(configured.layers_per_stage),
            pp=run_pp,
            dp=run_dp,
            mirrored=is_bidirectional,
        )
        training = replace(
            resolved.training,
            microbatch=int(values.get(MICROBATCH, resolved.training.microbatch)),
            recompute=self._parsed_value(RECOMPUTE, values, NoRecompute(), resolved.training.recompute),
        )
        return replace(resolved, layout=layout, schedule=schedule, training=training)

    def _encoder_degrees(self, values: Mapping[str, str]) -> dict[str, Any]:
        """Degrees of an encoder that are varied, by field of the layout."""
        varied = (key for key in ENCODER_DEGREES if key in self.values)
        return {key.partition(".")[2]: self._degree(key, values) for key in varied}

    def _uses_sequence_parallel(self, values: Mapping[str, str], tp: int) -> bool:
        """Whether sequence parallelism is on; it follows tp where no value is chosen."""
        configured: bool = self.resolved.layout.sequence_parallel
        if SEQUENCE_PARALLEL in values:
            return values[SEQUENCE_PARALLEL].lower() == "true"
        return tp > 1 if TP in values and self.couples_sequence_parallel else configured

    def _degree(self, key: str, values: Mapping[str, str]) -> int:
        """The value of a degree."""
        if key in self.values:
            return int(values.get(key, 1))
        degree: int = getattr(self.resolved.layout.as_configured, key.partition(".")[2])
        return degree

    def _parsed_value(self, key: str, values: Mapping[str, str], default: T, configured: T) -> T:
        """The object of a non-numeric value."""
        if key not in self.values:
            return configured
        parsed: T = self.parsed_values[key, values[key]] if key in values else default
        return parsed

    def override_value(self, key: str, value: str, layout: Layout) -> str:
        """A value as `--set` takes it."""
        return str(layout.tp) if key == ETP and value == SAME_AS_TP else value


def _paired_degrees(pp: int, dp: int) -> tuple[int, int]:
    """The degrees of a bidirectional pipeline; raise InputError `reason: detail` if its ranks are no pairs."""
    try:
        return bidirectional_degrees(pp, dp)
    except InputError as error:
        raise InputError(f"{UNPAIRED_RANKS}: {error}") from error


def build_job(
    scenario: Scenario,
    base_overrides: tuple[str, ...],
    fixed: Mapping[str, str],
    varied: Mapping[str, tuple[str, ...]],
    *,
    use_defaults: bool = True,
) -> SearchJob:
    """The search job of a set of overrides; raise InputError for unknown keys and impossible sizes."""
    named = dict(named_outer_keys(fixed, varied))
    fixed, varied = _without(fixed, named), _without(varied, named)
    key_values = {**{key: (value,) for key, value in fixed.items()}, **varied}
    allowed_dp = frozenset(map(_parse_dp, key_values[DP])) if DP in key_values else None
    overrides = (*base_overrides, *(f"{key}={value}" for key, value in fixed.items() if key != DP))
    resolved = _resolve_base(scenario, overrides, varies_pp=PP in varied or (use_defaults and PP not in fixed))
    defaults = _default_values(resolved) if use_defaults else {}
    values = {key: default for key, default in defaults.items() if key not in fixed} | {
        key: values for key, values in varied.items() if key != DP
    }
    parsed_values = {}
    for key, allowed_values in values.items():
        for value in allowed_values:
            candidate = resolved if value == SAME_AS_TP else _resolve_value(scenario, overrides, key, value)
            if key in _PARSED_KEYS:
                parsed_values[key, value] = _config_object(candidate, key)
    for key in defaults.keys() & _PARSED_KEYS & values.keys() - varied.keys():
        if _config_object(resolved, key) not in (parsed_values[key, value] for value in values[key]):
            file_value = _file_value(scenario, key)
            parsed_values[key, file_value] = _config_object(resolved, key)
            values[key] = (file_value, *values[key])
    couples_sequence_parallel = SEQUENCE_PARALLEL not in {**key_values, **values}
    variants = outer_variants(scenario, named)
    return SearchJob(overrides, resolved, values, parsed_values, allowed_dp, couples_sequence_parallel, variants)


def _without(values: Mapping[str, T], keys: Container[str]) -> dict[str, T]:
    return {key: value for key, value in values.items() if key not in keys}


def _resolve_base(scenario: Scenario, overrides: tuple[str, ...], *, varies_pp: bool) -> ResolvedScenario:
    """The job's layout as in the file; on four pipeline ranks if the schedule has none on as many, and they vary."""
    try:
        return scenario.resolve_unchecked(overrides)
    except InputError:
        if not varies_pp:
            raise
        return scenario.resolve_unchecked((*overrides, _ANY_PIPELINE))


def _resolve_value(scenario: Scenario, overrides: tuple[str, ...], key: str, value: str) -> ResolvedScenario:
    """A value of a key, read in a layout in which every value of that key can be: combinations are checked later."""
    neutral = (f"{SCHEDULE}=1f1b",) if key == PP else (_ANY_PIPELINE,)
    return scenario.resolve_unchecked((*overrides, *neutral, f"{key}={value}"))


def _parse_dp(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{DP}: {text!r} is not a number; write such as {DP}=64") from None


def _config_object(resolved: ResolvedScenario, key: str) -> Any:
    """The object of a non-numeric key in a resolved scenario."""
    layout = resolved.layout
    return {
        SCHEDULE: resolved.schedule,
        DATA_PARALLEL: layout.data,
        RECOMPUTE: resolved.training.recompute,
        ORDER: layout.order,
    }[key]


def _file_value(scenario: Scenario, key: str) -> str:
    """The file's value of a key, as YAML text."""
    value: Any = scenario.raw_mapping
    for name in key.split("."):
        value = value[name]
    return value if isinstance(value, str) else dumps(value)


def _default_values(resolved: ResolvedScenario) -> dict[str, tuple[str, ...]]:
    """The default values of varied keys."""
    layout, training, model = resolved.layout.as_configured, resolved.training, resolved.model
    gpus, domain = resolved.cluster.gpu_count, resolved.cluster.unit_sizes.domain_gpus
    supported = resolved.framework.supported_layouts
    heads = math.gcd(
        *(size.size for mixer in model.distinct_mixers for size in mixer.sharded_sizes if not size.replicable)
    )
    moe_layers = resolved.model.distinct_routed_moes
    encoder_ranks = _encoder_ranks(resolved)
    stages = {
        bool(ranks) + divisor
        for ranks in encoder_ranks
        for divisor in divisors(gpus - ranks)
        if divisor <= min(_MAX_STAGES, model.layer_count)
    }
    microbatches = _MOE_MICROBATCHES if moe_layers else _MICROBATCHES
    cp = [degree for degree in _POWERS if degree == 1 or training.sequence // degree >= _MIN_CP_TOKENS]
    tp = [degree for degree in _POWERS if degree <= domain and heads % degree == 0]
    values = {
        TP: _degrees(resolved, TENSOR, tp),
        CP: _degrees(resolved, CONTEXT, cp),
        PP: _degrees(resolved, PIPELINE, stages),
        SCHEDULE: tuple(_default_schedules(resolved)),
        DATA_PARALLEL: tuple(_default_strategies(resolved)),
        MICROBATCH: _include_value(
            [microbatch for microbatch in microbatches if training.global_batch % microbatch == 0], training.microbatch
        ),
        RECOMPUTE: tuple(_default_recomputes(resolved)),
    }
    if layout.encoder_dp is not None:
        values[ENCODER_DP] = tuple(str(ranks // layout.encoder_layout.tp) for ranks in encoder_ranks)
    if layout.cp > 1:
        values[CP_KIND] = (
            layout.cp_kind.value,
            *(kind for kind in supported.context_parallel if kind != layout.cp_kind.value),
        )
    if _steps_cross_sites(resolved):
        values[ORDER] = tuple(f"[{', '.join(order)}]" for order in _SITE_ORDERS)
    if not moe_layers:  # else all tensor-parallel ranks would dispatch the same tokens
        values[SEQUENCE_PARALLEL] = ("true", "false")
    else:
        experts = math.gcd(*(moe_layer.experts for moe_layer in moe_layers))
        ep = [degree for degree in _POWERS if experts % degree == 0 and degree <= min(gpus, _MAX_EP)]
        values[EP] = _degrees(resolved, EXPERT, ep)
        values[ETP] = ("1", SAME_AS_TP if layout.effective_etp == 1 else str(layout.etp))
        if layout.overlap_moe_expert_parallel_comm:
            values[EP_OVERLAP] = ("false", "true")
    return {key: value for key, value in values.items() if len(value) > 1}


def _encoder_ranks(resolved: ResolvedScenario) -> list[int]:
    """Numbers of GPUs that an encoder has besides the model's: the file's, or powers of two; 0 where it has none."""
    layout = resolved.layout
    if layout.encoder_dp is None:
        return [0]
    counts = {layout.encoder_dp, *_POWERS}
    ranks = sorted(count * layout.encoder_layout.tp for count in counts)
    return [count for count in ranks if count <= max(layout.encoder_ranks, resolved.cluster.gpu_count // 2)]


def _default_schedules(resolved: ResolvedScenario) -> Iterator[str]:
    for name in resolved.framework.supported_layouts.schedules:
        if name == "interleaved":
            chunk_counts = _MOE_CHUNKS if resolved.model.distinct_routed_moes else _CHUNKS
            yield from (f"{{interleaved: {{chunks: {chunks}}}}}" for chunks in chunk_counts)
        else:
            yield name


def _default_strategies(resolved: ResolvedScenario) -> Iterator[str]:
    supported, domain, gpus = (
        resolved.framework.supported_layouts,
        resolved.cluster.unit_sizes.domain_gpus,
        resolved.cluster.gpu_count,
    )
    for name in dict.fromkeys((*supported.data, *supported.data_with_pipeline)):
        if name == "ddp" and resolved.model.distinct_routed_moes and "zero1" in supported.data:
            continue  # the same communication with more memory, which is scarce
        if name == "hsdp":
            shards = [domain * 4**power for power in range(_HYBRID_SHARD_SIZES) if 1 < domain * 4**power < gpus]
            yield from (f"{{hsdp: {{shard: {shard}}}}}" for shard in shards)
        else:
            yield name
    if "zero1" in supported.data and _steps_cross_sites(resolved):
        yield from (f"{{zero: {{stage: 1, shard: {shard}}}}}" for shard in _POWERS if 1 < shard <= gpus)


def _steps_cross_sites(resolved: ResolvedScenario) -> bool:
    """Whether a step, or an inner one of a replica of local training, is made in several sites."""
    if resolved.diloco is not None:
        return any(len(slot.sites) > 1 for slot in replica_places(resolved))
    return resolved.cluster.sites is not None


def _default_recomputes(resolved: ResolvedScenario) -> Iterator[str]:
    """None, full, and in between some layers per stage, or the usual modules of MoE and MLA recipes."""
    model = resolved.model
    yield "none"
    if resolved.training.attention.value == "standard":
        yield "selective"
    if model.distinct_routed_moes:
        yield f"{{modules: [layernorm, moe_act{', mla_up_proj' if model.uses_latent_attention else ''}]}}"
    else:
        yield from (f"{{layers: {layers}}}" for layers in _RECOMPUTE_LAYERS if layers < model.layer_count)
    yield "full"


def _degrees(resolved: ResolvedScenario, axis: Axis, values: Iterable[int]) -> tuple[str, ...]:
    """Degrees of an axis, the file's among them; only that one where the framework does not divide along the axis."""
    configured = resolved.layout.as_configured.all_degrees[axis.name]
    return _include_value(values if resolved.supports_axis(axis.name) else (), configured)


def _include_value(values: Iterable[int], configured: int) -> tuple[str, ...]:
    return tuple(map(str, sorted({*values, configured})))
