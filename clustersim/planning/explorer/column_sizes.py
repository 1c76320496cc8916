"""How large are the parts of a model that one rank holds and sends, for every way to cut it?

Kept bytes are T (a + b k) for T tokens that attend to k keys: two sequences, of which one is twice as long, give a
and b. They are of one context-parallel rank; with more, T is smaller and k is not.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Final

from clustersim.lowering.program_builder import Lowering
from clustersim.lowering.task_list import Blocks
from clustersim.lowering.units import Units
from clustersim.memory.activations import ActivationKind, Activations, layer_saved_bytes
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.operators import ADAPTERS, DENSE, EXPERTS, QUANTIZED
from clustersim.parallel.plan import Plan
from clustersim.planning.explorer.expert_traffic import CUT, SPREAD, sent_of_experts
from clustersim.planning.explorer.settings import Space, recompute
from clustersim.program.task import TokenDispatcher
from clustersim.results.explorer_tables import Table
from clustersim.scenario.validation_rules.moe import check_expert_sharding, check_sequence_parallel

_OF_LAYERS: Final = (ActivationKind.LAYER_INPUT, ActivationKind.LAYER_FULL, ActivationKind.LAYER_WEIGHT_GRADIENT)
_OF_ENDS: Final = (
    ActivationKind.STAGE_OUTPUT, ActivationKind.EMBEDDING_SAVED, ActivationKind.HEAD_SAVED, ActivationKind.LOSS_GRADIENT, ActivationKind.CAST_GRADIENT, ActivationKind.EMBEDDING_WEIGHT_GRADIENT, ActivationKind.HEAD_WEIGHT_GRADIENT,
)  # fmt: skip
_CONSTANT: Final = (
    ActivationKind.LAYER_WEIGHT_GRADIENT,
    ActivationKind.EMBEDDING_WEIGHT_GRADIENT,
    ActivationKind.HEAD_WEIGHT_GRADIENT,
)
OF_LAYERS: Final = {
    DENSE: "layer parameters",
    QUANTIZED: "quantized parameters of a layer",
    ADAPTERS: "adapters' parameters of a layer",
    EXPERTS: "experts' parameters of a layer",
}
"""Columns of a layer's parameters, by their group."""
CAST: Final = "weights of a layer that are cast"
"""The elements of which there may be copies in the format of products."""
OF_ENDS: Final = ("embedding parameters", "head parameters", "parameters of the only stage's head")
BESIDE_DENSE: Final = "gradient of a layer's experts"
"""The gradient of the largest weight of experts, where dense weights' are counted with what ZeRO-3 gathers."""
SENT: Final = (
    "activation to tp",
    "operand to tp",
    "tokens to tp",
    "elements of tokens to tp",
    "elements of operands to tp",
    "keys and values to cp",
    "message",
    "tied gradient",
)
"""Operands are what products read, and may be gathered in their format."""
_LENGTH: Final = 64  # tokens for each tensor-parallel rank: any number that they divide

Row = list[float]


def of_kind(name: str, kind: int) -> str:
    """The column of something of a kind of layer."""
    return name if kind == 0 else f"{name}, kind {kind}"


def kept(recompute: str) -> str:
    """The column of what a layer keeps that is partly recomputed."""
    return f"layer kept, {recompute}"


def of_layers(space: Space) -> dict[str, str]:
    """Columns of a layer's parameters, by their group."""
    return {group: name for group, name in OF_LAYERS.items() if group != EXPERTS or space.mixture}


def columns(space: Space) -> tuple[str, ...]:
    """Names of all parts."""
    layers = (*(part.value for part in _OF_LAYERS), *map(kept, space.selective), *of_layers(space).values(), CAST)
    each = (*layers, BESIDE_DENSE) if space.mixture else layers
    kinds = (of_kind(name, kind) for kind in range(space.kinds) for name in each)
    experts = (*SPREAD, *CUT) if space.mixture else ()
    return (*(part.value for part in _OF_ENDS), *kinds, *OF_ENDS, *SENT, *experts)


def sizes(space: Space) -> Table:
    """Bytes of every part, and numbers of parameters, [columns][features]; what cannot cut a model is missing."""
    known: dict[tuple[Any, ...], dict[str, Row]] = {}
    activations = space.alike(lambda recipe: recipe.activations)
    besides = space.alike(lambda recipe: replace(recipe, weight_formats=space.precisions[0].weight_formats))
    routed = cache(
        lambda *key: [*_routed(space, **dict(zip(("precision", "ep", "etp", "dispatcher"), key, strict=True)))]
    )

    def sent(precision: int, tp: int, *experts: Any) -> Iterator[tuple[str, Row]]:
        """What a rank sends to others' experts, whose tokens are a part of those of all tensor-parallel ranks."""
        alike = routed(activations[precision], *experts)  # tokens are sent as activations
        yield from ((name, [once, item / tp, 0, 0]) for name, once, item in alike)

    order = columns(space)

    def ask(model: int, precision: int, tp: int, split: bool, **experts: Any) -> list[Row] | None:
        cut = {"model": model, "tp": tp, "split": split, **experts}
        if (model, tp) not in space.cuts or (space.mixture and not _cuts_experts(space, cut)):
            return None
        moved = experts.get("dispatcher")
        copied = None if moved is None else TokenDispatcher(moved) is not TokenDispatcher.ALL_TO_ALL
        key = (besides[precision], model, tp, split, *[*experts.values()][:2], copied)
        if key not in known:
            known[key] = dict(_columns(space, precision=precision, **cut))
        found = known[key] | (dict(sent(precision, tp, *experts.values())) if space.mixture else {})
        head, only = (found[name][0] for name in OF_ENDS[1:])
        tied = _constant((head - only) * space.precisions[precision].weight_formats.gradients.bytes)
        return [tied if name == SENT[-1] else found[name] for name in order]

    experts = ("ep", "etp", "dispatcher") if space.mixture else ()
    return space.table(ask, "model", "precision", "tp", "split", *experts)


