"""What does ZeRO do to a parameter's memory and traffic, and what else stays in memory for the whole step?

Bytes per parameter are those of `Footprint` for each number of replicas. What gradients and parameters send
is taken from lowering small plans with one and two microbatches: each further microbatch adds the
difference. Both depend on whether there is a pipeline, with which gradients are reduced once per step
(`parallel.data_parallel_strategy`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from clustersim.common.cached_method import cached_by, cached_method
from clustersim.common.units import Bytes
from clustersim.memory.activations import LAYER_KINDS, ActivationKind, Activations
from clustersim.memory.footprint import SHARDED_CATEGORIES, Footprint, MemoryCategory
from clustersim.memory.ledger import MemoryLedger
from clustersim.model.lora import LoraTarget
from clustersim.model.operators import ADAPTERS, DENSE, EXPERTS, QUANTIZED, LayerOperators
from clustersim.model.precision_recipe import PrecisionRecipe, WeightCastTiming
from clustersim.model.presets import load_preset
from clustersim.model.quantization import cached_weight_bytes
from clustersim.model.training import Training
from clustersim.model.transformer import resize_model
from clustersim.parallel.data_parallel_strategy import DdpStrategy, GradientSync, with_shard_size
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DENSE_AXIS_NAMES, DP_GROUP, DP_REPLICATE_GROUP, DP_SHARD_GROUP, EXPERT
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.parallel.plan import Plan
from clustersim.planning.explorer.column_sizes import (
    END_PARAMETER_COLUMNS,
    EXPERT_GRADIENT_COLUMN,
    LAYER_PARAMETER_COLUMNS,
    RowValues,
    column_names,
    kind_column,
    reused_parameter_columns,
)
from clustersim.planning.explorer.settings import ExplorerSpace, parse_recompute
from clustersim.planning.explorer.stage_counts import RING_PASSES, iterate_comm_ops, lower_programs
from clustersim.results.explorer_tables import LookupTable

_SEQUENCE_LENGTH: Final = 128
_FITTED_GROUPS: Final = (DENSE, QUANTIZED, ADAPTERS)
_SMALL_PLAN_SHARDS: Final = 2  # shard size of small plans with hybrid sharding
_PLAN_VARIATIONS: Final[tuple[dict[str, int], ...]] = ({}, {"ffn_factor": 2}, {"rank_factor": 2})
_DP_GROUPS: Final = (DP_GROUP.name, DP_SHARD_GROUP.name, DP_REPLICATE_GROUP.name)
_TIED_PRESET: Final = "gpt2-small"  # a model with tied embeddings
RingPassRows = dict[str, RowValues]
"""By comm group, [columns] ring passes per parameter, in bytes."""


def zero_table(space: ExplorerSpace) -> LookupTable:
    """Table by precision recipe, ZeRO stage, replicas, whether there is a pipeline and more than one microbatch.

    MoE models: also by whether several ranks hold the same experts. Expert parameters are then for as many such
    ranks as replicas, except bucket, gathered, reduced and there, which are the full layout's.

    resident: [groups] bytes per parameter, by category; copied: bytes of cached low-precision copies per cast
    weight element; bucket: [groups] maximum bytes of a stage's waiting gradients, of the first stage and of another
    (None: all of them); waiting: [groups] bytes of those per parameter; gathered: [groups] bytes per gathered
    parameter; reduced: [groups] bytes of its gradient, of one unit; unreduced: [groups] bytes by which its gradient
    exceeds the resident one until a stage's last backward; buffered: [groups] bytes of its gradient, of one unit,
    from the first such reduction on; created: [groups] bytes of the gradients that a step's only backward creates;
    dropped: whether gathered layers are resharded between forward and backward; there: [columns] 0 for activations
    that are counted elsewhere; dp: bytes sent per parameter, for no and for one microbatch [2][columns]; tied:
    share of the tied gradient; shards: ranks that parameters, gradients or optimizer states are sharded over;
    every: whether gradients are reduced after every microbatch; again: whether backward gathers parameters.
    """
    moe_keys = ("experts_shared",) if space.is_moe else ()
    entries = _ZeroEntries(space)
    return space.build_table(entries.entry, "precision", "zero", "replicas", "pipelined", "several", *moe_keys)


@dataclass(frozen=True, slots=True)
class _ZeroKey:
    """Settings of an entry; see `zero_table`."""

    precision: int
    zero: int
    replicas: int
    pipelined: bool
    several: bool
    experts_shared: bool = True


class _ZeroEntries:
    """Entries of the table, and what several of them share."""

    def __init__(self, space: ExplorerSpace) -> None:
        self._space, self._columns = space, column_names(space)
        self._storage_classes = space.first_equivalent_recipes(
            lambda recipe: (recipe.weight_formats, recipe.activations)
        )  # whatever its matmul formats are

    def entry(self, **settings: Any) -> dict[str, Any]:
        """The entry of some settings, the fields of `_ZeroKey`."""
        key = _ZeroKey(**settings)
        plan = self._plan(key)
        footprint, group = _build_footprint(self._space, plan), plan.parameter_groups[0]
        resident = [footprint.bytes_per_parameter(parameter_group) for parameter_group in plan.parameter_groups]
        flags = self._flags(key, plan)
        return {
            "resident": {use.value: [rank_bytes[use] for rank_bytes in resident] for use in SHARDED_CATEGORIES},
            "copied": _cached_cast_bytes(plan.training.recipe),
            "bucket": [_bucket_limits(footprint, group) for group in plan.parameter_groups],
            "waiting": [footprint.waiting_bytes_per_parameter(group) for group in plan.parameter_groups],
            **_gather_sizes(plan),
            **_unreduced_sizes(footprint),
            "there": [flags.get(name, 1) for name in self._columns],
            "dp": _dp_bytes(group, *self._ring_passes(key, hybrid=plan.layout.is_hybrid_sharded)),
            **_sharding_facts(plan),
        }

    def _plan(self, key: _ZeroKey) -> Plan:
        experts_only_sharded = (
            self._space.is_moe and key.experts_shared and key.replicas == 1
        )  # where experts are less sharded than all else
        degrees = (
            {"tp": 2, "etp": 1, "split": True}
            if experts_only_sharded
            else {"ep": 1 if key.experts_shared else key.replicas}
        )
        return self._space.plan_with(
            precision=key.precision, zero=key.zero, dp=key.replicas, sequence=_SEQUENCE_LENGTH,
            pp=1 + key.pipelined, batch=key.replicas * (1 + key.several), **degrees,
        )  # fmt: skip

    def _flags(self, key: _ZeroKey, plan: Plan) -> dict[str, int]:
        """Activation flags, which are those of two replicas where more hold no more."""
        replicas = key.replicas if plan.layout.is_hybrid_sharded else min(key.replicas, 2)
        return self._flags_of(replace(key, precision=self._storage_classes[key.precision], replicas=replicas))

    @cached_method
    def _flags_of(self, key: _ZeroKey) -> dict[str, int]:
        return _activation_flags(self._space, self._plan(key))

    @cached_by(lambda self, key, *, hybrid: (self._storage_classes[key.precision], key.zero, key.pipelined, hybrid))
    def _ring_passes(self, key: _ZeroKey, *, hybrid: bool) -> tuple[RingPassRows, RingPassRows]:
        return _ring_passes(self._space, self._storage_classes[key.precision], key.zero, key.pipelined, hybrid)


def _sharding_facts(plan: Plan) -> dict[str, Any]:
    """Over how many ranks the first group is sharded, and how often gradients and parameters travel."""
    strategy, shard_count = plan.layout.data, plan.parameter_groups[0].shard_count
    return {
        "tied": 1 / shard_count if strategy.zero_stage > 1 else 1.0,
        "shards": shard_count,
        "every": plan.layout.gradient_sync is GradientSync.EVERY_BACKWARD,
        "again": strategy.reshards_parameters(is_pipelined=plan.layout.is_pipelined),
    }


def _cached_cast_bytes(recipe: PrecisionRecipe) -> Bytes:
    """Bytes per weight element of the low-precision copies that are cached for the step."""
    is_cached = recipe.casts is not None and recipe.casts.weight_timing is WeightCastTiming.STEP
    return cached_weight_bytes(recipe, 1) if is_cached else 0.0


def _gather_sizes(plan: Plan) -> dict[str, Any]:
    """Bytes per parameter of each group that ZeRO-3 gathers, and of its unreduced gradients."""
    strategy, groups = plan.layout.data, plan.parameter_groups
    is_fully_sharded = strategy.shards_parameters
    reduces_per_unit = is_fully_sharded and not plan.accumulates_full_gradients
    sharded_groups = [is_fully_sharded and group.shard_count > 1 for group in groups]
    return {
        "gathered": [
            is_sharded * group.formats.gathered.bytes for is_sharded, group in zip(sharded_groups, groups, strict=True)
        ],
        "reduced": [
            reduces_per_unit * is_sharded * group.is_trained * group.formats.gradients.bytes
            for is_sharded, group in zip(sharded_groups, groups, strict=True)
        ],
        "dropped": strategy.reshards_parameters(is_pipelined=plan.layout.is_pipelined),
    }


def _unreduced_sizes(footprint: Footprint) -> dict[str, list[Bytes]]:
    """Bytes per parameter of each group while gradients that FSDP accumulates are not reduced, and in its buffer.

    And of those that a step's only backward creates.
    """
    groups = footprint.plan.parameter_groups
    return {
        "created": [footprint.created_bytes_per_parameter(group) for group in groups],
        "unreduced": [footprint.unreduced_bytes_per_parameter(group) for group in groups],
        "buffered": [
            footprint.frees_reduced_gradients
            * (group.shard_count > 1)
            * group.is_trained
            * group.formats.gradients.bytes
            for group in groups
        ],
    }


def _activation_flags(space: ExplorerSpace, plan: Plan) -> dict[str, int]:
    """By activation column, 1 if it counts as an activation.

    A layer's largest weight gradient does, unless dense weights are gathered; then that of its experts does,
    unless they are gathered as well. Input gradients of layers depend on tensor parallelism alone.
    """
    activations = Activations(plan)
    flags = {kind.value: int(activations.bytes_of(kind) != 0) for kind in ActivationKind if kind not in LAYER_KINDS}
    for layer_kind in range(space.layer_kind_count):
        spec = space.layer_kind(0, layer_kind) if space.is_only_model else plan.model.distinct_specs[0]
        for kind in LAYER_KINDS - {ActivationKind.LAYER_GRADIENTS}:
            flags[kind_column(kind.value, layer_kind)] = int(activations.bytes_of(kind, spec) != 0)
        if space.is_moe:
            unsharded = Activations(replace(plan, layout=replace(plan.layout, data=DdpStrategy())))
            size, full_size = (
                layer_activations.bytes_of(ActivationKind.LAYER_WEIGHT_GRADIENT, spec)
                for layer_activations in (activations, unsharded)
            )
            flags[kind_column(ActivationKind.LAYER_WEIGHT_GRADIENT.value, layer_kind)] = int(size == full_size)
            flags[kind_column(EXPERT_GRADIENT_COLUMN, layer_kind)] = int(0 < size < full_size)
    return flags


def group_columns(space: ExplorerSpace) -> tuple[tuple[int, ...], ...]:
    """For each parameter group the indices of its columns."""
    names = column_names(space)
    return tuple(
        tuple(names.index(column) for column in _group_column_names(space, group.name))
        for group in _parameter_groups(space)
    )


def reused_columns(space: ExplorerSpace) -> tuple[tuple[int, ...], ...]:
    """For each parameter group the indices of the columns of parameters that layers use again."""
    names, columns = column_names(space), reused_parameter_columns(space)
    kinds = range(space.layer_kind_count)
    return tuple(
        tuple(names.index(kind_column(columns[group.name], kind)) for kind in kinds) if columns else ()
        for group in _parameter_groups(space)
    )


def expert_group_index(space: ExplorerSpace) -> int | None:
    """Index of the expert parameter group, or None."""
    return next((index for index, group in enumerate(_parameter_groups(space)) if group.name == EXPERTS), None)


def _parameter_groups(space: ExplorerSpace) -> tuple[ParameterGroup, ...]:
    return space.plan_with().parameter_groups


def _group_column_names(space: ExplorerSpace, group: str) -> list[str]:
    """Column names of a group's parameters."""
    layers = [kind_column(LAYER_PARAMETER_COLUMNS[group], kind) for kind in range(space.layer_kind_count)]
    return [*layers, *END_PARAMETER_COLUMNS] if group == DENSE else layers


