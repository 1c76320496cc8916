"""How large are the parts of a model that one rank holds and sends, for every way to cut it?

Kept bytes are T (a + b k) for T tokens that attend to k keys: two sequences, of which one is twice as long, give a
and b. They are of one context-parallel rank; with more, T is smaller and k is not.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from clustersim.analysis.exploration import Table
from clustersim.lowering.passes import Lowering
from clustersim.lowering.tasklist import Blocks
from clustersim.lowering.units import Units
from clustersim.memory.activations import LAYER_PARTS, Activations, Part
from clustersim.parallel.plan import Plan
from clustersim.planning.explore_space import RECOMPUTES, Space
from clustersim.workload.operators import ADAPTERS, DENSE, QUANTIZED

SELECTIVE: Final = tuple(name for name in RECOMPUTES if name.startswith("selective"))
_CONSTANT: Final = (Part.LAYER_GRADIENT, Part.EMBEDDING_GRADIENT, Part.HEAD_GRADIENT)
_PARTS: Final = (Part.OUTPUT, Part.INPUT, Part.WHOLE, Part.EMBEDDING, Part.HEAD, Part.LOSS, Part.CAST, *_CONSTANT)
OF_LAYERS: Final = {
    DENSE: "layer parameters",
    QUANTIZED: "quantized parameters of a layer",
    ADAPTERS: "adapters' parameters of a layer",
}
"""Columns of a layer's parameters, by their group."""
PARAMETERS: Final = (
    *OF_LAYERS.values(),
    "embedding parameters",
    "head parameters",
    "parameters of the only stage's head",
)
SENT: Final = (
    "activation to tp",
    "tokens to tp",
    "ranks of adapters to tp",
    "keys and values to cp",
    "message",
    "tied gradient",
)
COLUMNS: Final = (*(part.value for part in _PARTS), *(f"layer kept, {mode}" for mode in SELECTIVE), *PARAMETERS, *SENT)
_LENGTH: Final = 64  # tokens for each tensor-parallel rank: any number that they divide

Row = list[float]


def sizes(space: Space) -> Table:
    """Bytes of every part, and numbers of parameters, [columns][features]; what cannot cut a model is missing."""
    known: dict[tuple[Any, ...], list[Row]] = {}

    def ask(model: int, precision: int, tp: int, split: bool) -> list[Row] | None:
        if (model, tp) not in space.cuts:
            return None
        key = model, space.precisions[precision].compute, tp, split
        if key not in known:
            known[key] = [*_columns(space, model=model, precision=precision, tp=tp, split=split)]
        head, only = (known[key][COLUMNS.index(name)][0] for name in PARAMETERS[-2:])
        return [*known[key], _constant((head - only) * space.precisions[precision].weights.gradients.bytes)]

    return space.table(ask, "model", "precision", "tp", "split")


def _columns(space: Space, **settings: Any) -> Iterator[Row]:
    """All columns but the last, which depends on the format of gradients."""
    once, twice = (space.plan(**settings, sequence=length * settings["tp"]) for length in (_LENGTH, 2 * _LENGTH))
    for part in _PARTS:
        of = _of(part)
        yield _constant(of(once)) if part in _CONSTANT else _proportional(of, once, twice)
    for mode in SELECTIVE:
        plans = (replace(plan, training=replace(plan.training, recompute=RECOMPUTES[mode])) for plan in (once, twice))
        yield _proportional(_of(Part.LAYER), *plans)
    alone = once.head_of(once.stages[0])
    (layer,) = once.layers.values()
    yield from (_constant(layer.counts.get(group, 0)) for group in OF_LAYERS)
    yield from (_constant(each.parameters) for each in (once.embedding, once.head, alone))
    yield from _sent(once)


def _of(part: Part) -> Callable[[Plan], float]:
    return lambda plan: Activations(plan).size(part, *(plan.model.specs if part in LAYER_PARTS else ()))


def _constant(size: float) -> Row:
    return [size, 0, 0, 0]


def _proportional(of: Callable[[Plan], float], once: Plan, twice: Plan) -> Row:
    """By tokens, and by tokens and keys."""
    tokens = once.training.sequence
    short, long = of(once) / tokens, of(twice) / (2 * tokens)
    return [0, 2 * short - long, (long - short) / tokens, 0]


def _sent(plan: Plan) -> Iterator[Row]:
    """What each rank of a ring sends: of an activation, of a byte and an element of each token, of keys and values.

    Last a message.
    """
    tokens, others = plan.training.sequence, (plan.layout.tp - 1) / plan.layout.tp
    yield [0, plan.activation / tokens * others, 0, 0]
    yield [0, others, 0, 0]
    yield [0, others * plan.training.recipe.activations.bytes, 0, 0]
    of_keys = plan.sharding(*plan.model.specs).keys_values / tokens
    yield [0, -of_keys, 0, of_keys]  # all ranks' keys but for its own
    message = Lowering(replace(plan, layout=replace(plan.layout, pp=2)), Units(plan), Blocks()).message(0, 1)
    yield [0, 0.0 if message is None else message.payload / tokens, 0, 0]
