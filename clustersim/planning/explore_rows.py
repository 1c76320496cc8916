"""How many parts are in a stage of n layers, and how many does it send for each microbatch?

As all layers are alike, a few n say it for any: those up to the number that is recomputed, and two more. The embedding
and the head are told apart. What is sent is what lowering makes of small plans of models of the same kind: of one layer
and of two, so that it is known what a layer sends, and what the ends of a stage do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from clustersim.analysis.exploration import Table
from clustersim.arrays import FloatArray
from clustersim.lowering.step import lower
from clustersim.memory.activations import Activations, Counts, Part
from clustersim.parallel.layout import Layout
from clustersim.parallel.pipeline import Stage
from clustersim.parallel.plan import Plan
from clustersim.planning.explore_sizes import COLUMNS, OF_LAYERS, PARAMETERS, SELECTIVE, Row
from clustersim.planning.explore_space import Space
from clustersim.planning.explore_space import recompute as way
from clustersim.program.program import RankProgram
from clustersim.program.task import Collective, Communicate, Compute, Exchange, Send
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.workload.presets import preset
from clustersim.workload.stack import LayerRun
from clustersim.workload.training import FullRecompute, Training
from clustersim.workload.transformer import Model, resized

ROUNDS: Final = {
    Collective.ALL_REDUCE: 2, Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1, Collective.SHIFT: 1,
    Collective.SEND_RECV: 1,
}  # fmt: skip
"""Buffers that each rank of a ring sends, but for the factor (n - 1) / n."""
_SEQUENCE: Final = 128
_MODEL: Final = preset("llama-tiny")  # any, of equal layers
_BOTH: Final = (False, True)
_SMALL: Final[dict[str, Any]] = {
    "layers": 6, "hidden": 264, "ffn": 512, "heads": 8, "kv_heads": 8, "head_dim": 33, "vocab": 512,
}  # fmt: skip
"""A hidden size that no adapter has as its rank: what is sent is told by its bytes."""


def rows(space: Space) -> dict[str, Table]:
    """Numbers of parts by what they are for: [layers][columns], moments [layers][moments][columns]."""
    ends = {"embedding": _BOTH, "head": _BOTH}
    ways = {"recompute": space.values["recompute"]}
    known: dict[tuple[Any, ...], Sent] = {}
    numbers = {name: [*_layers(str(name))] for name in ways["recompute"]}

    def sent(model: int, mode: str, split: bool) -> Sent:
        kind = resized(space.models[model], name="", **_SMALL), mode, split
        if kind not in known:
            known[kind] = _sent(*kind, space.scenario.training)
        return known[kind]

    def of_role(role: str) -> Callable[..., list[Row]]:
        def ask(model: int, embedding: bool, head: bool, recompute: str = "none", split: bool = False) -> list[Row]:
            end = sent(model, "none", split)[embedding, head][role]
            mode = recompute if recompute in SELECTIVE else "none"
            again, kept = (sent(model, each, split)[None][role] for each in ("full", mode))
            return [(end + of_input * again + of_all * kept).tolist() for of_input, of_all in numbers[recompute]]

        return ask

    models = {"model": space.values["model"]}
    return {
        "kept": Table.of(_kept, **ways, **ends),
        "moments": Table.of(_moments, **ways, **ends),
        "parameters": Table.of(_parameters, **ends),
        "tp": Table.of(of_role("tp"), **models, **ways, split=_BOTH, **ends),
        "cp": Table.of(of_role("cp"), **models, **ways, **ends),
        "pp": Table.of(of_role("pp"), **models, **ends),
        "tied": Table.of(of_role("embedding"), **models, **ends),
    }


def _lengths(recompute: str) -> range:
    """Numbers of layers from which others follow."""
    chosen = way(recompute)
    return range((chosen.layers or 0 if isinstance(chosen, FullRecompute) else 0) + 3)


def _row(counts: Mapping[str, float]) -> Row:
    return [counts.get(name, 0) for name in COLUMNS]


def _stages(recompute: str, embedding: bool, head: bool) -> Iterator[Stage]:
    (spec,) = _MODEL.specs
    return (Stage(1, (LayerRun(spec, layers),) * bool(layers), embedding, head) for layers in _lengths(recompute))


def _activations(recompute: str) -> tuple[Activations, Callable[[Counts], Row]]:
    """Those of a plan, and how their counts are a row: a kept layer's column is that of what is recomputed."""
    kept = f"layer kept, {recompute}" if recompute in SELECTIVE else Part.WHOLE.value

    def row(counts: Counts) -> Row:
        by_part = {part: count for (part, _), count in counts.items()}
        named = _row({part.value: count for part, count in by_part.items()})
        named[COLUMNS.index(kept)] += by_part.get(Part.LAYER, 0)
        return named

    plan = Plan(_MODEL, Training(_SEQUENCE, 1, recompute=way(recompute)), Layout())
    return Activations(plan), row


