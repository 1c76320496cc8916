"""How large are the parts of a model that one rank holds, for every way in which tensor parallelism can cut it?

Kept bytes are T (a + b k) for T tokens that attend to k keys: two sequences, of which one is twice as long, give a
and b. Tables are of one context-parallel rank; with more, T is smaller and k is not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from clustersim.analysis.exploration import Format, Kept, ModelSizes, RingVolumes, ShardSizes, shard_key
from clustersim.lowering.units import Unit, Units
from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Category, Footprint
from clustersim.parallel.layout import Layout
from clustersim.parallel.pipeline import Stage
from clustersim.parallel.plan import Plan
from clustersim.program.task import Collective, Operation
from clustersim.scenario import Scenario
from clustersim.workload.framework import Framework
from clustersim.workload.layers import Layer
from clustersim.workload.presets import preset
from clustersim.workload.recipe import Recipe
from clustersim.workload.stack import cut
from clustersim.workload.training import (
    FullRecompute,
    NoRecompute,
    Optimizer,
    Recompute,
    SelectiveOperations,
    SelectiveRecompute,
    Training,
)
from clustersim.workload.transformer import Model, Positions, dimensions, parameters

TENSOR: Final = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTES: Final[Mapping[str, Recompute]] = {
    "none": NoRecompute(),
    "selective": SelectiveRecompute(),
    "selective_op": SelectiveOperations(),
    "full": FullRecompute(),
}
_ANY: Final = preset("llama3-8b")
_LENGTH: Final = 64  # tokens for each tensor-parallel rank: any number that they divide
# activations that each rank of a ring sends, but for the factor (n - 1) / n
_ROUNDS: Final = {
    Collective.ALL_REDUCE: 2, Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1, Collective.SHIFT: 1,
}  # fmt: skip


def sizes(model: Model, scenario: Scenario, formats: Sequence[tuple[str, Recipe]]) -> ModelSizes:
    """A model's dimensions and its shards in each format, trained as in the scenario otherwise."""
    shards: dict[str, ShardSizes] = {}
    for _, precision in formats:
        training = replace(scenario.training, recipe=precision)
        for tp in degrees(model, scenario.layout.tp):
            for split in (False, True):
                key = shard_key(precision.compute.value, tp, sequence_parallel=split)
                shards[key] = shards.get(key) or _shard(model, training, Layout(tp=tp, sequence_parallel=split))
    found = dimensions(model)
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
    return ModelSizes(
        name=model.name,
        dimensions={name: found[name] for name in names},
        tied=model.tied_embeddings,
        positions=model.max_positions if model.positions is Positions.LEARNED else 0,
        parameters=parameters(model),
        shards=shards,
    )


def degrees(model: Model, own: int) -> list[int]:
    """Tensor-parallel degrees that can cut a model (as `scenario.checks` has it), the scenario's own among them."""
    tried = sorted({*TENSOR, own})
    found = dimensions(model)
    whole = [tp for tp in tried if not (found["heads"] % tp or found["ffn"] % tp or model.vocab % tp)]
    return [tp for tp in whole if found["kv_heads"] % tp == 0 or tp % found["kv_heads"] == 0]


def format_of(name: str, precision: Recipe, optimizer: Optimizer) -> Format:
    """A precision as bytes per element."""
    words = [f"compute {precision.compute.value}", f"gradients {precision.weights.gradients.value}"]
    words.append(
        "no master weights" if precision.weights.master is None else f"master weights {precision.weights.master.value}"
    )
    plan = Plan(_ANY, Training(1, 1, recipe=precision, optimizer=optimizer), Layout())
    resident = Footprint(plan, Framework(1.0, 0.0), 0.0).resident(0)
    weights = resident[Category.PARAMETERS] / precision.compute.bytes
    return Format(
        name=name,
        words=", ".join(words),
        key=precision.compute.value,
        compute=precision.compute.bytes,
        activation=precision.activations.bytes,
        gradients=precision.weights.gradients.bytes,
        state=round(resident[Category.OPTIMIZER] / weights),
    )


