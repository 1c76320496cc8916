"""What must a stage keep from forward to backward, and what does it need temporarily?

Saved for each microbatch in flight: what every operator's backward reads, or less with recomputation: full
recomputation saves each layer's input, selective recomputation drops what its modules save. A stage's
output is read by the next stage's first layer only, so it is not needed here; unless it is released once it
is sent, the autograd graph holds it.

Backward needs temporary memory while it frees what it has passed: first the gradient of the logits with the
loss's FP32 softmax, then the gradient of the logits' weight, then those of the last layer (which
recomputation has restored), at the end the embedding's. A weight's gradient exists once in the activations'
format before it is accumulated (autograd; Megatron-LM's fused accumulation allocates the same size for its
hooks, in `LinearWithGradAccumulationAndAsyncCommunication`). ZeRO-3's gradients are counted with its
gathered units. A frozen weight has no gradient; one that is stored in fewer bits is unpacked while its
matmul runs.

Where backward is split, the input gradient (dgrad) frees everything except what the weight gradients
(wgrad) need: the inputs of linear layers and, in addition, the gradients of their outputs (in a GPT layer
32 of 34 s b h bytes, and the scores). Recomputed layers are restored to that extent, so that more is held
for wgrad than was saved. Everything is counted by kind (`ActivationKind`); counts do not depend on sizes.
Reference: Korthikanti et al. 2022, sections 4 and 5; Qi et al. 2023 (arXiv:2401.10241), section 2.3.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from clustersim.common.cached_method import cached_by
from clustersim.common.dtypes import DType
from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes
from clustersim.memory.layer_gradients import activation_gradient_bytes
from clustersim.model import memory_bound
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.layers import LayerOperators
from clustersim.model.linear_loss import LOSSES_WITH_MATMUL, logit_share
from clustersim.model.training import (
    DotsSaveableRecompute,
    LossImplementation,
    Recompute,
    SelectiveOpRecompute,
    SelectiveRecompute,
)
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.plan import Plan, StageLayers
from clustersim.program.action import ActionKind


class ActivationKind(IdentityEnum):
    """Kinds of activation memory, each of one microbatch on one rank.

    STAGE_OUTPUT: what a stage sends, if it is not released; LAYER_INPUT: saved by a fully recomputed layer;
    LAYER_SAVED: saved by other layers, under the recomputation policy; LAYER_FULL: all that a layer's backward
    reads; EMBEDDING_SAVED, HEAD_SAVED: saved by these; LOSS_GRADIENT: gradients of the logits with the loss's
    softmax; CAST_GRADIENT: gradients of the logits in its place; METRIC_COPIES: logits in FP32 and their log-softmax,
    of a metric; KEPT_LOGITS: logits that are kept until then; *_WGRAD: held for deferred weight gradients;
    LAYER_GRADIENTS: gradients of a layer's activations while its backward runs;
    *_WEIGHT_GRADIENT: gradient of the largest weight before it is accumulated (or a weight that is unpacked).
    """

    STAGE_OUTPUT = "stage output"
    LAYER_INPUT = "layer input"
    LAYER_SAVED = "kept layer"
    LAYER_FULL = "whole layer"
    EMBEDDING_SAVED = "embedding"
    HEAD_SAVED = "head"
    LOSS_GRADIENT = "loss gradients"
    CAST_GRADIENT = "cast gradients"
    METRIC_COPIES = "copies of a metric"
    KEPT_LOGITS = "kept logits"
    LAYER_WGRAD = "waiting layer"
    EMBEDDING_WGRAD = "waiting embedding"
    HEAD_WGRAD = "waiting head"
    LAYER_GRADIENTS = "layer gradients"
    LAYER_WEIGHT_GRADIENT = "layer weight gradient"
    EMBEDDING_WEIGHT_GRADIENT = "embedding weight gradient"
    HEAD_WEIGHT_GRADIENT = "head weight gradient"


_SUMMED_GRADIENTS: Final = 3  # two, and their sum
ActivationKey = tuple[ActivationKind, LayerSpec | None]
"""A kind of activation and, for layers, the layer specification."""
ActivationCounts = Mapping[ActivationKey, int]
"""How many there are of each."""
ActivationBytes = tuple[Bytes, Bytes, Bytes]
"""Bytes per microbatch: saved until its backward, held between dgrad and wgrad, and temporary in a backward."""
_WGRAD_KIND: Final = {
    ActivationKind.LAYER_SAVED: ActivationKind.LAYER_WGRAD,
    ActivationKind.LAYER_INPUT: ActivationKind.LAYER_WGRAD,
    ActivationKind.HEAD_SAVED: ActivationKind.HEAD_WGRAD,
}


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one rank of a plan."""

    plan: Plan

    def _content_key(self, stage: PipelineStage, kind: ActionKind) -> tuple[Hashable, ...]:
        ends = stage.has_encoder, stage.has_embedding, stage.has_head
        return stage.stack, ends, self.plan.sent_activation_count(stage.index), kind

    @cached_by(_content_key)
    def stage_bytes(self, stage: PipelineStage, kind: ActionKind) -> ActivationBytes:
        """(`saved_bytes`, `wgrad_bytes`, `transient_bytes`) of a stage; cached for stages with the same content."""
        sizes = self.saved_bytes(stage), self.wgrad_bytes(stage), self.transient_bytes(stage, kind)
        return self._with_encoder(stage, kind, sizes)

    def _with_encoder(self, stage: PipelineStage, kind: ActionKind, sizes: ActivationBytes) -> ActivationBytes:
        """Bytes of a stage with those of the encoder that it runs, whose backward begins when its own has ended.

        What exists while a layer of a frozen encoder runs forward counts as temporary in the backward of the same
        microbatch, when the stage holds its own activations, too.
        """
        encoder = self.plan.largest_encoder if stage.has_encoder else None
        if encoder is None:
            return sizes
        saved, for_wgrad, transient = Activations(encoder.plan).stage_bytes(encoder.stage, kind)
        own_saved, own_wgrad, own_transient = sizes
        freed = 0.0 if kind is ActionKind.WEIGHT_GRADIENT else own_saved
        forward = max(unit.forward_bytes for unit in encoder.plan.stage_units(encoder.stage))
        temporary = max(own_transient, transient - freed, forward - own_saved)
        if not (stage.has_embedding or self.plan.layout.deallocate_pipeline_outputs):
            # which an encoder alone sends
            saved += encoder.output_bytes if self.plan.layout.encoder_ranks else encoder.projected_bytes
        return own_saved + saved, own_wgrad + for_wgrad, temporary

    def saved_bytes(self, stage: PipelineStage) -> Bytes:
        """Bytes that one microbatch saves on a stage from forward to backward."""
        return self._total_bytes(self.saved_counts(stage))

    def wgrad_bytes(self, stage: PipelineStage) -> Bytes:
        """Bytes that one microbatch holds on a stage from its input gradients to its weight gradients."""
        counts = Counter(_end_counts(stage, ActivationKind.EMBEDDING_WGRAD, ActivationKind.HEAD_WGRAD))
        for run in stage.stack:
            counts[ActivationKind.LAYER_WGRAD, run.spec] += run.count
        return self._total_bytes(counts)

    def transient_bytes(self, stage: PipelineStage, kind: ActionKind = ActionKind.BACKWARD) -> Bytes:
        """Peak temporary bytes of a backward of one microbatch, or half of it, in addition to what was saved."""
        return max((0.0, *map(self._total_bytes, self.transient_counts(stage, kind))))

    def saved_counts(self, stage: PipelineStage) -> ActivationCounts:
        """What one microbatch saves on a stage."""
        is_sent = not stage.has_head and stage.index >= self.plan.first_model_stage
        output_count = self.plan.sent_activation_count(stage.index) if is_sent else 0
        counts = Counter(
            {
                **_end_counts(stage, ActivationKind.EMBEDDING_SAVED, ActivationKind.HEAD_SAVED),
                (ActivationKind.STAGE_OUTPUT, None): output_count,
            }
        )
        for run in self.plan.layer_runs(stage):
            counts[saved_key(run)] += 0 if run.offloaded else run.layers.count
        return counts

    def layer_bytes_of(self, run: StageLayers) -> Bytes:
        """Bytes that one microbatch saves of one layer of a run, on device or host."""
        return self.bytes_of(*saved_key(run))

    def host_bytes(self, stage: PipelineStage) -> Bytes:
        """Bytes that one microbatch of a stage keeps on the host."""
        return sum(run.layers.count * self.layer_bytes_of(run) for run in self.plan.layer_runs(stage) if run.offloaded)

    def offload_buffer_bytes(self, stages: Iterable[PipelineStage]) -> Bytes:
        """Bytes of offloaded layers that are on the device at once: the largest ones, up to the number of buffers.

        A layer's are there from its forward's start until they are copied out, and from the start of the copy back
        to its backward's end.
        """
        offload = self.plan.training.offload.activations
        if offload is None:
            return 0.0
        runs = [run for stage in stages for run in self.plan.layer_runs(stage) if run.offloaded]
        sizes = (
            size for run in runs for size in [self.layer_bytes_of(run)] * min(run.layers.count, offload.buffer_count)
        )
        return sum(sorted(sizes, reverse=True)[: offload.buffer_count])

    def transient_counts(
        self, stage: PipelineStage, kind: ActionKind = ActionKind.BACKWARD
    ) -> Iterator[ActivationCounts]:
        """Temporary needs of a pass, beyond what was saved, at each possible peak; freed kinds are negative.

        Where more is held for wgrad than was saved of a layer, the peak is at the first such layer of a run.
        """
        if kind is ActionKind.WEIGHT_GRADIENT:
            yield from _weight_gradient_counts(stage)
            return
        is_full_backward = kind is ActionKind.BACKWARD
        has_metrics = stage.has_head and self.plan.training.overheads.cross_entropy_metrics > 0
        freed: Counter[ActivationKey] = Counter()
        if stage.has_head:
            yield {(ActivationKind.LOSS_GRADIENT, None): 1}
            yield {
                (ActivationKind.CAST_GRADIENT, None): 1,
                (ActivationKind.HEAD_WEIGHT_GRADIENT, None): int(is_full_backward),
            }
            freed.update(_freed_counts((ActivationKind.HEAD_SAVED, None), 1, is_full_backward))
            freed.subtract({(ActivationKind.KEPT_LOGITS, None): int(has_metrics)})
        runs = self.plan.layer_runs(stage)
        for is_mtp, embedding_count in ((True, stage.mtp_layer_count), (False, stage.has_embedding)):
            for run in (layer_run for layer_run in reversed(runs) if layer_run.layers.spec.is_mtp is is_mtp):
                yield from _backward_counts(run, freed, is_full_backward)
                freed.update(_freed_by_run(run, run.layers.count, is_full_backward))
            if embedding_count:
                counts: Counter[ActivationKey] = Counter(
                    {(ActivationKind.EMBEDDING_WEIGHT_GRADIENT, None): int(is_full_backward)}
                )
                counts.subtract(freed)
                yield counts
        if has_metrics:
            metric_counts: Counter[ActivationKey] = Counter({(ActivationKind.METRIC_COPIES, None): 1})
            metric_counts.subtract(freed)
            yield metric_counts

    def bytes_of(self, kind: ActivationKind, spec: LayerSpec | None = None) -> Bytes:
        """Bytes of a kind. spec: the layer specification, for a kind of layer memory."""
        return float(_STAGE_SIZES[kind](self) if spec is None else _LAYER_SIZES[kind](self, spec))

    def _total_bytes(self, counts: ActivationCounts) -> Bytes:
        return float(sum(count * self.bytes_of(*kind) for kind, count in counts.items() if count))

    def weight_gradient_bytes(self, layer: LayerOperators) -> Bytes:
        """Bytes of the gradient of a layer's largest weight before accumulation, or of the largest unpacked weight."""
        is_sharded = self.plan.layout.data.shards_parameters and not self.plan.accumulates_full_gradients
        gathered_groups = {group.name for group in self.plan.parameter_groups if is_sharded and group.shard_count > 1}
        resident_operators = (
            operator
            for operator in layer.operators
            if operator.weight_gradient and operator.parameter_group not in gathered_groups
        )
        unpacked = max((operator.dequantized_bytes for operator in layer.operators), default=0.0)
        return max(
            unpacked,
            float(max((operator.parameter_count for operator in resident_operators), default=0) * self.element_bytes),
        )

    def layer_weight_gradient_bytes(self, spec: LayerSpec) -> Bytes:
        """The same of a layer's weights; gradients that stay for good (`memory.kept_gradients`) are not temporary."""
        layer = self.plan.layer_by_spec[spec]
        if self.plan.keeps_weight_gradients:
            return max((operator.dequantized_bytes for operator in layer.operators), default=0.0)
        return self.weight_gradient_bytes(layer)

    @property
    def last_layer_bytes(self) -> Bytes:
        """Bytes of activations and their gradients when only the largest layer is left for backward."""
        kinds = ActivationKind.LAYER_FULL, ActivationKind.LAYER_GRADIENTS
        sizes = (sum(self.bytes_of(kind, spec) for kind in kinds) for spec in self.plan.model.distinct_specs)
        return max(sizes, default=0.0)

    def layer_gradient_bytes(self, spec: LayerSpec) -> Bytes:
        """Bytes of the gradients of a layer's activations, beyond what its backward has freed by then.

        Those of an input that autograd keeps gathered under sequence parallelism are full tensors. Two linear layers
        read it, and autograd adds gradients of tensor subclasses out of place (`accumulate` in
        torch/csrc/autograd/input_buffer.cpp).
        """
        shard, keeps_gathered = self.plan.layer_shard, self.plan.training.overheads.keeps_gathered_inputs
        is_gathered = keeps_gathered and shard.sequence_parallel and shard.tp > 1
        copies = _SUMMED_GRADIENTS if is_gathered else 1
        return activation_gradient_bytes(self.plan.layer_by_spec[spec], self.element_bytes, copies)

    @property
    def output_bytes(self) -> Bytes:
        """Bytes of a stage's output that stay until its backward."""
        shard = self.plan.layer_shard
        return (
            0.0
            if self.plan.layout.deallocate_pipeline_outputs
            else shard.residual_tokens * self.plan.model.hidden * self.element_bytes
        )

    @property
    def element_bytes(self) -> Bytes:
        """Bytes of an activation's element."""
        return self.plan.training.recipe.activations.bytes

    @property
    def loss_gradient_bytes(self) -> Bytes:
        """Bytes per logit of its gradients, beyond what the loss saves (mostly an FP32 softmax).

        PyTorch's loss makes two gradients in FP32, of the negative log-likelihood and of the log-softmax; a chunked
        loss puts them in place of logits that are freed; one that runs with its matmul has a part's logits and their
        gradient, PyTorch's loss of a part its FP32 copy, log-softmax and gradient, too; the others compute the
        gradient in the softmax's place and cast it, those of `softmax_copy` by way of a copy in FP32.
        """
        z_gradient = 0 if self._z_loss is None else DType.FP32.bytes  # which exists until it is added to the other
        match self.plan.training.loss:
            case LossImplementation.TORCH | LossImplementation.TORCH_FP32:
                return 2 * DType.FP32.bytes + z_gradient
            case (
                LossImplementation.CHUNKED
                | LossImplementation.CUT_CROSS_ENTROPY
                | LossImplementation.LIGER
                | LossImplementation.LIGER_FP32_SUM
            ):
                return self.element_bytes * self._logit_share
            case LossImplementation.FUSED_LINEAR:
                return 2 * self.element_bytes * self._logit_share
            case LossImplementation.CHUNKED_NLL:
                return (2 * self.element_bytes + 3 * DType.FP32.bytes + z_gradient) * self._logit_share
            case LossImplementation.VOCAB_PARALLEL if self.plan.training.overheads.softmax_copy:
                return self.element_bytes + DType.FP32.bytes
        return self.element_bytes

    @property
    def cast_gradient_bytes(self) -> Bytes:
        """Bytes per logit of the gradient that the output matrix's backward reads, beyond what the loss saves."""
        if self.plan.training.loss in LOSSES_WITH_MATMUL:
            return self.loss_gradient_bytes
        return self.element_bytes - self.loss_saved_bytes

    @property
    def _logit_share(self) -> float:
        """The part of the logits that exists at once."""
        shard, model = self.plan.layer_shard, self.plan.model
        vocab_rows = shard.vocab_rows(model.vocab)
        return logit_share(self.plan.training.loss, shard.tokens, hidden=model.hidden, vocab_rows=vocab_rows)

    @property
    def loss_accumulation_bytes(self) -> Bytes:
        """Bytes of what a loss adds up over its parts, in addition to the gradients that every loss returns.

        The gradient of the hidden states in FP32 (Megatron-LM's linear_cross_entropy), or that of the output matrix
        from one chunk while it is added to the sum (`chunked_nll`), with its copy in FP32 (`liger_fp32_sum`).
        """
        shard, hidden = self.plan.layer_shard, self.plan.model.hidden
        match self.plan.training.loss:
            case LossImplementation.CUT_CROSS_ENTROPY:
                return shard.tokens * hidden * DType.FP32.bytes
            case LossImplementation.CHUNKED_NLL:
                return shard.vocab_rows(self.plan.model.vocab) * hidden * self.element_bytes
            case LossImplementation.LIGER_FP32_SUM:
                return shard.vocab_rows(self.plan.model.vocab) * hidden * (self.element_bytes + DType.FP32.bytes)
        return 0.0

    @property
    def loss_saved_bytes(self) -> Bytes:
        """Bytes per logit that the loss saves, z-loss included."""
        specs = (memory_bound.loss_spec(self.plan.training.loss), self._z_loss)
        return sum(spec.saved.bytes(self.plan.training.recipe.activations, 1) for spec in specs if spec is not None)

    @property
    def _z_loss(self) -> memory_bound.MemoryBoundSpec | None:
        """Passes of z-loss, if it has its own."""
        training = self.plan.training
        return memory_bound.z_loss_spec(training.loss) if training.z_loss else None

    @property
    def logit_count(self) -> int:
        """Elements of the logits on this rank."""
        return self.plan.layer_shard.tokens * self.plan.layer_shard.vocab_rows(self.plan.model.vocab)

    def saved_layer_bytes(self, spec: LayerSpec) -> Bytes:
        """Bytes that a layer saves if it is not fully recomputed."""
        return layer_saved_bytes(self.plan.layer_by_spec[spec], self.plan.training.recompute)


