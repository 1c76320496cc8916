"""How many parts are in a stage of n layers, and how many does it send for each microbatch?

As all layers are alike, a few n say it for any: those up to the number that is recomputed, and two more. The embedding
and the head are told apart. What is sent is what lowering makes of small plans of models of the same kind: of one layer
and of two, so that it is known what a layer sends, and what the ends of a stage do.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.lowering.training_step import lower
from clustersim.memory.activations import ActivationCounts, ActivationKind, Activations
from clustersim.model.layer_stack import LayerGroup, LayerSpec
from clustersim.model.presets import load_preset
from clustersim.model.training import FullRecompute, Training
from clustersim.model.transformer import TransformerModel, resize_model
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.planning.explorer.column_sizes import (
    BESIDE_DENSE,
    CAST,
    OF_ENDS,
    Row,
    columns,
    kept,
    of_kind,
    of_layers,
)
from clustersim.planning.explorer.expert_traffic import CUT, SPREAD
from clustersim.planning.explorer.settings import Space
from clustersim.planning.explorer.settings import recompute as way
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, CommOp, ComputeTask, SendTask, TokenDispatcher
from clustersim.results.explorer_tables import Table
from clustersim.schedules.one_f_one_b import OneFOneB

ROUNDS: Final = {
    CollectiveType.ALL_REDUCE: 2, CollectiveType.ALL_GATHER: 1, CollectiveType.REDUCE_SCATTER: 1, CollectiveType.SHIFT: 1,
    CollectiveType.SEND_RECV: 1,
}  # fmt: skip
"""Buffers that each rank of a ring sends, but for the factor (n - 1) / n."""
_SEQUENCE: Final = 128
_MODEL: Final = load_preset("llama-tiny")  # any, of equal layers
_BOTH: Final = (False, True)
_SENT_BY: Final = ("tp", "cp", "pp", "embedding")
_OPERANDS: Final = ("gather input", "gather output gradient", "gather input again")
"""Exchanges of what products read, in their format where it is cast before."""
_WIDE: Final = {"operand to tp": "activation to tp", "elements of operands to tp": "elements of tokens to tp"}
_SMALL: Final[dict[str, Any]] = {
    "layers": 6, "hidden": 264, "ffn": 512, "heads": 8, "kv_heads": 8, "head_dim": 33, "vocab": 512,
}  # fmt: skip
"""A hidden size that no adapter has as its rank: what is sent is told by its bytes."""


def rows(space: Space) -> dict[str, Table]:
    """Numbers of parts by what they are for: [content][columns], moments [content][moments][columns]."""
    of = _Rows(space)
    ends = {"embedding": _BOTH, "head": _BOTH}
    ways = {"recompute": space.values["recompute"]}
    models = {"model": space.values["model"]}
    routed = {role: space.table(of.routed(role), "recompute", "dispatcher") for role in of.of_experts}
    return {
        "kept": Table.of(of.kept, **ways, **ends),
        "moments": Table.of(of.moments, **ways, **ends),
        "parameters": Table.of(of.parameters, **ends),
        "cast": Table.of(of.cast, **ends),
        "gathered": Table.of(of.gathered, dropped=_BOTH, **ends),
        "units": Table.of(of.units, **ends),
        "tp": Table.of(of.role("tp"), **models, **ways, split=_BOTH, **ends),
        "cp": Table.of(of.role("cp"), **models, **ways, **ends),
        "pp": Table.of(of.role("pp"), **models, **ends),
        "tied": Table.of(of.role("embedding"), **models, **ends),
        **routed,
    }


@dataclass(frozen=True)
class _Rows:
    """Rows of the stages that a space has."""

    space: Space
    known: dict[tuple[Any, ...], "Sent"] = field(default_factory=dict)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return columns(self.space)

    @property
    def of_experts(self) -> tuple[str, ...]:
        """Roles in which rows of experts are sent."""
        return ("ep", "etp") if self.space.mixture else ()

    @cached_property
    def model(self) -> TransformerModel:
        """Any, where all layers are alike: how many there are of each part does not depend on which."""
        return self.space.models[0] if self.space.contents else _MODEL

    def named(self, counts: Mapping[str, float]) -> Row:
        """Numbers by name as a row."""
        return [counts.get(name, 0) for name in self.columns]

    def stages(self, most: int, embedding: bool, head: bool) -> Iterator[PipelineStage]:
        """A stage of each content; of layers of one kind, of up to so many, from which others follow."""
        specs = self.model.distinct_specs
        stacks = self.space.contents or [(LayerGroup(specs[0], layers),) * bool(layers) for layers in range(most + 3)]
        return (PipelineStage(1, stack, embedding, head) for stack in stacks)

    def kept(self, recompute: str, embedding: bool, head: bool) -> list[Row]:
        of = self._activations(recompute)
        stages = self.stages(_apart(recompute), embedding, head)
        return [self._row(recompute, of.saved_counts(stage)) for stage in stages]

    def moments(self, recompute: str, embedding: bool, head: bool) -> list[list[Row]]:
        of = self._activations(recompute)
        stages = self.stages(_apart(recompute), embedding, head)
        return [[self._row(recompute, moment) for moment in of.transient_counts(stage)] for stage in stages]

    def _activations(self, recompute: str) -> Activations:
        return Activations(Plan(self.model, Training(_SEQUENCE, 1, recompute=way(recompute)), Layout()))

    def _row(self, recompute: str, counts: ActivationCounts) -> Row:
        """Counts as a row: a kept layer's column is that of what is recomputed."""
        layer = kept(recompute) if recompute in self.space.selective else ActivationKind.LAYER_FULL.value
        found: dict[str, float] = defaultdict(float)
        for (part, spec), count in counts.items():
            name = layer if part is ActivationKind.LAYER_SAVED else part.value
            found[of_kind(name, 0 if spec is None else self.model.distinct_specs.index(spec))] += count
            if part is ActivationKind.LAYER_WEIGHT_GRADIENT and spec is not None:
                found[of_kind(BESIDE_DENSE, self.model.distinct_specs.index(spec))] += count
        return self.named(found)

    def parameters(self, embedding: bool, head: bool) -> list[Row]:
        return [self._whole(self._units(stage)) for stage in self.stages(0, embedding, head)]

    def cast(self, embedding: bool, head: bool) -> list[Row]:
        """Weights that are cast, of all layers of a stage."""
        stages, specs = self.stages(0, embedding, head), self.model.distinct_specs
        return [
            self.named({of_kind(CAST, specs.index(run.spec)): run.count for run in stage.stack}) for stage in stages
        ]

    def units(self, embedding: bool, head: bool) -> list[list[Row]]:
        """Parameters of each kind of unit that a stage has."""
        stages = self.stages(0, embedding, head)
        return [[self.named(dict.fromkeys(unit, 1)) for unit in dict.fromkeys(self._units(stage))] for stage in stages]

    def gathered(self, dropped: bool, embedding: bool, head: bool) -> list[list[Row]]:
        """Parameters of units that ZeRO-3 has gathered at once: neighbours, or all where none are dropped."""
        strategy = self.space.strategy(3)
        ahead = strategy.prefetch_depth if isinstance(strategy, FullyShard) else 0
        found = []
        for stage in self.stages(ahead, embedding, head):
            units = self._units(stage)
            many = ahead + 1 if dropped else len(units)
            windows = (units[place : place + many] for place in range(max(1, len(units) - many + 1)))
            found.append([self._whole(item) for item in dict.fromkeys(map(tuple, windows))])
        return found

    def _units(self, stage: PipelineStage) -> list[tuple[str, ...]]:
        """Columns of the parameters of each unit of a stage."""
        first, last, only = OF_ENDS
        kinds = (self.model.distinct_specs.index(run.spec) for run in stage.stack for _ in range(run.count))
        layers = [tuple(of_kind(name, kind) for name in of_layers(self.space).values()) for kind in kinds]
        before, after = [(first,)] * stage.has_embedding, [(only if stage.has_embedding else last,)] * stage.has_head
        return [*before, *layers, *after]

    def _whole(self, units: Iterable[tuple[str, ...]]) -> Row:
        return self.named(Counter(name for unit in units for name in unit))

    def role(self, role: str) -> Callable[..., list[Row]]:
        """What stages send in a role."""

        def ask(model: int, embedding: bool, head: bool, recompute: str = "none", split: bool = False) -> list[Row]:
            end = self.sent(model, 0, "none", split)[embedding, head][role]
            mode = recompute if recompute in self.space.selective else "none"
            found = []
            for numbers in self._layers(recompute):
                row = end.copy()
                for kind, (of_input, of_all) in enumerate(numbers):
                    again, kept = (self.sent(model, kind, item, split)[None][role] for item in ("full", mode))
                    row += of_input * again + of_all * kept
                found.append(row.tolist())
            return found

        return ask

    def routed(self, role: str) -> Callable[..., list[Row]]:
        """What stages send to the ranks of experts, or of parts of the same ones."""

        def ask(recompute: str, dispatcher: str) -> list[Row]:
            mode = recompute if recompute in self.space.selective else "none"
            found = []
            for numbers in self._layers(recompute):
                row = np.zeros(len(self.columns))
                for kind, (of_input, of_all) in enumerate(numbers):
                    ways = (self.sent(0, kind, item, True, dispatcher)[None][role] for item in ("full", mode))
                    row += sum(count * way for count, way in zip((of_input, of_all), ways, strict=True))
                found.append(row.tolist())
            return found

        return ask

    def _layers(self, recompute: str) -> Iterator[list[tuple[int, int]]]:
        """Of each content and kind of layer the number of those that are run again, and of the others."""
        of = self._activations(recompute)
        for stage in self.stages(_apart(recompute), embedding=False, head=False):
            counts = of.saved_counts(stage)
            specs = self.model.distinct_specs
            yield [
                (counts.get((ActivationKind.LAYER_INPUT, spec), 0), counts.get((ActivationKind.LAYER_SAVED, spec), 0))
                for spec in specs
            ]

    def sent(self, model: int, kind: int, mode: str, split: bool, dispatcher: str | None = None) -> "Sent":
        """What layers of a kind and the ends of stages send for a microbatch."""
        spec, own = self.space.kind(model, kind), self.space.models[model]
        small = own if self.space.mixture else resize_model(own, name="", **_SMALL)
        if not self.space.mixture:
            (spec,) = small.distinct_specs
        key = small, spec, mode, split, dispatcher
        if key not in self.known:
            one, two = (_Small(self, *key, layers).by_ends() for layers in (1, 2))
            self.known[key] = _of_layer(one, two, columns=self.columns)
        return self.known[key]


