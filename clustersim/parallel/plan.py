"""Which rank computes what? The sections of a scenario that decide it, and the quantities that follow from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise
from typing import NamedTuple

from clustersim.common.cached_method import cached_method
from clustersim.common.units import Bytes
from clustersim.model.documents import PackedBatch
from clustersim.model.flops import image_work
from clustersim.model.image_counts import ImageBatch, PackedImages
from clustersim.model.layer_stack import LayerGroup, LayerSpec, LayerStack, high_precision_ends, slice_layers
from clustersim.model.layers import LayerOperators, LayerShard, embedding_layer, head_layer, transformer_layer
from clustersim.model.model_ends import Projector
from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.model.operators import ENCODER, FROZEN, FROZEN_ENCODER
from clustersim.model.overheads import Accumulation
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.training import FullRecompute, NoRecompute, Training
from clustersim.model.transformer import Encoder, TransformerModel
from clustersim.parallel.attention_exchange import attention_exchange, ring_blocks
from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.data_parallel_strategy import FullyShard, GradientSync, ReductionFrequency
from clustersim.parallel.layer_partition import (
    PipelineStage,
    build_stages,
    first_model_stage,
    mtp_stage_index,
    partition_layers,
)
from clustersim.parallel.layer_sharding import GatheredOperands, LayerSharding
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import ENCODER_TP_GROUP, TP_GROUP, CommGroup
from clustersim.parallel.optimizer_factors import factor_ratio, keeps_factors
from clustersim.parallel.parameter_groups import ParameterGroup, parameter_groups
from clustersim.parallel.token_dispatch import TokenDispatch
from clustersim.program.placement import Placement, looped_placement
from clustersim.program.task import TokenDispatcher


class StageLayers(NamedTuple):
    """Equal layers of a stage, treated equally.

    recomputed: their whole forward is recomputed in backward; offloaded: their saved activations are offloaded to
    the host.
    """

    layers: LayerGroup
    recomputed: bool
    offloaded: bool


@dataclass(frozen=True)
class Plan:
    """A model, how it is trained, and how it is parallelized.

    placement_rule: placement of stages on a number of pipeline ranks, as the schedule defines it;
    expert_token_ratio: tokens routed to the experts of the ranks in question, relative to the mean; images: of a
    microbatch on one rank, if the model is an encoder of them.
    """

    model: TransformerModel
    training: Training
    layout: Layout
    placement_rule: Callable[[int], Placement] = looped_placement
    expert_token_ratio: float = 1.0
    images: PackedImages | None = None

    @cached_property
    def placement(self) -> Placement:
        """Pipeline rank of each stage."""
        return self.placement_rule(self.layout.pp)

    @property
    def microbatches(self) -> int:
        """Number of microbatches that each replica runs in one step."""
        return self.training.microbatch_count(self.layout.dp)

    @cached_property
    def stack(self) -> LayerStack:
        """The model's layers; without low-precision matmuls in the first and last ones where the recipe says so."""
        recipe = self.training.recipe
        if recipe.casts is None or not (recipe.num_layers_at_start_in_bf16 or recipe.num_layers_at_end_in_bf16):
            return self.model.stack
        return high_precision_ends(
            self.model.stack, recipe.num_layers_at_start_in_bf16, recipe.num_layers_at_end_in_bf16
        )

    @cached_property
    def stages(self) -> tuple[PipelineStage, ...]:
        """Virtual stages in model order."""
        counts = partition_layers(self.layout.layers_per_stage, self.model.layer_count, self.placement)
        mtp_layers = {self._mtp_stage: self.model.mtp_stack}
        stages = build_stages(self.stack, counts, mtp_layers, self.first_model_stage)
        if self.model.encoder is None:
            return stages
        return replace(stages[0], has_encoder=True), *stages[1:]

    @property
    def first_model_stage(self) -> int:
        """Index of the stage of the embedding: 0, but behind an encoder with ranks of its own."""
        return first_model_stage(self.layout.layers_per_stage)

    @cached_property
    def _mtp_stage(self) -> int:
        """Index of the stage that holds the multi-token prediction (MTP) layers, if there are any."""
        return mtp_stage_index(self.layout.layers_per_stage, len(self.placement.stage_ranks))

    def sent_activation_count(self, stage: int) -> int:
        """Number of activations that a stage sends to the next.

        One of its own, and behind the MTP stage one of each MTP layer.
        """
        return 1 + self.model.mtp_layers if self._mtp_stage <= stage < len(self.placement.stage_ranks) - 1 else 1

    def sent_bytes(self, stage: int) -> Bytes:
        """Bytes that a stage sends to the next, of all tensor-parallel ranks together.

        An encoder alone sends what its projector makes of a microbatch's images.
        """
        if stage >= self.first_model_stage or self.encoder is None:
            return self.sent_activation_count(stage) * self.activation_bytes
        return self.encoder.projected_bytes

    def tensor_group(self, stage: int) -> CommGroup | None:
        """The groups of ranks over which a stage is sharded; None: it is not."""
        if self.layout.encoder_ranks and stage < self.first_model_stage:
            return ENCODER_TP_GROUP if self.layout.encoder_layout.tp > 1 else None
        return TP_GROUP if self.layout.tp > 1 else None

    def receives_gradients(self, stage: int) -> bool:
        """Whether gradients are sent back to a stage: not to a frozen encoder alone."""
        if stage >= self.first_model_stage or self.encoder is None:
            return True
        return any(unit.has_backward for unit in self.stage_units(self.stages[stage]))

    @cached_property
    def embedding_ranks(self) -> tuple[int, ...]:
        """Pipeline ranks that hold the embedding table: for tokens, for MTP layers, or for tied logits."""
        ranks, model = self.placement.stage_ranks, self.model
        mtp_ranks = [ranks[self._mtp_stage]] if model.mtp_layers else []
        return tuple(
            dict.fromkeys([ranks[self.first_model_stage], *mtp_ranks, *([ranks[-1]] if model.tied_embeddings else [])])
        )

    @property
    def accumulation(self) -> Accumulation:
        """How weight gradients are accumulated; autograd adds nothing to the first one, unless a buffer is zeroed."""
        training = self.training
        is_added = training.accumulation is Accumulation.ADDED
        is_first = self.microbatches == 1 and not training.overheads.zero_grad
        return Accumulation.ASSIGNED if is_added and is_first else training.accumulation

    @property
    def keeps_weight_gradients(self) -> bool:
        """Whether a library keeps a gradient of each shape of weight, where its matmuls add to the sum."""
        return self.training.overheads.keeps_weight_gradients and self.accumulation is Accumulation.FUSED

    @cached_property
    def _layer_training(self) -> Training:
        """The training, with the accumulation of this number of microbatches."""
        training = self.training
        if self.accumulation is training.accumulation:
            return training
        return replace(training, overheads=replace(training.overheads, accumulation=self.accumulation))

    @cached_property
    def layer_by_spec(self) -> Mapping[LayerSpec, LayerOperators]:
        """Each kind of layer, sharded for one rank."""
        specs = dict.fromkeys((*self.model.distinct_specs, *(run.spec for run in self.stack)))
        layers = {spec: transformer_layer(self.model, spec, self._layer_training, self.layer_shard) for spec in specs}
        return {spec: self._grouped(layer) for spec, layer in layers.items()}

    def _grouped(self, layer: LayerOperators) -> LayerOperators:
        """A layer whose parameters are those of an encoder with degrees of its own, if this is its plan."""
        if not self.layout.is_encoder:
            return layer
        operators = (
            replace(operator, parameter_group=FROZEN_ENCODER if operator.parameter_group == FROZEN else ENCODER)
            for operator in layer.operators
        )
        return replace(layer, operators=tuple(operators))

    @cached_property
    def embedding(self) -> LayerOperators:
        """The embedding, sharded for one rank."""
        return self._grouped(embedding_layer(self.model, self._layer_training, self.layer_shard))

    @cached_property
    def head(self) -> LayerOperators:
        """Final norm, logits and loss, sharded for one rank, with untied logits weights."""
        return self._grouped(head_layer(self.model, self._layer_training, self.layer_shard))

    @cached_property
    def tied_head(self) -> LayerOperators:
        """The head on the rank of the embedding whose table it shares: its logits add no weights."""
        matrix = self.layer_shard.vocab_rows(self.model.vocab) * self.model.hidden
        operators = [
            replace(operator, parameter_count=operator.parameter_count - matrix) if operator.linear else operator
            for operator in self.head.operators
        ]
        return replace(self.head, operators=tuple(operators))

    def stage_head(self, stage: PipelineStage) -> LayerOperators:
        """The head of a stage that has it: tied if its rank also has the embedding and the model ties them."""
        has_embedding = self._shares_rank(stage, self.first_model_stage) or (
            self.model.mtp_layers > 0 and self._shares_rank(stage, self._mtp_stage)
        )
        return self.tied_head if self.model.tied_embeddings and has_embedding else self.head

    def _shares_rank(self, stage: PipelineStage, other_index: int) -> bool:
        """Whether a stage is on the same rank as the stage with this index."""
        return self.placement.stage_ranks[stage.index] == self.placement.stage_ranks[other_index]

    @cached_property
    def shared_embedding(self) -> LayerOperators:
        """An embedding on a rank that already has the table: without weights (sharded ones are already gathered)."""
        operators = (replace(operator, parameter_count=0) for operator in self.embedding.operators)
        return replace(self.embedding, operators=tuple(operators))

    def mtp_embeddings(self, stage: PipelineStage) -> tuple[LayerOperators, ...]:
        """Embeddings of the MTP layers of a stage; the rank may have the table already."""
        is_held = self._shares_rank(stage, self.first_model_stage)
        first = self.shared_embedding if is_held else self.embedding
        return (first, *[self.shared_embedding] * (stage.mtp_layer_count - 1)) if stage.mtp_layer_count else ()

    @cached_property
    def encoder(self) -> "EncoderPlan | None":
        """How the ranks of the first stage run the model's encoder, before its layers or alone, if it has one."""
        encoder = self.model.encoder
        if encoder is None:
            return None
        images = self._image_batch(encoder)
        return EncoderPlan.of_plan(self, encoder, self._even_images(encoder) if images is None else images.busiest)

    @cached_property
    def largest_encoder(self) -> "EncoderPlan | None":
        """The same for the microbatch with the most images, which decides how much memory is needed."""
        encoder = self.model.encoder
        images = None if encoder is None else self._image_batch(encoder)
        if encoder is None or images is None:
            return self.encoder
        return EncoderPlan.of_plan(self, encoder, images.largest)

    @property
    def image_imbalance(self) -> float | None:
        """Work of the encoder on the ranks that others wait for, over the mean of all; None where all have as much."""
        encoder = self.model.encoder
        images = None if encoder is None else self._image_batch(encoder)
        return None if images is None else images.imbalance

    @property
    def _shared_sequences(self) -> int:
        """Sequences of which the images are encoded at once: a microbatch's, of all replicas that share an encoder."""
        return self.training.microbatch * (self.layout.dp // self.layout.encoder_cells)

    def _even_images(self, encoder: Encoder) -> PackedImages:
        """Images of a microbatch on one rank, where all sequences have as many."""
        images = round(self._shared_sequences * encoder.samples)
        return PackedImages(-(-images // self.layout.image_shares), encoder.sample_tokens)

    def _image_batch(self, encoder: Encoder) -> ImageBatch | None:
        """The images of a step, where sequences differ in how many they have, or images in their size."""
        if encoder.counts is None:
            return None
        training, layout = self.training, self.layout
        waits = layout.data.shards_parameters or layout.ep > 1
        most, replicas = encoder.samples_held(training.sequence), layout.encoder_cells
        sizes = most, self.microbatches, replicas, self._shared_sequences
        return ImageBatch(encoder.counts, image_work(encoder), *sizes, waits, layout.image_shares)

    def stage_encoder(self, stage: PipelineStage) -> "EncoderPlan | None":
        """The encoder, on the stage that runs it."""
        return self.encoder if stage.has_encoder else None

    def stage_units(self, stage: PipelineStage) -> tuple[LayerOperators, ...]:
        """A stage's encoder, embedding, layers and head, as far as it has them."""
        return tuple(unit for unit, unit_count in self.counted_units(stage) for _ in range(unit_count))

    @cached_method
    def parameter_count(self, stage: PipelineStage, group: str | None = None) -> int:
        """Number of parameters of a stage on one rank. group: those of one parameter group only."""
        units = self.counted_units(stage)
        return sum(
            unit_count * (unit.parameter_count if group is None else unit.parameters_by_group.get(group, 0))
            for unit, unit_count in units
        )

    @cached_method
    def counted_units(self, stage: PipelineStage) -> tuple[tuple[LayerOperators, int], ...]:
        """Units of a stage as (unit, count), consecutive equal ones merged."""
        embedding_units = [(self.embedding, 1)] if stage.has_embedding else []
        mtp_units = [(mtp_embedding, 1) for mtp_embedding in self.mtp_embeddings(stage)]
        head_units = [(self.stage_head(stage), 1)] if stage.has_head else []
        layers = [[(self.layer_by_spec[run.spec], run.count) for run in stack] for stack in stage.stack_and_mtp]
        encoder = self.stage_encoder(stage)
        encoder_units = [] if encoder is None else encoder.plan.counted_units(encoder.stage)
        return (*encoder_units, *embedding_units, *layers[0], *mtp_units, *layers[1], *head_units)

    @property
    def expert_load(self) -> ExpertLoad | None:
        """Token distribution over experts, where ranks differ in how many tokens they get; else None."""
        is_uneven = self.layout.ep > 1 and all(moe.capacity_factor is None for moe in self.model.distinct_moes)
        return self.training.expert_load if is_uneven and self.model.distinct_moes else None

    def load_indices(self, stage: PipelineStage) -> tuple[int | None, ...]:
        """For each layer of a stage the index of its load factors (`program.ExpertLoads`); None: equal on all ranks."""
        return self._load_indices_by_stage[stage.index]

    @cached_property
    def _load_indices_by_stage(self) -> tuple[tuple[int | None, ...], ...]:
        """By stage: MoE layers are indexed in model order, MTP layers last."""
        load, stacks_by_stage = self.expert_load, [virtual_stage.stack_and_mtp for virtual_stage in self.stages]
        if load is None:
            return tuple((None,) * stage.layer_count for stage in self.stages)
        counters = count(), count(sum(_moe_layer_count(run) for stack, _ in stacks_by_stage for run in stack))
        return tuple(
            tuple(
                (next(counter) if load.varies_by_layer else 0) if _moe_layer_count(run) else None
                for counter, stack in zip(counters, stacks, strict=True)
                for run in stack
                for _ in range(run.count)
            )
            for stacks in stacks_by_stage
        )

    @cached_property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """The model's parameter groups."""
        experts, encoder = bool(self.model.distinct_routed_moes), self.model.encoder
        models = (self.model,) if encoder is None else (self.model, encoder.model)
        has_frozen = any(model.gradients.has_frozen for model in models)
        groups = parameter_groups(
            self.layout,
            self.training,
            experts=experts,
            frozen=has_frozen,
            indexer=self.model.trains_indexer_only,
        )
        if not any(map(keeps_factors, groups)):
            return groups  # whatever the layers are: groups are asked for of layouts that no layer can be built for
        stack, layers = self.model.stack, self.layer_by_spec
        return tuple(replace(group, factor_ratio=factor_ratio(group, stack, layers)) for group in groups)

    @cached_property
    def trained_groups(self) -> tuple[ParameterGroup, ...]:
        """Parameter groups with gradients."""
        return tuple(group for group in self.parameter_groups if group.is_trained)

    def with_weight_formats(self, formats: WeightFormats) -> Training:
        """The training with these formats for all weights."""
        return replace(self.training, recipe=replace(self.training.recipe, weight_formats=formats))

    @property
    def accumulates_full_gradients(self) -> bool:
        """Whether gradients of several microbatches are accumulated unsharded on each rank before they are reduced."""
        sync = self.layout.gradient_sync
        is_overlapped = self.microbatches == 1 and sync is GradientSync.LAST_BACKWARD
        return sync is not GradientSync.EVERY_BACKWARD and not is_overlapped

    def accumulates_sharded_gradients(self, group: ParameterGroup) -> bool:
        """Whether reduce-scattered gradients are accumulated over microbatches and then reduced across replicas."""
        reduces_once = (
            isinstance(self.layout.data, FullyShard)
            and self.layout.data.all_reduce is ReductionFrequency.LAST_MICROBATCH
        )
        return (
            reduces_once and group.replica_count > 1 and self.microbatches > 1 and not self.accumulates_full_gradients
        )

    def recomputed_layer_count(self, stage: PipelineStage) -> int:
        """Number of a stage's layers whose whole forward is recomputed."""
        match self.training.recompute:
            case FullRecompute(None):
                return stage.layer_count
            case FullRecompute(int() as layers):
                return min(layers, stage.layer_count - stage.mtp_layer_count)
        return 0

    @property
    def offloads_unreduced_gradients(self) -> bool:
        """Whether gradients are offloaded as backward produces them, because no other rank contributes to them."""
        return self.training.offload.offloads_gradients and all(group.dp_size == 1 for group in self.parameter_groups)

    def offloaded_layer_count(self, stage: PipelineStage) -> int:
        """Number of a stage's layers, from its first, whose saved activations are offloaded to the host."""
        activations = self.training.offload.activations
        return 0 if activations is None else activations.offloaded_layers(stage.layer_count)

    def layer_runs(self, stage: PipelineStage) -> tuple[StageLayers, ...]:
        """A stage's layers in order, grouped into equal ones that are treated equally."""
        recomputed_count, offloaded_count = self.recomputed_layer_count(stage), self.offloaded_layer_count(stage)
        edges = sorted({0, recomputed_count, offloaded_count, stage.layer_count})
        return tuple(
            StageLayers(run, recomputed=begin < recomputed_count, offloaded=begin < offloaded_count)
            for begin, end in pairwise(edges)
            for run in slice_layers(stage.stack, begin, end - begin)
        )

    @cached_property
    def layer_shard(self) -> LayerShard:
        """Dimensions of one rank's shard of a microbatch and a layer."""
        return LayerShard(
            batch=self.training.microbatch,
            sequence=self.training.sequence // self.layout.cp,
            keys=self.training.sequence,
            tp=self.layout.tp,
            sequence_parallel=self.layout.sequence_parallel,
            ep=self.layout.ep,
            etp=self.layout.effective_etp,
            permute_after_dispatch=self.layout.dispatcher is not TokenDispatcher.ALL_TO_ALL,
            receives_indices=self.layout.dispatcher.sends_indices,
            load_factor=self.expert_token_ratio,
            exchanging_ranks=self.layout.exchanging_ranks,
            gathers_keys=self.layout.cp > 1 and self.layout.cp_kind is ContextParallelKind.ALL_GATHER,
            ring_blocks=ring_blocks(self.layout, self.training),
            repeats_kv=self.training.overheads.repeats_kv,
            consecutive=self.layout.cp > 1 and not self.layout.cp_balanced,
            packed_batch=self._packed_batch,
        )

    @property
    def _packed_batch(self) -> PackedBatch | PackedImages | None:
        """The step's packed documents, or images."""
        documents, layout = self.training.documents, self.layout
        if documents is None:
            return self.images
        return PackedBatch(
            documents,
            self.training.sequence,
            layout.dp,
            self.microbatches,
            self.training.microbatch,
            layout.cp // layout.exchanging_ranks,
            layout.cp_balanced,
            layout.data.shards_parameters or layout.ep > 1,
        )

    @cached_property
    def activation_bytes(self) -> Bytes:
        """Bytes of the activation between layers, [batch, sequence / cp, hidden], not sharded over TP ranks."""
        shard = self.layer_shard
        return float(shard.batch * shard.sequence * self.model.hidden * self.training.recipe.activations.bytes)

    def layer_sharding(self, spec: LayerSpec | None = None, *, load_index: int | None = None) -> LayerSharding:
        """Parameters of the collectives of a layer or, without spec, of embedding and head.

        load_index: of its load factors.
        """
        activation_format = self.training.recipe.activations
        overheads = self.training.overheads
        sharding = LayerSharding(
            self.layout,
            self.activation_bytes,
            activation_format,
            has_copies=overheads.tensor_parallel_copies and not self.layout.tp_comm_overlap,
            gathers_per_linear=overheads.gathers_per_linear and not self.training.fuses_casts,
            reduces_per_linear=overheads.gathers_per_linear,
            gathers_logits=overheads.gathers_logits,
        )
        if spec is None:
            return sharding
        casts, low_precision = self.training.recipe.casts, self.training.recipe.matmul_formats.low_precision
        if casts is not None and casts.gathers_quantized and low_precision is not None and not spec.high_precision:
            sharding = replace(sharding, operands=GatheredOperands(low_precision, needs_amax=casts.input.has_amax_pass))
        if spec.moe is not None:
            wire_format = None if spec.high_precision else self.training.recipe.dispatch_format
            token_count, token_bytes = (
                self.layer_shard.residual_tokens,
                float(self.model.hidden * activation_format.bytes),
            )
            sharding = replace(
                sharding,
                dispatch=TokenDispatch(
                    self.layout, spec.moe, token_count, token_bytes, activation_format, load_index, wire_format
                ),
            )
        if spec.attention is None:
            return sharding
        context = attention_exchange(spec.attention, self.layout, self.layer_shard, activation_format)
        return replace(sharding, context=context)

    def is_first_chunk(self, stage: PipelineStage) -> bool:
        """Whether a stage is the first chunk of the first pipeline rank.

        Nothing overlaps the communication of its gradients.
        """
        return stage.index == self.placement.stages_on_rank(0)[0]

    def stages_on_rank(self, pipeline_rank: int) -> tuple[PipelineStage, ...]:
        """Virtual stages on one pipeline rank."""
        return tuple(self.stages[stage] for stage in self.placement.stages_on_rank(pipeline_rank))


@dataclass(frozen=True)
class EncoderPlan:
    """An encoder of images on the ranks of the first stage, all of whose layers are in one stage of its own plan.

    Frameworks run it without sequence and context parallelism (Megatron-LM, examples/multimodal/model.py): ranks that
    share a sequence all run the encoder for its images, or each of its replicas among them (`encoder_tp`) for as many,
    rounded up, after which they exchange what they made of them. Replicas on ranks of their own (`encoder_dp`) encode
    the images of all replicas of the model, microbatch by microbatch (DistTrain, Zhang et al. 2024, arXiv:2408.04275).

    shares: replicas that a microbatch's images are spread over; less than one where several microbatches share one.
    """

    plan: Plan
    stage: PipelineStage
    shares: float = 1

    @classmethod
    def of_plan(cls, plan: Plan, encoder: Encoder, images: PackedImages) -> "EncoderPlan":
        """The encoder of a plan's model. images: of a microbatch on one rank."""
        layout, training, stages = plan.layout, plan.training, len(plan.placement.stage_ranks)
        layers_per_stage = (encoder.model.layer_count, *(stages - 1) * (0,))
        own_layout = replace(layout.encoder_layout, layers_per_stage=layers_per_stage)
        own_training = replace(
            training,
            sequence=images.tokens,
            microbatch=images.count,
            global_batch=images.count * plan.microbatches * own_layout.dp,
            recompute=training.recompute if encoder.recomputed else NoRecompute(),
            offload=replace(training.offload, activations=None),
            documents=None,
            expert_load=None,
        )
        stage = PipelineStage(0, encoder.model.stack, has_embedding=True, has_head=True)
        own_plan = Plan(encoder.model, own_training, own_layout, plan.placement_rule, images=images)
        return cls(own_plan, stage, layout.image_shares * layout.encoder_cells / layout.dp)

    @property
    def projected_bytes(self) -> Bytes:
        """Bytes of the tokens that all replicas make of a microbatch's images."""
        return self.shares * self.output_bytes

    @property
    def output_bytes(self) -> Bytes:
        """Bytes of the tokens that the projector makes of the images on one rank."""
        head, training = self.plan.model.head, self.plan.training
        if not isinstance(head, Projector):
            raise TypeError(f"{self.plan.model.name} has no projector")
        tokens = training.microbatch * head.projected_tokens(training.sequence)
        return float(tokens * head.widths[-1] * training.recipe.activations.bytes)


def _moe_layer_count(run: LayerGroup) -> int:
    """Number of MoE layers in a group of equal layers."""
    return run.count if run.spec.moe is not None else 0