def _bucket_limits(footprint: Footprint, group: ParameterGroup) -> list[Bytes | None]:
    """Largest bucket's bytes on the first stage and on another; None: unlimited."""
    limits = (footprint.bucket_limit(group, is_first=first) for first in (True, False))
    return [None if math.isinf(limit) else limit for limit in limits]


def _build_footprint(space: ExplorerSpace, plan: Plan) -> Footprint:
    return Footprint(plan, space.scenario.framework, space.scenario.cluster.accelerator.context_bytes)


def _dp_bytes(group: ParameterGroup, without: RingPassRows, single: RingPassRows) -> list[list[float]]:
    """Bytes that a parameter sends without and with one microbatch, for groups of their real size: [2][columns]."""
    share = _SMALL_PLAN_SHARDS / group.shard_count if group.replicate_group is DP_REPLICATE_GROUP else 1.0
    shard_terms = (group.shard_group, group.shard_count, 1.0), (group.secondary_group, group.secondary_shard_count, 1.0)
    terms = (*shard_terms, (group.replicate_group, group.replica_count, share))
    weights = {comm_group.name: share * (1 - 1 / size) for comm_group, size, share in terms if comm_group is not None}
    return [
        [
            sum(passes[comm_group][column] * weight for comm_group, weight in weights.items())
            for column in range(len(without[DP_GROUP.name]))
        ]
        for passes in (without, single)
    ]