def _apart(recompute: str) -> int:
    """The layers that are told apart from all others: those that are recomputed as a whole."""
    chosen = way(recompute)
    return chosen.layers or 0 if isinstance(chosen, FullRecompute) else 0


Ends = tuple[bool, bool]
Sent = dict[Ends | None, dict[str, FloatArray]]
"""Rows by role: of a layer (None), and of stages without their layers, by their ends."""


def _of_layer(
    one: Mapping[Ends, dict[str, FloatArray]], two: Mapping[Ends, dict[str, FloatArray]], *, columns: Sequence[str]
) -> Sent:
    """What a layer sends, and the ends of stages, of what stages of one layer and of two do.

    What ends gather is as wide as activations, whatever the recipe.
    """
    middle = False, False
    layer = {role: row - one[middle][role] for role, row in two[middle].items()}
    found = {ends: {role: row - layer[role] for role, row in rows.items()} for ends, rows in one.items()}
    for row in (row for rows in found.values() for row in rows.values()):
        for narrow, wide in _WIDE.items():
            row[columns.index(wide)] += row[columns.index(narrow)]
            row[columns.index(narrow)] = 0.0
    return {None: layer} | found


@dataclass(frozen=True)
class _Small:
    """Small plans of so many layers of a kind on each pipeline rank."""

    rows: _Rows
    model: TransformerModel
    spec: LayerSpec
    recompute: str
    split: bool
    dispatcher: str | None
    layers: int

    def by_ends(self) -> dict[Ends, dict[str, FloatArray]]:
        """Rows by role of stages, by their ends."""
        found = {}
        for pp in (3, 1):
            plan = self._plan(pp)
            for stage, program in zip(plan.stages, programs(plan), strict=True):
                found[stage.has_embedding, stage.has_head] = self._roles(plan, exchanges(program))
        return found

    def _plan(self, pp: int) -> Plan:
        own = self.rows.space.scenario.training
        kept = {name: getattr(own, name) for name in ("early_stop", "attention", "lora")}
        training = Training(_SEQUENCE, 1, recompute=way(self.recompute), **kept)
        plain = Layout(tp=2, cp=2, pp=pp, sequence_parallel=self.split, layers_per_stage=(self.layers,) * pp)
        spread = None if self.dispatcher is None else TokenDispatcher(self.dispatcher)
        layout = plain if spread is None else replace(plain, ep=2, etp=2, dispatcher=spread)
        model = replace(self.model, stack=(LayerGroup(self.spec, self.layers * pp),))
        return Plan(model, training, layout)

    def _roles(self, plan: Plan, sent: Iterable[CommOp]) -> dict[str, FloatArray]:
        """What is sent in each role, in parts."""
        counts: dict[str, dict[str, float]] = {name: defaultdict(float) for name in (*_SENT_BY, "ep", "etp")}
        for exchange in sent:
            if exchange.name in (*SPREAD, *CUT):
                counts["etp" if exchange.name in CUT else "ep"][exchange.name] += 1
                continue
            role, column, size = _column(plan, exchange)
            if role in counts:
                counts[role][column] += ROUNDS[exchange.collective] * exchange.payload / size
        return {role: np.array(self.rows.named(found)) for role, found in counts.items()}


