"""How many of each counted quantity does a stage of n layers have, and how many does it send per microbatch?

As all layers of a kind are equal, a few values of n determine all others: those up to the number of
recomputed layers, plus two. Stages with embedding and head are distinguished. What is sent is taken from
lowering small plans of models of the same kind, with one layer and with two, which separates the share of a
layer from that of stage ends.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.cached_method import cached_method
from clustersim.lowering.training_step import lower_step
from clustersim.memory.activations import ActivationCounts, ActivationKind, Activations
from clustersim.model.layer_stack import LayerGroup, LayerSpec
from clustersim.model.overheads import Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.model.transformer import TransformerModel, resize_model
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.planning.explorer.column_sizes import (
    CAST_COLUMN,
    END_PARAMETER_COLUMNS,
    EXPERT_GRADIENT_COLUMN,
    RowValues,
    column_names,
    kind_column,
    layer_parameter_columns,
    reused_parameter_columns,
    saved_column,
)
from clustersim.planning.explorer.expert_traffic import EP_OPS, ETP_OPS
from clustersim.planning.explorer.settings import ExplorerSpace
from clustersim.planning.explorer.settings import parse_recompute as way
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, CommOp, ComputeTask, SendTask, TokenDispatcher
from clustersim.results.explorer_tables import LookupTable
from clustersim.schedules.one_f_one_b import OneFOneB

RING_PASSES: Final = {
    CollectiveType.ALL_REDUCE: 2,
    CollectiveType.ALL_GATHER: 1,
    CollectiveType.REDUCE_SCATTER: 1,
    CollectiveType.SHIFT: 1,
    CollectiveType.SEND_RECV: 1,
}
"""Ring passes: buffers that each rank of a ring sends, up to the factor (n - 1) / n."""
_SEQUENCE: Final = 128
_MODEL: Final = load_preset("llama-tiny")  # any model with equal layers
_BOOLEANS: Final = (False, True)
_DENSE_COMM_GROUPS: Final = ("tp", "cp", "pp", "embedding")
_OPERAND_GATHERS: Final = ("gather input", "gather output gradient", "gather input again")
"""Collectives of matmul operands, which are sent in the operands' format where they are cast before."""
_HIGH_PRECISION_COLUMN: Final = {
    "operand to tp": "activation to tp",
    "elements of operands to tp": "elements of tokens to tp",
}
_SMALL_DIMENSIONS: Final[dict[str, Any]] = {
    "layers": 6, "hidden": 264, "ffn": 512, "heads": 8, "kv_heads": 8, "head_dim": 33, "vocab": 512,
}  # fmt: skip
"""A hidden size that no adapter has as its rank: comm ops are identified by their bytes."""


def stage_count_tables(space: ExplorerSpace) -> dict[str, LookupTable]:
    """Counts by purpose: [content][columns]; moments are [content][moments][columns]."""
    counts = _StageCounts(space)
    end_axes = {"embedding": _BOOLEANS, "head": _BOOLEANS}
    recompute_axis = {"recompute": space.setting_values["recompute"]}
    model_axis = {"model": space.setting_values["model"]}
    expert_tables = {
        comm_group: space.build_table(counts.expert_sent_in(comm_group), "recompute", "dispatcher")
        for comm_group in counts.expert_comm_groups
    }
    return {
        "kept": LookupTable.tabulate(counts.saved_counts, **recompute_axis, **end_axes),
        "moments": LookupTable.tabulate(counts.transient_counts, **recompute_axis, **end_axes),
        "parameters": LookupTable.tabulate(counts.parameter_counts, **end_axes),
        "cast": LookupTable.tabulate(counts.cast_counts, **end_axes),
        "gathered": LookupTable.tabulate(counts.gathered_parameters, dropped=_BOOLEANS, **end_axes),
        "units": LookupTable.tabulate(counts.unit_parameters, **end_axes),
        "tp": LookupTable.tabulate(counts.sent_in("tp"), **model_axis, **recompute_axis, split=_BOOLEANS, **end_axes),
        "cp": LookupTable.tabulate(counts.sent_in("cp"), **model_axis, **recompute_axis, **end_axes),
        "pp": LookupTable.tabulate(counts.sent_in("pp"), **model_axis, **end_axes),
        "tied": LookupTable.tabulate(counts.sent_in("embedding"), **model_axis, **end_axes),
        **expert_tables,
    }


