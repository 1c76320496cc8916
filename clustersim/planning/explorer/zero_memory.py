"""What does ZeRO make of a parameter, and what else lies in memory for the whole step?

Bytes of a parameter are `Footprint`'s for each number of replicas. What gradients and parameters send is what lowering
makes of small plans, for one and for two microbatches: each more adds as much. Both depend on whether there is a
pipeline, beside which gradients are reduced once (`parallel.data_parallel_strategy`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np

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
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard, GradientSync, with_shard_size
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DENSE_AXIS_NAMES, DP_GROUP, DP_REPLICATE_GROUP, DP_SHARD_GROUP, EXPERT
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.parallel.plan import Plan
from clustersim.planning.explorer.column_sizes import BESIDE_DENSE, OF_ENDS, OF_LAYERS, Row, columns, of_kind
from clustersim.planning.explorer.settings import Space
from clustersim.planning.explorer.stage_counts import ROUNDS, exchanges, programs
from clustersim.results.explorer_tables import Table

_LENGTH: Final = 128
_MEASURED: Final = (DENSE, QUANTIZED, ADAPTERS)
_SHARDS: Final = 2  # of small plans with hybrid sharding
_SHAPES: Final[tuple[dict[str, int], ...]] = ({}, {"wider": 2}, {"ranks": 2})
_ROLES: Final = (DP_GROUP.name, DP_SHARD_GROUP.name, DP_REPLICATE_GROUP.name)
_TIED: Final = "gpt2-small"  # its embedding's matrix is the logits', too


def sharing(space: Space) -> Table:
    """By number format, ZeRO stage and replicas, and whether there is a pipeline and more than one microbatch.

    Of a mixture also whether several ranks hold the same experts. What it says of experts' parameters is for as many
    such ranks as replicas, but for bucket, gathered, reduced and there, which are the whole layout's.
    resident: bytes of a parameter, by category [groups]; copied: bytes of the copies of an element of weights that are
    cast; bucket: [groups] bytes of a stage's gradients that wait at
    most, of the first stage and of another (None: all of them), and those of a parameter; gathered: [groups] bytes of
    a parameter that is gathered; reduced: [groups] bytes of its gradient, of one unit's; dropped: whether layers that
    are gathered are dropped between passes; there: [columns] 0 for parts of activations that are counted elsewhere;
    dp: bytes that a parameter sends, for no and for one microbatch [2][columns]; tied: part of a tied gradient; shards:
    ranks that parameters, gradients or optimizer states are cut over; every: whether gradients are reduced after
    every microbatch; again: whether backward gathers parameters.
    """
    kept = space.alike(lambda recipe: (recipe.weight_formats, recipe.activations))  # whatever its products are in
    moved = cache(lambda *known: _moved(space, *known))
    names = columns(space)

    def at(precision: int, zero: int, replicas: int, pipelined: bool, several: bool, experts_shared: bool) -> Plan:
        alone = space.mixture and experts_shared and replicas == 1  # where experts are cut less than all else
        cut = {"tp": 2, "etp": 1, "split": True} if alone else {"ep": 1 if experts_shared else replicas}
        return space.plan(
            precision=precision, zero=zero, dp=replicas, sequence=_LENGTH,
            pp=1 + pipelined, batch=replicas * (1 + several), **cut,
        )  # fmt: skip

    @cache
    def told(*known: Any) -> dict[str, int]:
        return _there(space, at(*known))

    def ask(
        precision: int, zero: int, replicas: int, pipelined: bool, several: bool, experts_shared: bool = True
    ) -> dict[str, Any] | None:
        plan = at(precision, zero, replicas, pipelined, several, experts_shared)
        stays, strategy, alike = _footprint(space, plan), plan.layout.data, kept[precision]
        group, resident = (
            plan.parameter_groups[0],
            [stays.bytes_per_parameter(parameter_group) for parameter_group in plan.parameter_groups],
        )
        few = replicas if plan.layout.is_hybrid_sharded else min(replicas, 2)
        there = told(alike, zero, few, pipelined, several, experts_shared)
        return {
            "resident": {use.value: [item[use] for item in resident] for use in SHARDED_CATEGORIES},
            "copied": _copied(plan.training.recipe),
            "bucket": [
                [*_limits(stays, element), stays.bucket_bytes(element, 1.0, is_first=True)]
                for element in plan.parameter_groups
            ],
            **_gathers(plan),
            "there": [there.get(name, 1) for name in names],
            "dp": _sent(group, *moved(alike, zero, pipelined, plan.layout.is_hybrid_sharded)),
            "tied": 1 / group.shard_count if strategy.zero_stage > 1 else 1.0,
            "shards": group.shard_count,
            "every": plan.layout.gradient_sync is GradientSync.EVERY_BACKWARD,
            "again": isinstance(strategy, FullyShard) and strategy.reshards_parameters(is_pipelined=pipelined),
        }

    shared = ("experts_shared",) if space.mixture else ()
    return space.table(ask, "precision", "zero", "replicas", "pipelined", "several", *shared)


def _copied(recipe: PrecisionRecipe) -> Bytes:
    """Bytes of the copies of an element of weights that are kept for the step."""
    kept = recipe.casts is not None and recipe.casts.weight_timing is WeightCastTiming.STEP
    return cached_weight_bytes(recipe, 1) if kept else 0.0


def _gathers(plan: Plan) -> dict[str, Any]:
    """What ZeRO-3 gathers of each group's parameters, and whole gradients of them beside."""
    strategy, groups = plan.layout.data, plan.parameter_groups
    whole = isinstance(strategy, FullyShard)
    reduces = whole and not plan.accumulates_full_gradients
    sharded = [whole and group.shard_count > 1 for group in groups]
    return {
        "gathered": [cut * group.formats.gathered.bytes for cut, group in zip(sharded, groups, strict=True)],
        "reduced": [
            reduces * cut * group.is_trained * group.formats.gradients.bytes
            for cut, group in zip(sharded, groups, strict=True)
        ],
        "dropped": isinstance(strategy, FullyShard)
        and strategy.reshards_parameters(is_pipelined=plan.layout.is_pipelined),
    }