def _ring_passes(
    space: ExplorerSpace, precision: int, zero: int, pipelined: bool, hybrid: bool
) -> tuple[RingPassRows, RingPassRows]:
    """Ring bytes per parameter without and with one microbatch; each further one adds the difference."""
    plans = _SmallZeroPlan(space, precision, zero, pipelined, hybrid)
    one, two = plans.passes_per_parameter(1), plans.passes_per_parameter(2)
    return {
        comm_group: [2 * a - b for a, b in zip(one[comm_group], two[comm_group], strict=True)] for comm_group in one
    }, one


@dataclass(frozen=True, slots=True)
class _PipelinedOverride(Layout):
    """A layout whose data parallelism acts as with a pipeline, or as without one, whatever its own pp is."""

    pipelined_override: bool = False

    @property
    def is_pipelined(self) -> bool:
        """Whether layers are distributed over pipeline ranks, as seen by data parallelism."""
        return self.pipelined_override


@dataclass(frozen=True, slots=True)
class _SmallZeroPlan:
    """Plans with one layer per pipeline rank and two replicas, or two shard groups of two for hybrid sharding."""

    space: ExplorerSpace
    precision: int
    zero: int
    pipelined: bool
    hybrid: bool

    def passes_per_parameter(self, microbatches: int) -> RingPassRows:
        """Ring bytes per parameter: of a layer from a middle stage, of the ends from differences of other stages."""
        variations = _PLAN_VARIATIONS if self.space.scenario.training.lora else _PLAN_VARIATIONS[:1]
        plans, single_stage_plan = (
            [self._build_plan(3, microbatches, **variation) for variation in variations],
            self._build_plan(1, microbatches),
        )
        stage_bytes, (single_stage,) = [_ring_bytes(plan) for plan in plans], _ring_bytes(single_stage_plan)
        (first, middle, last), base_plan = stage_bytes[0], plans[0]
        end_counts = (
            base_plan.embedding.parameter_count,
            base_plan.head.parameter_count,
            base_plan.tied_head.parameter_count,
        )
        result: RingPassRows = {}
        for comm_group in _DP_GROUPS:
            layer_values = _fit_groups(plans, [plan_ranks[1][comm_group] for plan_ranks in stage_bytes])
            end_bytes = (
                first[comm_group] - middle[comm_group],
                last[comm_group] - middle[comm_group],
                single_stage[comm_group] - first[comm_group],
            )
            end_values = (size / count for size, count in zip(end_bytes, end_counts, strict=True))
            by_group = dict(zip(_FITTED_GROUPS, layer_values, strict=True))
            values = dict(zip(END_PARAMETER_COLUMNS, end_values, strict=True))
            for group in self._group_names:
                value = by_group.get(group, by_group[DENSE])  # expert parameters are sent like dense ones
                values |= self._layer_values(group, value)
            result[comm_group] = [values.get(name, 0) for name in column_names(self.space)]
        return result

    def _layer_values(self, group: str, value: float) -> dict[str, float]:
        """Ring bytes per parameter of a group in each kind of layer; those used again are sent where they are sharded.

        They are gathered and reduced for every use then (`lowering.fsdp`), else only where they are held.
        """
        is_sharded = self.space.data_parallel_strategy(self.zero).shards_parameters
        reused = reused_parameter_columns(self.space)
        columns = {LAYER_PARAMETER_COLUMNS[group]: value}
        columns |= {reused[group]: value * is_sharded} if reused else {}
        return {
            kind_column(name, kind): size
            for name, size in columns.items()
            for kind in range(self.space.layer_kind_count)
        }

    @property
    def _group_names(self) -> list[str]:
        return [group.name for group in _parameter_groups(self.space)]

    def _build_plan(self, pp: int, microbatches: int, *, ffn_factor: int = 1, rank_factor: int = 1) -> Plan:
        replicas = 2 * _SMALL_PLAN_SHARDS if self.hybrid else 2
        lora = self.space.scenario.training.lora
        adapters = lora and replace(
            lora, rank=lora.rank * rank_factor, targets=(LoraTarget.O,)
        )  # a parameter of any target sends the same
        recipe = self.space.effective_recipe(self.precision, self.zero)
        training = Training(_SEQUENCE_LENGTH, replicas * microbatches, recipe=recipe, lora=adapters)
        data = with_shard_size(
            self.space.data_parallel_strategy(self.zero), _SMALL_PLAN_SHARDS if self.hybrid else None
        )
        layout = _PipelinedOverride(
            dp=replicas, pp=pp, data=data, layers_per_stage=(1,) * pp, pipelined_override=self.pipelined
        )
        model = load_preset(_TIED_PRESET)
        (mlp,) = model.distinct_dense_mlps
        return Plan(resize_model(model, ffn=ffn_factor * mlp.ffn), training, layout)