@dataclass(frozen=True)
class _StageCounts:
    """Count rows of the stages of an explorer space."""

    space: ExplorerSpace

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return column_names(self.space)

    @property
    def expert_comm_groups(self) -> tuple[str, ...]:
        """The comm groups in which expert tokens are sent."""
        return ("ep", "etp") if self.space.is_moe else ()

    @cached_property
    def model(self) -> TransformerModel:
        """Any model if all layers are equal: counts do not depend on it then."""
        return self.space.models[0] if self.space.stage_contents else _MODEL

    def to_row(self, counts: Mapping[str, float]) -> RowValues:
        """Counts by column name as a row of all columns."""
        return [counts.get(name, 0) for name in self.columns]

    def sample_stages(self, max_distinct_layers: int, embedding: bool, head: bool) -> Iterator[PipelineStage]:
        """A stage for each content; or, with equal layers, stages of 0 ... max_distinct_layers + 2 layers."""
        specs = self.model.distinct_specs
        stacks = self.space.stage_contents or [
            (LayerGroup(specs[0], layers),) * bool(layers) for layers in range(max_distinct_layers + 3)
        ]
        return (PipelineStage(1, stack, embedding, head) for stack in stacks)

    def saved_counts(self, recompute: str, embedding: bool, head: bool) -> list[RowValues]:
        activations = self._plan_activations(recompute)
        stages = self.sample_stages(_fully_recomputed_layers(recompute), embedding, head)
        return [self._activation_row(recompute, activations.saved_counts(stage)) for stage in stages]

    def transient_counts(self, recompute: str, embedding: bool, head: bool) -> list[list[RowValues]]:
        activations = self._plan_activations(recompute)
        stages = self.sample_stages(_fully_recomputed_layers(recompute), embedding, head)
        return [
            [self._activation_row(recompute, counts) for counts in activations.transient_counts(stage)]
            for stage in stages
        ]

    def _plan_activations(self, recompute: str) -> Activations:
        return Activations(Plan(self.model, Training(_SEQUENCE, 1, recompute=way(recompute)), Layout()))

    def _activation_row(self, recompute: str, counts: ActivationCounts) -> RowValues:
        """Counts as a row; a saved layer counts in the column of its recompute policy."""
        layer_column = (
            saved_column(recompute) if recompute in self.space.selective_policies else ActivationKind.LAYER_FULL.value
        )
        totals: dict[str, float] = defaultdict(float)
        for (kind, spec), count in counts.items():
            name = layer_column if kind is ActivationKind.LAYER_SAVED else kind.value
            totals[kind_column(name, 0 if spec is None else self.model.distinct_specs.index(spec))] += count
            if kind is ActivationKind.LAYER_WEIGHT_GRADIENT and spec is not None:
                totals[kind_column(EXPERT_GRADIENT_COLUMN, self.model.distinct_specs.index(spec))] += count
        return self.to_row(totals)

    def parameter_counts(self, embedding: bool, head: bool) -> list[RowValues]:
        return [self._sum_units(self._unit_columns(stage)) for stage in self.sample_stages(0, embedding, head)]

    def cast_counts(self, embedding: bool, head: bool) -> list[RowValues]:
        """Weights that are cast, of all layers of a stage."""
        stages, specs = self.sample_stages(0, embedding, head), self.model.distinct_specs
        return [
            self.to_row({kind_column(CAST_COLUMN, specs.index(run.spec)): run.count for run in stage.stack})
            for stage in stages
        ]

    def unit_parameters(self, embedding: bool, head: bool) -> list[list[RowValues]]:
        """Parameters of each distinct unit (FSDP unit) of a stage."""
        stages = self.sample_stages(0, embedding, head)
        return [
            [self.to_row(dict.fromkeys(unit, 1)) for unit in dict.fromkeys(self._unit_columns(stage))]
            for stage in stages
        ]

    def gathered_parameters(self, dropped: bool, embedding: bool, head: bool) -> list[list[RowValues]]:
        """Parameters of units that ZeRO-3 holds gathered at once: a prefetch window, or all if none is resharded."""
        prefetch_depth = self.space.data_parallel_strategy(3).prefetch_depth
        window_rows = []
        for stage in self.sample_stages(prefetch_depth, embedding, head):
            units = self._unit_columns(stage)
            window_size = prefetch_depth + 1 if dropped else len(units)
            windows = (units[first : first + window_size] for first in range(max(1, len(units) - window_size + 1)))
            window_rows.append([self._sum_units(window) for window in dict.fromkeys(map(tuple, windows))])
        return window_rows

    def _unit_columns(self, stage: PipelineStage) -> list[tuple[str, ...]]:
        """Columns of the parameters that each unit of a stage holds or uses again."""
        first, last, only = END_PARAMETER_COLUMNS
        kinds = (self.model.distinct_specs.index(run.spec) for run in stage.stack for _ in range(run.count))
        held, reused = layer_parameter_columns(self.space), reused_parameter_columns(self.space)
        layers = [tuple(kind_column(name, kind) for name in (*held.values(), *reused.values())) for kind in kinds]
        before, after = [(first,)] * stage.has_embedding, [(only if stage.has_embedding else last,)] * stage.has_head
        return [*before, *layers, *after]

    def _sum_units(self, units: Iterable[tuple[str, ...]]) -> RowValues:
        return self.to_row(Counter(name for unit in units for name in unit))

    def sent_in(self, comm_group: str) -> Callable[..., list[RowValues]]:
        """A function that gives what stages send in a comm group."""

        def ask(
            model: int, embedding: bool, head: bool, recompute: str = "none", split: bool = False
        ) -> list[RowValues]:
            end_row = self.sent_rows(model, 0, "none", split)[embedding, head][comm_group]
            mode = recompute if recompute in self.space.selective_policies else "none"
            result = []
            for layer_counts in self._layer_counts(recompute):
                row = end_row.copy()
                for kind, (recomputed_count, saved_count) in enumerate(layer_counts):
                    recomputed_row, saved_row = (
                        self.sent_rows(model, kind, layer_mode, split)[None][comm_group]
                        for layer_mode in ("full", mode)
                    )
                    row += recomputed_count * recomputed_row + saved_count * saved_row
                result.append(row.tolist())
            return result

        return ask

    def expert_sent_in(self, comm_group: str) -> Callable[..., list[RowValues]]:
        """A function that gives what stages send to expert ranks (ep), or between shards of the same experts (etp)."""

        def ask(recompute: str, dispatcher: str) -> list[RowValues]:
            mode = recompute if recompute in self.space.selective_policies else "none"
            result = []
            for layer_counts in self._layer_counts(recompute):
                row = np.zeros(len(self.columns))
                for kind, (recomputed_count, saved_count) in enumerate(layer_counts):
                    layer_rows = (
                        self.sent_rows(0, kind, layer_mode, True, dispatcher)[None][comm_group]
                        for layer_mode in ("full", mode)
                    )
                    row += sum(
                        count * layer_row
                        for count, layer_row in zip((recomputed_count, saved_count), layer_rows, strict=True)
                    )
                result.append(row.tolist())
            return result

        return ask

    def _layer_counts(self, recompute: str) -> Iterator[list[tuple[int, int]]]:
        """For each content, by kind of layer, (fully recomputed layers, other layers)."""
        activations = self._plan_activations(recompute)
        for stage in self.sample_stages(_fully_recomputed_layers(recompute), embedding=False, head=False):
            counts = activations.saved_counts(stage)
            specs = self.model.distinct_specs
            yield [
                (counts.get((ActivationKind.LAYER_INPUT, spec), 0), counts.get((ActivationKind.LAYER_SAVED, spec), 0))
                for spec in specs
            ]

    def sent_rows(self, model: int, kind: int, mode: str, split: bool, dispatcher: str | None = None) -> "SentRows":
        """What a layer of a kind and the stage ends send per microbatch."""
        spec, full_model = self.space.layer_kind(model, kind), self.space.models[model]
        is_only = self.space.is_only_model
        small_model = full_model if is_only else resize_model(full_model, name="", **_SMALL_DIMENSIONS)
        if not is_only:
            (spec,) = small_model.distinct_specs
        return self._small_rows(small_model, spec, mode, split, dispatcher)

    @cached_method
    def _small_rows(self, *settings: Any) -> "SentRows":
        """settings: the fields of `_SmallLayerPlan`, less its layers."""
        one, two = (_SmallLayerPlan(self, *(*settings, layers)).rows_by_ends() for layers in (1, 2))
        return _split_layer_and_ends(one, two, columns=self.columns)