def _there(space: Space, plan: Plan) -> dict[str, int]:
    """By column of an activation's part whether it is there.

    The gradient of a layer's largest weight is, unless dense ones are gathered; then that of its experts, unless they
    are, too.
    """
    of = Activations(plan)
    found = {part.value: int(of.bytes_of(part) != 0) for part in ActivationKind if part not in LAYER_KINDS}
    for kind in range(space.kinds):
        spec = space.kind(0, kind) if space.mixture else plan.model.distinct_specs[0]
        for part in LAYER_KINDS:
            found[of_kind(part.value, kind)] = int(of.bytes_of(part, spec) != 0)
        if space.mixture:
            largest = Activations(replace(plan, layout=replace(plan.layout, data=DdpStrategy())))
            now, whole = (
                activations.bytes_of(ActivationKind.LAYER_WEIGHT_GRADIENT, spec) for activations in (of, largest)
            )
            found[of_kind(ActivationKind.LAYER_WEIGHT_GRADIENT.value, kind)] = int(now == whole)
            found[of_kind(BESIDE_DENSE, kind)] = int(0 < now < whole)
    return found


def groups(space: Space) -> tuple[tuple[int, ...], ...]:
    """Of each group of parameters its columns."""
    names = columns(space)
    return tuple(tuple(names.index(column) for column in _of_group(space, group.name)) for group in _groups(space))


def experts(space: Space) -> int | None:
    """The group of experts' parameters, where there is one."""
    return next((place for place, group in enumerate(_groups(space)) if group.name == EXPERTS), None)


def _groups(space: Space) -> tuple[ParameterGroup, ...]:
    return space.plan().parameter_groups


def _of_group(space: Space, group: str) -> list[str]:
    """The columns of a group's parameters."""
    layers = [of_kind(OF_LAYERS[group], kind) for kind in range(space.kinds)]
    return [*layers, *OF_ENDS] if group == DENSE else layers