def _shard(model: Model, training: Training, layout: Layout) -> ShardSizes:
    short, long = (_plan(model, training, layout, factor * _LENGTH * layout.tp) for factor in (1, 2))
    tokens = short.training.sequence
    return ShardSizes(
        parameters=(
            _layer(short).parameters, short.embedding.parameters, short.head.parameters, short.tied_head.parameters,
        ),
        largest=(_largest(short.embedding), _largest(_layer(short)), _largest(short.head)),
        rows=short.shard.rows(model.vocab),
        layer_input=_layer(short).input_bytes / tokens,
        layer={name: _kept(short, long, way) for name, way in RECOMPUTES.items() if name != "full"},
        embedding=short.embedding.kept / tokens,
        head=short.head.kept / tokens,
    )  # fmt: skip


def _plan(model: Model, training: Training, layout: Layout, sequence: int) -> Plan:
    return Plan(model, replace(training, sequence=sequence, global_batch=layout.dp, microbatch=1), layout)


def _kept(short: Plan, long: Plan, way: Recompute) -> Kept:
    """(a, b) of a layer's a + b k bytes per token."""
    once, twice = (
        Activations(replace(plan, training=replace(plan.training, recompute=way))).kept(
            Stage(1, cut(plan.model.stack, 0, 1), embedding=False, head=False)
        )
        / plan.training.sequence
        for plan in (short, long)
    )
    slope = (twice - once) / (long.training.sequence - short.training.sequence)
    return once - slope * short.training.sequence, slope


def _layer(plan: Plan) -> Layer:
    return plan.layers[plan.model.specs[0]]


def _largest(part: Layer) -> int:
    """Elements of the largest weight that has a gradient of its own."""
    return max((each.parameters for each in part.operators if each.weight_gradient), default=0)


def ring_volumes(training: Training) -> dict[str, dict[str, RingVolumes]]:
    """What units exchange, by whether sequences are split, then by what is recomputed.

    All models' layers enter and leave their sharded regions alike, so one model stands for all.
    """
    return {
        words: {name: _ring_volumes(replace(training, recompute=way), split) for name, way in RECOMPUTES.items()}
        for words, split in (("whole", False), ("split", True))
    }


def _ring_volumes(training: Training, split: bool) -> RingVolumes:
    """Of a mesh of two tensor- and two context-parallel ranks; degrees change nothing but the ring's factor."""
    plan = _plan(_ANY, training, Layout(tp=2, cp=2, sequence_parallel=split), 2 * _LENGTH)
    embedding, layer, head = Units(plan).of(Stage(0, cut(_ANY.stack, 0, 1), embedding=True, head=True))
    activation = partial(_rounds, role="tp", size=plan.activation)
    of_loss = [each for each in head.forward if each.exchange and each.exchange.payload != plan.activation]
    return RingVolumes(
        layer=_both(layer, activation),
        embedding=_both(embedding, activation),
        head=_both(replace(head, forward=tuple(each for each in head.forward if each not in of_loss)), activation),
        small=_rounds(of_loss, role="tp", size=plan.shard.tokens),
        ring=_both(layer, partial(_rounds, role="cp", size=plan.sharding(_ANY.attentions[0]).keys_values)),
    )


def _both(unit: Unit, rounds: Callable[[Sequence[Operation]], float]) -> tuple[float, float]:
    """Of a unit's forward and of its backward, with what it runs again."""
    return rounds(unit.forward), rounds(unit.backward)


def _rounds(operations: Sequence[Operation], *, role: str, size: float) -> float:
    """What the exchanges of a role send, in buffers of `size` bytes."""
    exchanges = (each.exchange for each in operations if each.exchange is not None)
    return sum(_ROUNDS[each.collective] * each.payload / size for each in exchanges if each.group == role)