def _fully_recomputed_layers(recompute: str) -> int:
    """Number of fully recomputed layers per stage, which are distinguished from all others."""
    return way(recompute).layers or 0


Ends = tuple[bool, bool]
SentRows = dict[Ends | None, dict[str, FloatArray]]
"""Rows by comm group: of a layer (key None), and of stages without their layers, by (has embedding, has head)."""


def _split_layer_and_ends(
    one: Mapping[Ends, dict[str, FloatArray]], two: Mapping[Ends, dict[str, FloatArray]], *, columns: Sequence[str]
) -> SentRows:
    """Separate what a layer sends from what stage ends send, given stages of one layer and of two.

    What stage ends gather is in the activations' format, whatever the recipe.
    """
    middle = False, False
    layer = {comm_group: row - one[middle][comm_group] for comm_group, row in two[middle].items()}
    end_rows = {
        ends: {comm_group: row - layer[comm_group] for comm_group, row in rows.items()} for ends, rows in one.items()
    }
    for row in (row for rows in end_rows.values() for row in rows.values()):
        for low_column, high_column in _HIGH_PRECISION_COLUMN.items():
            row[columns.index(high_column)] += row[columns.index(low_column)]
            row[columns.index(low_column)] = 0.0
    return {None: layer} | end_rows