def _limits(stays: Footprint, group: ParameterGroup) -> list[Bytes | None]:
    """Bytes of a bucket of the first stage, and of another; None: as many as there are."""
    sizes = (stays.bucket_bytes(group, math.inf, is_first=first) for first in (True, False))
    return [None if math.isinf(size) else size for size in sizes]


def _footprint(space: Space, plan: Plan) -> Footprint:
    return Footprint(plan, space.scenario.framework, space.scenario.cluster.accelerator.context_bytes)


Moved = dict[str, Row]
"""Buffers that a parameter goes round in, by role."""


def _sent(group: ParameterGroup, none: Moved, one: Moved) -> list[list[float]]:
    """Bytes that a parameter sends, without and with one microbatch, in groups of their real size: [2][columns]."""
    part = _SHARDS / group.shard_count if group.replicate_group is DP_REPLICATE_GROUP else 1.0
    whole = (group.shard_group, group.shard_count, 1.0), (group.secondary_group, group.secondary_shard_count, 1.0)
    parts = (*whole, (group.replicate_group, group.replica_count, part))
    weights = {role.name: part * (1 - 1 / ranks) for role, ranks, part in parts if role is not None}
    return [
        [
            sum(moved[role][column] * weight for role, weight in weights.items())
            for column in range(len(none[DP_GROUP.name]))
        ]
        for moved in (none, one)
    ]


def _moved(space: Space, precision: int, zero: int, pipelined: bool, hybrid: bool) -> tuple[Moved, Moved]:
    """What a parameter goes round in without and with one microbatch; each more adds as much."""
    small = _Small(space, precision, zero, pipelined, hybrid)
    one, two = small.weights(1), small.weights(2)
    return {role: [2 * a - b for a, b in zip(one[role], two[role], strict=True)] for role in one}, one


@dataclass(frozen=True, slots=True)
class _AsIf(Layout):
    """A layout whose data parallelism does what it does with a pipeline, or without one, whatever its own pp."""

    as_if: bool = False

    @property
    def is_pipelined(self) -> bool:
        """Whether layers are spread over pipeline ranks, for data parallelism."""
        return self.as_if


@dataclass(frozen=True, slots=True)
class _Small:
    """Plans with a layer on each pipeline rank, of two replicas, or of two pairs of them over which weights are cut."""

    space: Space
    precision: int
    zero: int
    pipelined: bool
    hybrid: bool

    def weights(self, microbatches: int) -> Moved:
        """Buffers for each parameter: a stage without ends has a layer's, what others have more is their end's."""
        shapes = _SHAPES if self.space.scenario.training.lora else _SHAPES[:1]
        plans, alone = [self._plan(3, microbatches, **shape) for shape in shapes], self._plan(1, microbatches)
        sent, (only,) = [_buffers(plan) for plan in plans], _buffers(alone)
        (first, middle, last), of = sent[0], plans[0]
        ends = of.embedding.parameter_count, of.head.parameter_count, of.tied_head.parameter_count
        found: Moved = {}
        for role in _ROLES:
            of_layers = _by_group(plans, [ranks[1][role] for ranks in sent])
            more = first[role] - middle[role], last[role] - middle[role], only[role] - first[role]
            of_ends = (size / count for size, count in zip(more, ends, strict=True))
            by_group = dict(zip(_MEASURED, of_layers, strict=True))
            each = dict(zip(OF_ENDS, of_ends, strict=True))
            for group in self._names:
                value = by_group.get(group, by_group[DENSE])  # experts are sent as all else is
                each |= {of_kind(OF_LAYERS[group], kind): value for kind in range(self.space.kinds)}
            found[role] = [each.get(name, 0) for name in columns(self.space)]
        return found

    @property
    def _names(self) -> list[str]:
        return [group.name for group in _groups(self.space)]

    def _plan(self, pp: int, microbatches: int, *, wider: int = 1, ranks: int = 1) -> Plan:
        replicas = 2 * _SHARDS if self.hybrid else 2
        lora = self.space.scenario.training.lora
        more = lora and replace(
            lora, rank=lora.rank * ranks, targets=(LoraTarget.O,)
        )  # of any a parameter sends the same
        recipe = self.space.recipe(self.precision, self.zero)
        training = Training(_LENGTH, replicas * microbatches, recipe=recipe, lora=more)
        data = with_shard_size(self.space.strategy(self.zero), _SHARDS if self.hybrid else None)
        layout = _AsIf(dp=replicas, pp=pp, data=data, layers_per_stage=(1,) * pp, as_if=self.pipelined)
        model = load_preset(_TIED)
        (mlp,) = model.distinct_dense_mlps
        return Plan(resize_model(model, ffn=wider * mlp.ffn), training, layout)