def _fit_groups(plans: Sequence[Plan], layer_bytes: Sequence[float]) -> list[float]:
    """A layer's bytes per parameter of each group: least squares over layers of several shapes."""
    counts = np.array(
        [[_single_layer(plan).parameters_by_group.get(group, 0) for group in _FITTED_GROUPS] for plan in plans],
        dtype=float,
    )
    scale = counts.max(axis=0)
    is_present = scale > 0
    values = np.zeros(len(_FITTED_GROUPS))
    values[is_present] = (
        np.linalg.lstsq(counts[:, is_present] / scale[is_present], np.array(layer_bytes), rcond=None)[0]
        / scale[is_present]
    )
    return values.tolist()


def _single_layer(plan: Plan) -> LayerOperators:
    (layer,) = plan.layer_by_spec.values()
    return layer


def _ring_bytes(plan: Plan) -> list[dict[str, float]]:
    """Bytes on the rings between the replicas of each pipeline rank, by comm group."""
    bytes_by_rank = [dict.fromkeys(_DP_GROUPS, 0.0) for _ in range(plan.layout.pp)]
    for rank_bytes, program in zip(bytes_by_rank, lower_programs(plan), strict=True):
        for comm_op in iterate_comm_ops(program):
            if comm_op.comm_group in rank_bytes:
                rank_bytes[comm_op.comm_group] += RING_PASSES[comm_op.collective] * comm_op.payload
    return bytes_by_rank