@dataclass(frozen=True)
class _SmallLayerPlan:
    """Small plans with a given number of layers of one kind on each pipeline rank."""

    counts: _StageCounts
    model: TransformerModel
    spec: LayerSpec
    recompute: str
    split: bool
    dispatcher: str | None
    layers: int

    def rows_by_ends(self) -> dict[Ends, dict[str, FloatArray]]:
        """Rows by comm group of each kind of stage, by (has embedding, has head)."""
        result = {}
        for pp in (3, 1):
            plan = self._build_plan(pp)
            for stage, program in zip(plan.stages, lower_programs(plan), strict=True):
                result[stage.has_embedding, stage.has_head] = self._sent_by_group(plan, iterate_comm_ops(program))
        return result

    def _build_plan(self, pp: int) -> Plan:
        training_spec = self.counts.space.scenario.training
        inherited = {name: getattr(training_spec, name) for name in ("early_stop", "attention", "lora")}
        gathering = Overheads(keeps_gathered_inputs=training_spec.overheads.keeps_gathered_inputs)
        sequence = self.model.sample_tokens or _SEQUENCE
        training = Training(sequence, 1, recompute=way(self.recompute), overheads=gathering, **inherited)
        cp = 2 if self.counts.space.setting_values["cp"] != (1,) else 1
        dense_layout = Layout(tp=2, cp=cp, pp=pp, sequence_parallel=self.split, layers_per_stage=(self.layers,) * pp)
        token_dispatcher = None if self.dispatcher is None else TokenDispatcher(self.dispatcher)
        layout = (
            dense_layout
            if token_dispatcher is None
            else replace(dense_layout, ep=2, etp=2, dispatcher=token_dispatcher)
        )
        model = replace(self.model, stack=(LayerGroup(self.spec, self.layers * pp),))
        return Plan(model, training, layout)

    def _sent_by_group(self, plan: Plan, comm_ops: Iterable[CommOp]) -> dict[str, FloatArray]:
        """Counts sent in each comm group, as rows."""
        counts: dict[str, dict[str, float]] = {name: defaultdict(float) for name in (*_DENSE_COMM_GROUPS, "ep", "etp")}
        for comm_op in comm_ops:
            if comm_op.name in (*EP_OPS, *ETP_OPS):
                counts["etp" if comm_op.name in ETP_OPS else "ep"][comm_op.name] += 1
                continue
            comm_group, column, size = _column_of(plan, comm_op)
            if comm_group in counts:
                counts[comm_group][column] += RING_PASSES[comm_op.collective] * comm_op.payload / size
        return {comm_group: np.array(self.counts.to_row(columns)) for comm_group, columns in counts.items()}


def _column_of(plan: Plan, comm_op: CommOp) -> tuple[str, str, float]:
    """Comm group of a comm op, the column it counts in, and the bytes of its buffer that make up one unit of it."""
    match comm_op.comm_group:
        case "tp":
            return "tp", *_tp_column(plan, comm_op)
        case "cp":
            return "cp", "keys and values to cp", plan.layer_sharding(plan.model.distinct_specs[0]).kv_bytes
        case "pp_next" | "pp_previous":
            return "pp", "message", comm_op.payload
        case "embedding":  # each of two ranks sends half of twice the gradient
            return "embedding", "tied gradient", RING_PASSES[comm_op.collective] * comm_op.payload
    return comm_op.comm_group, "", 1.0


def _tp_column(plan: Plan, comm_op: CommOp) -> tuple[str, float]:
    """Column and unit size of TP communication: activations and tensors several times as wide, smaller ones, or bytes.

    Smaller are those of adapters and of MLA; bytes are per token.
    """
    is_operand = comm_op.name in _OPERAND_GATHERS
    if comm_op.payload % plan.activation_bytes == 0:
        return "operand to tp" if is_operand else "activation to tp", plan.activation_bytes
    if is_operand or "adapter" in comm_op.name or comm_op.collective is not CollectiveType.ALL_REDUCE:
        name = "elements of operands to tp" if is_operand else "elements of tokens to tp"
        return name, plan.layer_shard.tokens * plan.training.recipe.activations.bytes
    return "tokens to tp", plan.layer_shard.tokens


def lower_programs(plan: Plan) -> tuple[RankProgram, ...]:
    """The program of each pipeline rank of a plan, under 1F1B."""
    return lower_step(plan, OneFOneB().order(plan.layout.pp, plan.microbatches)).programs


def iterate_comm_ops(program: RankProgram) -> Iterator[CommOp]:
    """All comm ops of a rank, one by one."""
    for task in program.tasks:
        if isinstance(task, ComputeTask):
            yield from task.segment.comm_ops
        elif isinstance(task, CollectiveTask | SendTask):
            yield task.comm_op
