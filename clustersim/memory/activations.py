"""What must a stage keep from forward to backward, and what does it need for a moment?

Kept for each microbatch in flight: what every operator's backward reads, or less under recomputation: full
recomputation keeps each layer's input, selective recomputation drops the attention core.

For a moment, backward needs more, while it frees what it has passed: first the gradient of the logits beside the
loss's FP32 softmax, then the gradient of the logits' weight, then those of the last layer (which recomputation has
filled again), at the end the embedding's. A weight's gradient is there once in the activations' format before it is
accumulated (autograd; Megatron-LM's fused accumulation allocates the same size for its hooks, in
`LinearWithGradAccumulationAndAsyncCommunication`). ZeRO-3's gradients are counted with its gathered units.
Reference: Korthikanti et al. 2022, sections 4 and 5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from clustersim.dtypes import DType
from clustersim.parallel.data import Zero
from clustersim.parallel.pipeline import Stage
from clustersim.parallel.plan import Plan
from clustersim.units import Bytes
from clustersim.workload.layers import Layer, embedding, head, layer
from clustersim.workload.linear import activation_dtype
from clustersim.workload.training import FullRecompute, Loss, SelectiveRecompute


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one rank of a plan."""

    plan: Plan

    def kept(self, stage: Stage) -> Bytes:
        """Bytes that one microbatch keeps on a stage from forward to backward."""
        again = self._recomputed_layers(stage)
        layers = again * self._layer.input_bytes + (stage.layers - again) * self._kept_layer
        ends = self._embedding.kept if stage.embedding else 0.0
        return layers + ends + (self._head.kept if stage.head else 0.0)

    def passing(self, stage: Stage) -> Bytes:
        """Bytes that the backward of one microbatch needs at its fullest, beside what was kept."""
        return max(0.0, *self._moments(stage))

    def _moments(self, stage: Stage) -> Iterator[Bytes]:
        """Bytes beside what was kept, less what is freed by then: loss, logits, last and first layer, embedding."""
        freed, again = 0.0, self._recomputed_layers(stage)
        if stage.head:
            yield self._logits * self._loss_width
            yield self._logits * (self._width - DType.FP32.bytes) + self._weight_gradient(self._head)
            freed += self._head.kept
        if stage.layers > again:
            yield self._layer.kept - self._kept_layer + self._weight_gradient(self._layer) - freed
            freed += (stage.layers - again) * self._kept_layer
        if again:
            yield self._layer.kept - self._layer.input_bytes + self._weight_gradient(self._layer) - freed
            freed += again * self._layer.input_bytes
        if stage.embedding:
            yield self._weight_gradient(self._embedding) - freed

    def _weight_gradient(self, part: Layer) -> Bytes:
        """The gradient of the largest weight, before it is accumulated."""
        match self.plan.layout.data:
            case Zero(stage=3) if self.plan.replicas > 1:
                return 0.0
        sizes = (operator.parameters for operator in part.operators if operator.weight_gradient)
        return float(max(sizes, default=0) * self._width)

    @property
    def _width(self) -> int:
        """Bytes of an activation's element."""
        return activation_dtype(self.plan.training.precision).bytes

    @property
    def _loss_width(self) -> int:
        """Bytes of the logits' gradients beside the kept FP32 softmax, per logit.

        PyTorch's loss makes two gradients in FP32, of the negative log-likelihood and of the log-softmax; the others
        make it in the softmax's place and cast it.
        """
        return 2 * DType.FP32.bytes if self.plan.training.loss is Loss.TORCH else self._width

    @property
    def _logits(self) -> int:
        """Elements of the logits on this rank."""
        return self.plan.shard.tokens * -(-self.plan.model.vocab // self.plan.layout.tp)

    def _recomputed_layers(self, stage: Stage) -> int:
        match self.plan.training.recompute:
            case FullRecompute(None):
                return stage.layers
            case FullRecompute(int() as layers):
                return min(layers, stage.layers)
        return 0

    @cached_property
    def _kept_layer(self) -> Bytes:
        """Bytes of a layer whose forward is not run again as a whole."""
        if not isinstance(self.plan.training.recompute, SelectiveRecompute):
            return self._layer.kept
        return sum(operator.kept for operator in self._layer.operators if not operator.core)

    @cached_property
    def _layer(self) -> Layer:
        return layer(self.plan.model, self.plan.training, self.plan.shard)

    @cached_property
    def _embedding(self) -> Layer:
        return embedding(self.plan.model, self.plan.training, self.plan.shard)

    @cached_property
    def _head(self) -> Layer:
        return head(self.plan.model, self.plan.training, self.plan.shard)