def communicator_tables(space: ExplorerSpace) -> Iterator[LookupTable]:
    """Communicator memory of each axis by its degree, and the additional one of hybrid sharding."""
    communicator = space.scenario.framework.communicator_bytes
    for axis in (*DENSE_AXIS_NAMES, EXPERT.name) if space.is_moe else DENSE_AXIS_NAMES:
        yield space.build_table(
            lambda **degree: _build_footprint(space, space.plan_with(**degree)).communicator_count() * communicator,
            axis,
        )

    def hybrid_bytes(zero: int, replicas: int, pipelined: bool) -> float:
        plans = (
            space.plan_with(zero=zero_stage, dp=replicas, pp=1 + pipelined, batch=replicas) for zero_stage in (zero, 0)
        )
        sharded, unsharded = (_build_footprint(space, plan).communicator_count() for plan in plans)
        return (sharded - unsharded) * communicator

    yield space.build_table(hybrid_bytes, "zero", "replicas", "pipelined")


def workspace_bytes(space: ExplorerSpace) -> tuple[Bytes, ...]:
    """Bytes of library workspaces, by content of a stage."""
    plan = space.plan_with()
    uniform_stacks = (plan.model.stack,) * 2  # equal for any number of layers
    stages = (
        PipelineStage(0, stack, has_embedding=False, has_head=False) for stack in space.stage_contents or uniform_stacks
    )
    return tuple(_build_footprint(space, plan).workspace_bytes((stage,)) for stage in stages)


def pending_receives_table(space: ExplorerSpace) -> LookupTable:
    """Number of receives that a rank has pending at once."""

    def ask(pp: int, chunks: int) -> float:
        plan = space.plan_with(pp=pp, chunks=chunks)
        return _build_footprint(space, plan).receive_buffer_bytes(plan.stages) / plan.activation_bytes

    return space.build_table(ask, "pp", "chunks")


def fragmentation_factors(space: ExplorerSpace) -> dict[str, dict[str, float]]:
    """Allocator fragmentation per byte, by recomputation and memory category."""
    return {
        mode: _fragmentation_by_category(space.scenario.framework.fragmentation_with(parse_recompute(mode)))
        for mode in space.setting_values["recompute"]
    }


def _fragmentation_by_category(factor: float) -> dict[str, float]:
    ledgers = {
        category: MemoryLedger(np.zeros(1), np.zeros(1), np.zeros(1), {category: 1.0}, factor)
        for category in MemoryCategory
    }
    return {
        category.value: single_use.peak_by_category()[MemoryCategory.FRAGMENTATION]
        for category, single_use in ledgers.items()
    }