def layer_saved_bytes(layer: LayerOperators, recompute: Recompute) -> Bytes:
    """Bytes that a layer saves under this policy if it is not fully recomputed."""
    match recompute:
        case SelectiveOpRecompute():
            return layer.input_bytes + sum(operator.saved_output_bytes for operator in layer.operators)
        case DotsSaveableRecompute():
            return layer.input_bytes + layer.saved_product_bytes
        case SelectiveRecompute(modules):
            return layer.saved_bytes_with_recompute(modules)
    return layer.saved_bytes


_STAGE_SIZES: Final[Mapping[ActivationKind, Callable[[Activations], Bytes]]] = {
    ActivationKind.STAGE_OUTPUT: lambda activations: activations.output_bytes,
    ActivationKind.EMBEDDING_SAVED: lambda activations: activations.plan.embedding.saved_bytes,
    ActivationKind.HEAD_SAVED: lambda activations: activations.plan.head.saved_bytes,
    ActivationKind.LOSS_GRADIENT: lambda activations: (
        activations.logit_count * activations.loss_gradient_bytes + activations.loss_accumulation_bytes
    ),
    ActivationKind.CAST_GRADIENT: lambda activations: (
        activations.logit_count * activations.cast_gradient_bytes + activations.loss_accumulation_bytes
    ),
    ActivationKind.METRIC_COPIES: lambda activations: activations.logit_count * 2 * DType.FP32.bytes,
    ActivationKind.KEPT_LOGITS: lambda activations: activations.logit_count * activations.element_bytes,
    ActivationKind.EMBEDDING_WGRAD: lambda activations: activations.plan.embedding.deferred_wgrad_bytes,
    ActivationKind.HEAD_WGRAD: lambda activations: activations.plan.head.deferred_wgrad_bytes,
    ActivationKind.EMBEDDING_WEIGHT_GRADIENT: lambda activations: activations.weight_gradient_bytes(
        activations.plan.embedding
    ),
    ActivationKind.HEAD_WEIGHT_GRADIENT: lambda activations: activations.weight_gradient_bytes(activations.plan.head),
}
_LAYER_SIZES: Final[Mapping[ActivationKind, Callable[[Activations, LayerSpec], Bytes]]] = {
    ActivationKind.LAYER_INPUT: lambda activations, spec: activations.plan.layer_by_spec[spec].input_bytes,
    ActivationKind.LAYER_SAVED: lambda activations, spec: activations.saved_layer_bytes(spec),
    ActivationKind.LAYER_FULL: lambda activations, spec: activations.plan.layer_by_spec[spec].saved_bytes,
    ActivationKind.LAYER_WGRAD: lambda activations, spec: activations.plan.layer_by_spec[spec].deferred_wgrad_bytes,
    ActivationKind.LAYER_GRADIENTS: lambda activations, spec: activations.layer_gradient_bytes(spec),
    ActivationKind.LAYER_WEIGHT_GRADIENT: lambda activations, spec: activations.layer_weight_gradient_bytes(spec),
}
LAYER_KINDS: Final = frozenset(_LAYER_SIZES)
"""Kinds whose size depends on the layer specification."""


