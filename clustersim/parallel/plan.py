"""Who computes what? The parts of a scenario that decide it, and the numbers that follow from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise
from typing import NamedTuple

from clustersim.common.units import Bytes
from clustersim.model.layer_stack import (
    Attention,
    LatentAttention,
    LayerRun,
    LayerSpec,
    RoutedMlp,
    Stack,
    cut,
    wide_ends,
)
from clustersim.model.layers import Layer, Shard, embedding, head, layer
from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.training import FullRecompute, Training
from clustersim.model.transformer import Model
from clustersim.parallel.data_parallel_strategy import FullyShard, GradientSync, Microbatches
from clustersim.parallel.layer_partition import Stage, ahead_at, dealt, stages
from clustersim.parallel.layout import Layout
from clustersim.parallel.parameter_groups import ParameterGroup, parameter_groups
from clustersim.parallel.tensor_parallel import Operands, Sharding
from clustersim.parallel.token_dispatch import Dispatch
from clustersim.program.placement import Placement, looped_placement
from clustersim.program.task import TokenDispatcher


class Run(NamedTuple):
    """Equal layers of a stage. again: their whole forward is run again; offloaded: what they keep goes to the host."""

    layers: LayerRun
    again: bool
    offloaded: bool


@dataclass(frozen=True)
class Plan:
    """A model, how it is trained, and how it is spread.

    place: which of so many pipeline ranks holds which stage, as the schedule has it; rows: that come to the experts of
    the ranks in question, over their mean.
    """

    model: Model
    training: Training
    layout: Layout
    place: Callable[[int], Placement] = looped_placement
    rows: float = 1.0

    @cached_property
    def placement(self) -> Placement:
        """On which pipeline rank each stage is."""
        return self.place(self.layout.pp)

    @property
    def microbatches(self) -> int:
        """Microbatches that each replica runs in one step."""
        return self.training.global_batch // (self.layout.dp * self.training.microbatch)

    @cached_property
    def stack(self) -> Stack:
        """The model's layers, those at its ends without narrow products where the recipe says so."""
        recipe = self.training.recipe
        if recipe.casts is None or not (recipe.first or recipe.last):
            return self.model.stack
        return wide_ends(self.model.stack, recipe.first, recipe.last)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Virtual stages in model order."""
        counts = dealt(self.layout.layers_per_stage, self.model.layers, self.placement)
        return stages(self.stack, counts, {self._ahead_at: self.model.ahead})

    @cached_property
    def _ahead_at(self) -> int:
        """The stage of layers that predict further tokens, if there are any."""
        return ahead_at(self.layout.layers_per_stage, len(self.placement.stage_ranks))

    def carried(self, stage: int) -> int:
        """How many activations go from a stage to the next: beside its own, one of each layer that predicts further."""
        return 1 + self.model.mtp_layers if self._ahead_at <= stage < len(self.placement.stage_ranks) - 1 else 1

    @cached_property
    def tables(self) -> tuple[int, ...]:
        """Pipeline ranks that have the embedding's matrix: for tokens, for further tokens, or for tied logits."""
        ranks, model = self.placement.stage_ranks, self.model
        further = [ranks[self._ahead_at]] if model.mtp_layers else []
        return tuple(dict.fromkeys([ranks[0], *further, *([ranks[-1]] if model.tied_embeddings else [])]))

    @cached_property
    def layers(self) -> Mapping[LayerSpec, Layer]:
        """Every kind of layer on one rank."""
        specs = dict.fromkeys((*self.model.specs, *(run.spec for run in self.stack)))
        return {spec: layer(self.model, spec, self.training, self.shard) for spec in specs}

    @cached_property
    def embedding(self) -> Layer:
        """The embedding on one rank."""
        return embedding(self.model, self.training, self.shard)

    @cached_property
    def head(self) -> Layer:
        """Final norm, logits and loss on one rank, with logits weights of their own."""
        return head(self.model, self.training, self.shard)

    @cached_property
    def tied_head(self) -> Layer:
        """The head beside the embedding whose matrix it uses, so that its logits have no weights of their own."""
        matrix = self.shard.rows(self.model.vocab) * self.model.hidden
        shared = [
            replace(operator, parameters=operator.parameters - matrix) if operator.linear else operator
            for operator in self.head.operators
        ]
        return replace(self.head, operators=tuple(shared))

    def head_of(self, stage: Stage) -> Layer:
        """The head as it is on a stage that has it; its rank may have the embedding, too."""
        beside = self._embeds(stage, 0) or (self.model.mtp_layers > 0 and self._embeds(stage, self._ahead_at))
        return self.tied_head if self.model.tied_embeddings and beside else self.head

    def _embeds(self, stage: Stage, other: int) -> bool:
        """Whether a stage is on the rank of another one, of this number."""
        return self.placement.stage_ranks[stage.number] == self.placement.stage_ranks[other]

    @cached_property
    def shared_embedding(self) -> Layer:
        """The embedding beside another on the same rank, whose weights it uses (if they are cut, as gathered there)."""
        without = (replace(operator, parameters=0) for operator in self.embedding.operators)
        return replace(self.embedding, operators=tuple(without))

    def embeddings_of(self, stage: Stage) -> tuple[Layer, ...]:
        """The embeddings of further tokens on a stage that predicts some; the rank may have its weights already."""
        first = self.shared_embedding if self._embeds(stage, 0) else self.embedding
        return (first, *[self.shared_embedding] * (stage.ahead - 1)) if stage.ahead else ()

    def units(self, stage: Stage) -> tuple[Layer, ...]:
        """A stage's embedding, layers and head, as far as it has them."""
        return tuple(unit for unit, many in self._units(stage) for _ in range(many))

    def parameters(self, stage: Stage, group: str | None = None) -> int:
        """Parameters of a stage on one rank. group: those of one group only."""
        units = self._units(stage)
        return sum(many * (unit.parameters if group is None else unit.counts.get(group, 0)) for unit, many in units)

    def _units(self, stage: Stage) -> list[tuple[Layer, int]]:
        """Equal neighbours among the units of a stage, and how many they are."""
        before = [(self.embedding, 1)] if stage.embedding else []
        further = [(item, 1) for item in self.embeddings_of(stage)]
        after = [(self.head_of(stage), 1)] if stage.head else []
        layers = [[(self.layers[run.spec], run.count) for run in part] for part in stage.parts]
        return [*before, *layers[0], *further, *layers[1], *after]

    @property
    def uneven(self) -> ExpertLoad | None:
        """How rows are spread over experts, where ranks have more or fewer of them."""
        spread = self.layout.ep > 1 and all(mixture.capacity is None for mixture in self.model.mixtures)
        return self.training.expert_load if spread and self.model.mixtures else None

    def load_numbers(self, stage: Stage) -> tuple[int | None, ...]:
        """For each layer of a stage the number of its load (`program.ExpertLoads`), None where all ranks do the same."""
        return self._load_numbers[stage.number]

    @cached_property
    def _load_numbers(self) -> tuple[tuple[int | None, ...], ...]:
        """By stage: routed layers are numbered in model order, those that predict further tokens last."""
        load, parts = self.uneven, [item.parts for item in self.stages]
        if load is None:
            return tuple((None,) * stage.layers for stage in self.stages)
        following = count(), count(sum(_routed(run) for stack, _ in parts for run in stack))
        return tuple(
            tuple(
                (next(numbers) if load.layered else 0) if _routed(run) else None
                for numbers, stack in zip(following, element, strict=True)
                for run in stack
                for _ in range(run.count)
            )
            for element in parts
        )

    @cached_property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """The groups into which the weights fall."""
        experts = any(mixture.alone is None for mixture in self.model.mixtures)
        return parameter_groups(self.layout, self.training, experts=experts)

    @cached_property
    def trained_groups(self) -> tuple[ParameterGroup, ...]:
        """Those that have gradients."""
        return tuple(group for group in self.parameter_groups if group.trained)

    def training_of(self, formats: WeightFormats) -> Training:
        """The training as one whose weights are all in these formats."""
        return replace(self.training, recipe=replace(self.training.recipe, weights=formats))

    @property
    def sums_whole_gradients(self) -> bool:
        """Whether several microbatches' gradients are summed on each rank before they are reduced."""
        sync = self.layout.gradient_sync
        overlapped = self.microbatches == 1 and sync is GradientSync.LAST_BACKWARD
        return sync is not GradientSync.EVERY_BACKWARD and not overlapped

    def sums_parts(self, group: ParameterGroup) -> bool:
        """Whether several microbatches' gradients are summed where they were scattered, before they cross replicas."""
        once = isinstance(self.layout.data, FullyShard) and self.layout.data.all_reduce is Microbatches.LAST
        return once and group.replicas > 1 and self.microbatches > 1 and not self.sums_whole_gradients

    def recomputed_layers(self, stage: Stage) -> int:
        """How many layers of a stage run their whole forward again."""
        match self.training.recompute:
            case FullRecompute(None):
                return stage.layers
            case FullRecompute(int() as layers):
                return min(layers, stage.layers - stage.ahead)
        return 0

    @property
    def unreduced_gradients_leave(self) -> bool:
        """Whether gradients go to the host as backward makes them, because no other rank has some to add."""
        return self.training.offload.gradients and all(group.ranks == 1 for group in self.parameter_groups)

    def offloaded_layers(self, stage: Stage) -> int:
        """How many layers of a stage, its first, have what they keep on the host."""
        activations = self.training.offload.activations
        return 0 if activations is None else activations.of(stage.layers)

    def runs(self, stage: Stage) -> tuple[Run, ...]:
        """A stage's layers in order, as runs of equal ones that are treated alike."""
        again, offloaded = self.recomputed_layers(stage), self.offloaded_layers(stage)
        edges = sorted({0, again, offloaded, stage.layers})
        return tuple(
            Run(run, again=begin < again, offloaded=begin < offloaded)
            for begin, end in pairwise(edges)
            for run in cut(stage.stack, begin, end - begin)
        )

    @cached_property
    def shard(self) -> Shard:
        """What one rank holds of a microbatch and a layer."""
        return Shard(
            batch=self.training.microbatch,
            sequence=self.training.sequence // self.layout.cp,
            keys=self.training.sequence,
            tp=self.layout.tp,
            sequence_parallel=self.layout.sequence_parallel,
            ep=self.layout.ep,
            etp=self.layout.expert_tensor,
            copied_there=self.layout.dispatcher is not TokenDispatcher.ALL_TO_ALL,
            load=self.rows,
        )

    @cached_property
    def activation(self) -> Bytes:
        """Bytes of the activation between layers, whole over tensor-parallel ranks: [batch, sequence / cp, hidden]."""
        shard = self.shard
        return float(shard.batch * shard.sequence * self.model.hidden * self.training.recipe.activations.bytes)

    def sharding(self, spec: LayerSpec | None = None, *, load: int | None = None) -> Sharding:
        """What the collectives of a part of the model need to know; spec: of a layer; load: its number."""
        form = self.training.recipe.activations
        plain = Sharding(self.layout, self.activation, 0.0, form)
        if spec is None:
            return plain
        casts, narrow = self.training.recipe.casts, self.training.recipe.products.narrow
        if casts is not None and casts.gathered and narrow is not None and not spec.wide:
            plain = replace(plain, operands=Operands(narrow, searched=casts.input.searched))
        if isinstance(spec.mlp, RoutedMlp):
            sent = None if spec.wide else self.training.recipe.dispatched
            tokens, row = self.shard.residual_tokens, float(self.model.hidden * form.bytes)
            plain = replace(plain, dispatch=Dispatch(self.layout, spec.mlp, tokens, row, form, load, sent))
        return plain if spec.attention is None else replace(plain, keys_values=self._keys_values(spec.attention))

    def _keys_values(self, attention: Attention) -> Bytes:
        """Bytes of the keys and values of the whole sequence on one tensor-parallel rank."""
        kv_heads = max(1, attention.kv_heads // self.layout.tp)
        values = attention.value_dim if isinstance(attention, LatentAttention) else attention.head_dim
        width = kv_heads * (attention.head_dim + values)
        return float(self.shard.batch * self.shard.keys * width * self.training.recipe.activations.bytes)

    def first_chunk(self, stage: Stage) -> bool:
        """Whether a stage is the first of the first pipeline rank, whose gradients nothing else hides."""
        return stage.number == self.placement.stages_on_rank(0)[0]

    def stages_of(self, pipeline_rank: int) -> tuple[Stage, ...]:
        """Virtual stages on one pipeline rank."""
        return tuple(self.stages[stage] for stage in self.placement.stages_on_rank(pipeline_rank))


def _routed(run: LayerRun) -> int:
    """How many layers of a run have experts."""
    return run.count if isinstance(run.spec.mlp, RoutedMlp) else 0