def _cuts_experts(space: Space, cut: dict[str, Any]) -> bool:
    there = space.at(**cut)
    return not [*check_expert_sharding(there), *check_sequence_parallel(there)]


def _columns(space: Space, **settings: Any) -> Iterator[tuple[str, Row]]:
    """All columns but the tied gradient, which depends on the format of gradients."""
    once, twice = _lengths(space, **settings)
    for part in _OF_ENDS:
        yield part.value, _measured(part, None, once, twice)
    for kind in range(space.kinds):
        spec = space.kind(settings["model"], kind)
        yield from ((of_kind(name, kind), row) for name, row in _layer(space, spec, once, twice))
    units = once.embedding, once.head, once.stage_head(once.stages[0])
    yield from ((name, _constant(unit.parameter_count)) for name, unit in zip(OF_ENDS, units, strict=True))
    yield from zip(SENT, _sent(once), strict=False)


def _lengths(space: Space, **settings: Any) -> tuple[Plan, Plan]:
    """Plans of two sequences, of which one is twice as long."""
    length = _LENGTH * settings["tp"]
    return space.plan(**settings, sequence=length), space.plan(**settings, sequence=2 * length)


def _layer(space: Space, spec: LayerSpec, once: Plan, twice: Plan) -> Iterator[tuple[str, Row]]:
    """Columns of a kind of layer."""
    for part in _OF_LAYERS:
        yield part.value, _measured(part, spec, once, twice)
    for mode in space.selective:
        way = recompute(mode)
        sizes = (layer_saved_bytes(plan.layer_by_spec[spec], way) for plan in (once, twice))
        yield kept(mode), _by_tokens(once.training.sequence, *sizes)
    layer = once.layer_by_spec[spec]
    for group, name in of_layers(space).items():
        yield name, _constant(layer.parameters_by_group.get(group, 0))
    yield CAST, _constant(sum(operator.cached_cast_elements for operator in layer.operators))
    experts = replace(layer, operators=tuple(item for item in layer.operators if item.parameter_group == EXPERTS))
    yield BESIDE_DENSE, _constant(Activations(once).weight_gradient_bytes(experts))


def _measured(part: ActivationKind, spec: LayerSpec | None, once: Plan, twice: Plan) -> Row:
    if part in _CONSTANT:
        return _constant(Activations(once).bytes_of(part, spec))
    return _by_tokens(once.training.sequence, *(Activations(plan).bytes_of(part, spec) for plan in (once, twice)))


def _routed(space: Space, **settings: Any) -> Iterator[tuple[str, float, float]]:
    """What a rank sends of each exchange around experts, by its name: once, and for each of its tokens."""
    once, twice = _lengths(space, model=0, tp=1, split=False, **settings)
    short, long = (dict(sent_of_experts(plan)) for plan in (once, twice))
    tokens = once.training.sequence
    for name in (*SPREAD, *CUT):
        one, two = short.get(name, 0.0), long.get(name, 0.0)
        yield name, 2 * one - two, (two - one) / tokens


def _constant(size: float) -> Row:
    return [size, 0, 0, 0]


def _by_tokens(tokens: int, short: float, long: float) -> Row:
    """By tokens, and by tokens and keys: bytes of so many tokens, and of twice as many."""
    one, two = short / tokens, long / (2 * tokens)
    return [0, 2 * one - two, (two - one) / tokens, 0]


def _sent(plan: Plan) -> Iterator[Row]:
    """What each rank of a ring sends: of an activation and an operand, of a byte of each token, of its elements.

    Then of keys and values; last a message.
    """
    tokens, others = plan.training.sequence, (plan.layout.tp - 1) / plan.layout.tp
    sharding, whole = plan.layer_sharding(plan.model.distinct_specs[0]), plan.activation_bytes / tokens * others
    wide = sharding.format.bytes
    narrow = wide if sharding.operands is None else sharding.operands.format.bytes
    yield [0, whole, 0, 0]
    yield [0, whole * narrow / wide, 0, 0]
    yield [0, others, 0, 0]
    yield [0, others * wide, 0, 0]
    yield [0, others * narrow, 0, 0]
    of_keys = sharding.kv_bytes / tokens
    yield [0, -of_keys, 0, of_keys]  # all ranks' keys but for its own
    message = Lowering(replace(plan, layout=replace(plan.layout, pp=2)), Units(plan), Blocks()).message(0, 1)
    yield [0, 0.0 if message is None else message.payload / tokens, 0, 0]
