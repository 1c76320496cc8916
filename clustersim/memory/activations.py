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
All of it is counted in parts of the model (`Part`): how many there are of each does not depend on how large they are.
Reference: Korthikanti et al. 2022, sections 4 and 5; Qi et al. 2023 (arXiv:2401.10241), section 2.3.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

from clustersim.dtypes import DType
from clustersim.parallel.data import Zero
from clustersim.parallel.pipeline import Stage
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.units import Bytes
from clustersim.workload.layers import Layer
from clustersim.workload.linear import activation_dtype
from clustersim.workload.training import Loss, SelectiveOperations, SelectiveRecompute


class Part(Enum):
    """What activations are made of, each of one microbatch on one rank.

    INPUT: what a layer keeps that is run again as a whole; LAYER: what others keep, as recomputation has it; WHOLE: all
    that a layer's backward reads; EMBEDDING, HEAD: what these keep; LOSS: gradients of the logits beside the loss's
    softmax; CAST: those of the logits in its place; *_WAITING: what waits for weight gradients; *_GRADIENT: that of the
    largest weight, before it is accumulated.
    """

    INPUT = "layer input"
    LAYER = "kept layer"
    WHOLE = "whole layer"
    EMBEDDING = "embedding"
    HEAD = "head"
    LOSS = "loss gradients"
    CAST = "cast gradients"
    LAYER_WAITING = "waiting layer"
    EMBEDDING_WAITING = "waiting embedding"
    HEAD_WAITING = "waiting head"
    LAYER_GRADIENT = "layer weight gradient"
    EMBEDDING_GRADIENT = "embedding weight gradient"
    HEAD_GRADIENT = "head weight gradient"


Counts = Mapping[Part, int]
"""How many there are of each part."""
_WAITS: Final = {
    Part.LAYER: Part.LAYER_WAITING, Part.INPUT: Part.LAYER_WAITING, Part.HEAD: Part.HEAD_WAITING,
}  # fmt: skip


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one rank of a plan."""

    plan: Plan

    def kept(self, stage: Stage) -> Bytes:
        """Bytes that one microbatch keeps on a stage from forward to backward."""
        return self._bytes(self.kept_parts(stage))

    def waiting(self, stage: Stage) -> Bytes:
        """Bytes that one microbatch keeps on a stage from its input gradients to its weight gradients."""
        ends = {Part.EMBEDDING_WAITING: int(stage.embedding), Part.HEAD_WAITING: int(stage.head)}
        return self._bytes({Part.LAYER_WAITING: stage.layers, **ends})

    def passing(self, stage: Stage, kind: ActionKind = ActionKind.BACKWARD) -> Bytes:
        """Bytes that a backward of one microbatch, or a half of it, needs at its fullest, beside what was kept."""
        return max((0.0, *map(self._bytes, self.moments(stage, kind))))

    def kept_parts(self, stage: Stage) -> Counts:
        """What one microbatch keeps on a stage."""
        again = self.plan.recomputed_layers(stage)
        ends = {Part.EMBEDDING: int(stage.embedding), Part.HEAD: int(stage.head)}
        return {Part.INPUT: again, Part.LAYER: stage.layers - again, **ends}

    def moments(self, stage: Stage, kind: ActionKind = ActionKind.BACKWARD) -> Iterator[Counts]:
        """What a pass needs beside what was kept, at the moments of which one is the fullest; freed parts are negative.

        Where more waits for the weights' half than was kept of a layer, the first such layer of the stage is fullest.
        """
        if kind is ActionKind.WEIGHT_GRADIENT:
            yield from _gradients(stage)
            return
        whole, kept = kind is ActionKind.BACKWARD, self.kept_parts(stage)
        freed: Counter[Part] = Counter()
        if stage.head:
            yield {Part.LOSS: 1}
            yield {Part.CAST: 1, Part.HEAD_GRADIENT: int(whole)}
            freed.update(_freed(Part.HEAD, 1, whole))
        for part in (Part.LAYER, Part.INPUT):
            if kept[part]:
                yield from _through(part, kept[part], freed, whole)
                freed.update(_freed(part, kept[part], whole))
        if stage.embedding:
            moment = Counter({Part.EMBEDDING_GRADIENT: int(whole)})
            moment.subtract(freed)
            yield moment

    def size(self, part: Part) -> Bytes:
        """Bytes of a part."""
        return float(_SIZES[part](self))

    def _bytes(self, parts: Counts) -> Bytes:
        return float(sum(count * self.size(part) for part, count in parts.items() if count))

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
        return self.plan.shard.tokens * self.plan.shard.rows(self.plan.model.vocab)

    @cached_property
    def _kept_layer(self) -> Bytes:
        """Bytes of a layer whose forward is not run again as a whole."""
        layer = self.plan.layer
        if isinstance(self.plan.training.recompute, SelectiveOperations):
            return layer.input_bytes + sum(operator.results for operator in layer.operators)
        if not isinstance(self.plan.training.recompute, SelectiveRecompute):
            return layer.kept
        return sum(operator.kept for operator in layer.operators if not operator.core)


_SIZES: Final[Mapping[Part, Callable[[Activations], Bytes]]] = {
    Part.INPUT: lambda of: of.plan.layer.input_bytes,
    Part.LAYER: lambda of: of._kept_layer,
    Part.WHOLE: lambda of: of.plan.layer.kept,
    Part.EMBEDDING: lambda of: of.plan.embedding.kept,
    Part.HEAD: lambda of: of.plan.head.kept,
    Part.LOSS: lambda of: of._logits * of._loss_width,
    Part.CAST: lambda of: of._logits * (of._width - DType.FP32.bytes),
    Part.LAYER_WAITING: lambda of: of.plan.layer.waiting,
    Part.EMBEDDING_WAITING: lambda of: of.plan.embedding.waiting,
    Part.HEAD_WAITING: lambda of: of.plan.head.waiting,
    Part.LAYER_GRADIENT: lambda of: of._weight_gradient(of.plan.layer),
    Part.EMBEDDING_GRADIENT: lambda of: of._weight_gradient(of.plan.embedding),
    Part.HEAD_GRADIENT: lambda of: of._weight_gradient(of.plan.head),
}


def _gradients(stage: Stage) -> Iterator[Counts]:
    """The gradient of the largest weight of each kind of part, one at a time."""
    held = (
        (stage.embedding, Part.EMBEDDING_GRADIENT),
        (stage.layers, Part.LAYER_GRADIENT),
        (stage.head, Part.HEAD_GRADIENT),
    )
    yield from ({part: 1} for there, part in held if there)


def _through(part: Part, count: int, freed: Counter[Part], whole: bool) -> Iterator[Counts]:
    """Moments of a backward through `count` layers that keep `part`: in the last one, of halves in the first, too."""
    for passed in (0,) if whole else (0, count - 1):
        moment = Counter({Part.WHOLE: 1, part: -1, Part.LAYER_GRADIENT: int(whole)})
        moment.subtract(freed)
        moment.subtract(_freed(part, passed, whole))
        yield moment


def _freed(part: Part, count: int, whole: bool) -> Counts:
    """What backward frees once it has passed `count` of a part: halves leave what waits for the weight gradients."""
    return {part: count} if whole else {part: count, _WAITS[part]: -count}