def _column(plan: Plan, exchange: CommOp) -> tuple[str, str, float]:
    """The role of an exchange, of which part it sends some, and the bytes of its buffer that are one of that part."""
    match exchange.comm_group:
        case "tp":
            return "tp", *_within_layers(plan, exchange)
        case "cp":
            return "cp", "keys and values to cp", plan.layer_sharding(plan.model.distinct_specs[0]).kv_bytes
        case "pp_next" | "pp_previous":
            return "pp", "message", exchange.payload
        case "embedding":  # of two ranks each sends half of twice the gradient
            return "embedding", "tied gradient", ROUNDS[exchange.collective] * exchange.payload
    return exchange.comm_group, "", 1.0


def _within_layers(plan: Plan, exchange: CommOp) -> tuple[str, float]:
    """What tensor-parallel ranks send: an activation, narrower ones (adapters, latent attention), or single bytes."""
    operand = exchange.name in _OPERANDS
    if exchange.payload == plan.activation_bytes:
        return "operand to tp" if operand else "activation to tp", plan.activation_bytes
    if operand or "adapter" in exchange.name or exchange.collective is not CollectiveType.ALL_REDUCE:
        name = "elements of operands to tp" if operand else "elements of tokens to tp"
        return name, plan.layer_shard.tokens * plan.training.recipe.activations.bytes
    return "tokens to tp", plan.layer_shard.tokens


def programs(plan: Plan) -> tuple[RankProgram, ...]:
    """What each pipeline rank of a plan runs."""
    return lower(plan, OneFOneB().order(plan.layout.pp, plan.microbatches)).programs


def exchanges(program: RankProgram) -> Iterator[CommOp]:
    """All that a rank sends, one by one."""
    for task in program.tasks:
        if isinstance(task, ComputeTask):
            yield from task.segment.comm_ops
        elif isinstance(task, CollectiveTask | SendTask):
            yield task.comm_op
