"""What must a stage keep from forward to backward, and what does it need for a moment?

Kept for each microbatch in flight: what every operator's backward reads, or less under recomputation: full
recomputation keeps each layer's input, selective recomputation drops the attention core.

For a moment, backward needs more, while it frees what it has passed: first the gradient of the logits beside the
loss's FP32 softmax, then the gradient of the logits' weight, then those of the last layer (which recomputation has
filled again), at the end the embedding's. A weight's gradient is there once in the activations' format before it is
accumulated (autograd; Megatron-LM's fused accumulation allocates the same size for its hooks, in
`LinearWithGradAccumulationAndAsyncCommunication`). ZeRO-3's gradients are counted with its gathered units.

Where backward is run in halves, the input gradient frees what was kept but for what the weight gradients wait for: the
inputs of linear layers and, new, the gradients of their outputs (in a GPT layer 32 of 34 s b h bytes, and the scores).
Recomputed layers come back as far as that, so then more waits than was kept.
Reference: Korthikanti et al. 2022, sections 4 and 5; Qi et al. 2023 (arXiv:2401.10241), section 2.3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from clustersim.dtypes import DType
from clustersim.parallel.data import FullyShard
from clustersim.parallel.pipeline import Stage
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.units import Bytes
from clustersim.workload.layers import Layer
from clustersim.workload.stack import LayerSpec
from clustersim.workload.training import Loss, SelectiveOperations, SelectiveRecompute


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one rank of a plan."""

    plan: Plan

    def kept(self, stage: Stage) -> Bytes:
        """Bytes that one microbatch keeps on a stage from forward to backward."""
        layers = sum(run.count * self._kept_layer(run.spec, again=again) for run, again in self.plan.runs(stage))
        ends = self.plan.embedding.kept if stage.embedding else 0.0
        return layers + ends + (self.plan.head.kept if stage.head else 0.0)

    def waiting(self, stage: Stage) -> Bytes:
        """Bytes that one microbatch keeps on a stage from its input gradients to its weight gradients."""
        ends = self.plan.embedding.waiting if stage.embedding else 0.0
        layers = sum(run.count * self.plan.layers[run.spec].waiting for run in stage.stack)
        return layers + ends + (self.plan.head.waiting if stage.head else 0.0)

    def passing(self, stage: Stage, kind: ActionKind = ActionKind.BACKWARD) -> Bytes:
        """Bytes that a backward of one microbatch, or a half of it, needs at its fullest, beside what was kept."""
        if kind is ActionKind.WEIGHT_GRADIENT:
            return self._largest_gradient(stage)
        return max(0.0, *self._moments(stage, whole=kind is ActionKind.BACKWARD))

    def _moments(self, stage: Stage, *, whole: bool) -> Iterator[Bytes]:
        """Bytes beside what was kept, less what is freed by then: loss, logits, last and first layer, embedding.

        Where more waits for the weights' half than was kept of a layer, the first such layer of a run is fullest.
        """
        freed = 0.0
        if stage.head:
            yield self._logits * self._loss_width
            yield self._logits * (self._width - DType.FP32.bytes) + self._gradient_beside(self.plan.head, whole)
            freed += self.plan.head.kept - (0.0 if whole else self.plan.head.waiting)
        for run, again in reversed(self.plan.runs(stage)):
            layer, kept = self.plan.layers[run.spec], self._kept_layer(run.spec, again=again)
            each = kept - (0.0 if whole else layer.waiting)
            yield layer.kept - kept + self._gradient_beside(layer, whole) - min(freed, freed + (run.count - 1) * each)
            freed += run.count * each
        if stage.embedding:
            yield self._gradient_beside(self.plan.embedding, whole) - freed

    def _gradient_beside(self, part: Layer, whole: bool) -> Bytes:
        """The gradient of a weight in a backward; its half of the input makes none."""
        return self._weight_gradient(part) if whole else 0.0

    def _largest_gradient(self, stage: Stage) -> Bytes:
        ends = ((stage.embedding, self.plan.embedding), (stage.head, self.plan.head))
        parts = [part for there, part in ends if there] + [self.plan.layers[run.spec] for run in stage.stack]
        return max(map(self._weight_gradient, parts), default=0.0)

    def _weight_gradient(self, part: Layer) -> Bytes:
        """The gradient of the largest weight, before it is accumulated."""
        sharded = isinstance(self.plan.layout.data, FullyShard)
        gathered = {group.name for group in self.plan.parameter_groups if sharded and group.shards > 1}
        own = (operator for operator in part.operators if operator.weight_gradient and operator.group not in gathered)
        sizes = (operator.parameters for operator in own)
        return float(max(sizes, default=0) * self._width)

    @property
    def _width(self) -> Bytes:
        """Bytes of an activation's element."""
        return self.plan.training.recipe.activations.bytes

    @property
    def _loss_width(self) -> Bytes:
        """Bytes of the logits' gradients beside the kept FP32 softmax, per logit.

        PyTorch's loss makes two gradients in FP32, of the negative log-likelihood and of the log-softmax; the others
        make it in the softmax's place and cast it.
        """
        return 2 * DType.FP32.bytes if self.plan.training.loss is Loss.TORCH else self._width

    @property
    def _logits(self) -> int:
        """Elements of the logits on this rank."""
        return self.plan.shard.tokens * self.plan.shard.rows(self.plan.model.vocab)

    def _kept_layer(self, spec: LayerSpec, *, again: bool) -> Bytes:
        """Bytes of a layer. again: its forward is run again as a whole."""
        layer = self.plan.layers[spec]
        if again:
            return layer.input_bytes
        if isinstance(self.plan.training.recompute, SelectiveOperations):
            return layer.input_bytes + sum(operator.results for operator in layer.operators)
        if not isinstance(self.plan.training.recompute, SelectiveRecompute):
            return layer.kept
        return sum(operator.kept for operator in layer.operators if not operator.core)