def _layers(recompute: str) -> Iterator[tuple[int, int]]:
    """Of each number of layers those that are run again, and the others."""
    of, _ = _activations(recompute)
    for stage in _stages(recompute, embedding=False, head=False):
        by_part = {part: count for (part, _), count in of.kept_parts(stage).items()}
        yield by_part.get(Part.INPUT, 0), by_part.get(Part.LAYER, 0)


def _kept(recompute: str, embedding: bool, head: bool) -> list[Row]:
    of, row = _activations(recompute)
    return [row(of.kept_parts(stage)) for stage in _stages(recompute, embedding, head)]


def _moments(recompute: str, embedding: bool, head: bool) -> list[list[Row]]:
    of, row = _activations(recompute)
    return [[row(moment) for moment in of.moments(stage)] for stage in _stages(recompute, embedding, head)]


def _parameters(embedding: bool, head: bool) -> list[Row]:
    first, last, only = PARAMETERS[-3:]
    ends = {first: int(embedding), only if embedding else last: int(head)}
    return [
        _row({**dict.fromkeys(OF_LAYERS.values(), stage.layers), **ends}) for stage in _stages("none", embedding, head)
    ]


Sent = dict[tuple[bool, bool] | None, dict[str, FloatArray]]
"""Rows by role: of a layer (None), and of stages without their layers, by their ends."""


def _sent(model: Model, recompute: str, split: bool, own: Training) -> Sent:
    """What layers and the ends of stages send for a microbatch."""
    one, two = (_sent_by(model, recompute, split, own, layers) for layers in (1, 2))
    middle = False, False
    layer = {role: row - one[middle][role] for role, row in two[middle].items()}
    return {None: layer} | {ends: {role: row - layer[role] for role, row in rows.items()} for ends, rows in one.items()}


def _sent_by(
    model: Model, recompute: str, split: bool, own: Training, layers: int
) -> dict[tuple[bool, bool], dict[str, FloatArray]]:
    """Rows by role of stages of so many layers, by their ends."""
    found = {}
    for pp in (3, 1):
        kept = {name: getattr(own, name) for name in ("early_stop", "attention", "lora")}
        training = Training(_SEQUENCE, 1, recompute=way(recompute), **kept)
        layout = Layout(tp=2, cp=2, pp=pp, sequence_parallel=split, layers_per_stage=(layers,) * pp)
        plan = Plan(model, training, layout)
        for stage, program in zip(plan.stages, programs(plan), strict=True):
            found[stage.embedding, stage.head] = _roles(plan, exchanges(program))
    return found


def _roles(plan: Plan, sent: Iterable[Exchange]) -> dict[str, FloatArray]:
    """What is sent in each role, in parts."""
    counts: dict[str, dict[str, float]] = {role: defaultdict(float) for role in ("tp", "cp", "pp", "embedding")}
    for exchange in sent:
        role, column, size = _column(plan, exchange)
        if role in counts:
            counts[role][column] += ROUNDS[exchange.collective] * exchange.payload / size
    return {role: np.array(_row(found)) for role, found in counts.items()}


def _column(plan: Plan, exchange: Exchange) -> tuple[str, str, float]:
    """The role of an exchange, of which part it sends some, and the bytes of its buffer that are one of that part."""
    match exchange.group:
        case "tp":
            return "tp", *_within_layers(plan, exchange)
        case "cp":
            return "cp", "keys and values to cp", plan.sharding(*plan.model.specs).keys_values
        case "pp_next" | "pp_previous":
            return "pp", "message", exchange.payload
        case "embedding":  # of two ranks each sends half of twice the gradient
            return "embedding", "tied gradient", ROUNDS[exchange.collective] * exchange.payload
    return exchange.group, "", 1.0


def _within_layers(plan: Plan, exchange: Exchange) -> tuple[str, float]:
    """What tensor-parallel ranks send: an activation, what is between an adapter's products, or single bytes."""
    if exchange.payload == plan.activation:
        return "activation to tp", plan.activation
    if "adapter" in exchange.name:
        return "ranks of adapters to tp", plan.shard.tokens * plan.training.recipe.activations.bytes
    return "tokens to tp", plan.shard.tokens


def programs(plan: Plan) -> tuple[RankProgram, ...]:
    """What each pipeline rank of a plan runs."""
    return lower(plan, OneFOneB().order(plan.layout.pp, plan.microbatches)).programs


def exchanges(program: RankProgram) -> Iterator[Exchange]:
    """All that a rank sends, one by one."""
    for task in program.tasks:
        if isinstance(task, Compute):
            yield from task.block.exchanges
        elif isinstance(task, Communicate | Send):
            yield task.exchange