def saved_key(run: StageLayers) -> ActivationKey:
    """What one layer of a run saves."""
    return (ActivationKind.LAYER_INPUT if run.recomputed else ActivationKind.LAYER_SAVED), run.layers.spec


def _end_counts(stage: PipelineStage, embedding: ActivationKind, head: ActivationKind) -> dict[ActivationKey, int]:
    """Counts of the embeddings (those of multi-token prediction included) and heads that a stage has."""
    return {(embedding, None): stage.has_embedding + stage.mtp_layer_count, (head, None): int(stage.has_head)}


def _weight_gradient_counts(stage: PipelineStage) -> Iterator[ActivationCounts]:
    """The gradient of the largest weight of the ends and of each kind of layer, one at a time."""
    ends = _end_counts(stage, ActivationKind.EMBEDDING_WEIGHT_GRADIENT, ActivationKind.HEAD_WEIGHT_GRADIENT)
    yield from ({kind: 1} for kind, count in ends.items() if count)
    for run in stage.stack:
        yield {(ActivationKind.LAYER_WEIGHT_GRADIENT, run.spec): 1}


def _backward_counts(
    run: StageLayers, freed: Counter[ActivationKey], is_full_backward: bool
) -> Iterator[ActivationCounts]:
    """Counts during a backward through a run: in its last layer, and in the first, too, if backward is split."""
    spec = run.layers.spec
    for layers_done in (0,) if is_full_backward else (0, run.layers.count - 1):
        counts = Counter(
            {
                (ActivationKind.LAYER_FULL, spec): 1,
                saved_key(run): -1,
                (ActivationKind.LAYER_GRADIENTS, spec): 1,
                (ActivationKind.LAYER_WEIGHT_GRADIENT, spec): int(is_full_backward),
            }
        )
        counts.subtract(freed)
        counts.subtract(_freed_by_run(run, layers_done, is_full_backward))
        yield counts


def _freed_by_run(run: StageLayers, count: int, is_full_backward: bool) -> ActivationCounts:
    """What backward has freed after `count` layers of a run; offloaded activations are not on the device."""
    freed = dict(_freed_counts(saved_key(run), count, is_full_backward))
    if run.offloaded:
        del freed[saved_key(run)]
    return freed


def _freed_counts(key: ActivationKey, count: int, is_full_backward: bool) -> ActivationCounts:
    """What backward has freed after `count` of a kind; a split backward leaves what wgrad needs."""
    kind, spec = key
    return {key: count} if is_full_backward else {key: count, (_WGRAD_KIND[kind], spec): -count}