def _by_group(plans: Sequence[Plan], sent: Sequence[float]) -> list[float]:
    """Of a layer's parameters, by group: what layers of several shapes send says what each group's do."""
    counts = np.array(
        [[_layer(plan).parameters_by_group.get(group, 0) for group in _MEASURED] for plan in plans], dtype=float
    )
    scale = counts.max(axis=0)
    there = scale > 0
    found = np.zeros(len(_MEASURED))
    found[there] = np.linalg.lstsq(counts[:, there] / scale[there], np.array(sent), rcond=None)[0] / scale[there]
    return found.tolist()


def _layer(plan: Plan) -> LayerOperators:
    (layer,) = plan.layer_by_spec.values()
    return layer


def _buffers(plan: Plan) -> list[dict[str, float]]:
    """Bytes that go round between the replicas of each pipeline rank, by role."""
    found = [dict.fromkeys(_ROLES, 0.0) for _ in range(plan.layout.pp)]
    for sent, program in zip(found, programs(plan), strict=True):
        for exchange in exchanges(program):
            if exchange.comm_group in sent:
                sent[exchange.comm_group] += ROUNDS[exchange.collective] * exchange.payload
    return found


def buffers(space: Space) -> Iterator[Table]:
    """Bytes of the process groups of each axis, by its degree, and of those that hybrid sharding has beside."""
    communicator = space.scenario.framework.communicator_bytes
    for axis in (*DENSE_AXIS_NAMES, EXPERT.name) if space.mixture else DENSE_AXIS_NAMES:
        yield space.table(lambda **one: _footprint(space, space.plan(**one)).communicator_count * communicator, axis)

    def hybrid(zero: int, replicas: int, pipelined: bool) -> float:
        plans = (space.plan(zero=item, dp=replicas, pp=1 + pipelined, batch=replicas) for item in (zero, 0))
        own, plain = (_footprint(space, plan).communicator_count for plan in plans)
        return (own - plain) * communicator

    yield space.table(hybrid, "zero", "replicas", "pipelined")


def workspaces(space: Space) -> tuple[Bytes, ...]:
    """Bytes that libraries take, by the content of a stage."""
    framework, plan = space.scenario.framework, space.plan()
    alike = (plan.model.stack,) * 2  # as many for any number of layers
    stages = (PipelineStage(0, stack, has_embedding=False, has_head=False) for stack in space.contents or alike)
    return tuple(
        framework.workspace_bytes + _footprint(space, plan).grouped_workspace_bytes((stage,)) for stage in stages
    )


def receives(space: Space) -> Table:
    """Messages that a rank awaits at once."""

    def ask(pp: int, chunks: int) -> float:
        plan = space.plan(pp=pp, chunks=chunks)
        return _footprint(space, plan).receive_buffer_bytes(plan.stages) / plan.activation_bytes

    return space.table(ask, "pp", "chunks")


def fragmentation(space: Space) -> dict[str, float]:
    """What the allocator loses of each byte, by what it is used for."""
    factor = space.scenario.framework.fragmentation
    alone = {
        use: MemoryLedger(np.zeros(1), np.array([float(use is MemoryCategory.ACTIVATIONS)]), {use: 1.0}, factor)
        for use in MemoryCategory
    }
    return {use.value: one.peak_by_category()[MemoryCategory.FRAGMENTATION] for use, one in alone.items()}
