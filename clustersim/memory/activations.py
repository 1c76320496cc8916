"""What must a stage keep from forward to backward, and what does it need for a moment?

Kept for each microbatch in flight: what every operator's backward reads, or less under recomputation: full
recomputation keeps each layer's input, selective recomputation drops what its modules keep. A stage's output is what
the next one's first layer reads, so nobody here needs it; unless it is released once it is sent, the graph holds it.

For a moment, backward needs more, while it frees what it has passed: first the gradient of the logits beside the
loss's FP32 softmax, then the gradient of the logits' weight, then those of the last layer (which recomputation has
filled again), at the end the embedding's. A weight's gradient is there once in the activations' format before it is
accumulated (autograd; Megatron-LM's fused accumulation allocates the same size for its hooks, in
`LinearWithGradAccumulationAndAsyncCommunication`). ZeRO-3's gradients are counted with its gathered units. A frozen
weight has no gradient; one that is kept in fewer bits is there unpacked while its product runs.

Where backward is run in halves, the input gradient frees what was kept but for what the weight gradients wait for: the
inputs of linear layers and, new, the gradients of their outputs (in a GPT layer 32 of 34 s b h bytes, and the scores).
Recomputed layers come back as far as that, so then more waits than was kept.
All of it is counted in parts of the model (`Part`): how many there are of each does not depend on how large they are.
Reference: Korthikanti et al. 2022, sections 4 and 5; Qi et al. 2023 (arXiv:2401.10241), section 2.3.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes
from clustersim.model import memory_bound
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.layers import Layer
from clustersim.model.training import Loss, Recompute, SelectiveOperations, SelectiveRecompute
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.plan import Plan, StageLayers
from clustersim.program.action import ActionKind


class Part(IdentityEnum):
    """What activations are made of, each of one microbatch on one rank.

    OUTPUT: what a stage sends, if it is not released; INPUT: what a layer keeps that is run again as a whole; LAYER:
    what others keep, as recomputation has it; WHOLE: all that a layer's backward reads; EMBEDDING, HEAD: what these
    keep; LOSS: gradients of the logits beside the loss's softmax; CAST: those of the logits in its place; *_WAITING:
    what waits for weight gradients; *_GRADIENT: that of the largest weight, before it is accumulated (or a weight that
    is unpacked).
    """

    OUTPUT = "stage output"
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


CHUNKS: Final = 8
"""Of a chunked loss (torchtune, CEWithChunkedOutputLoss, num_output_chunks)."""
Kind = tuple[Part, LayerSpec | None]
"""A part and, of layers, of which kind of layer."""
Counts = Mapping[Kind, int]
"""How many there are of each kind."""
Needs = tuple[Bytes, Bytes, Bytes]
"""Bytes that one microbatch keeps until its backward, between its halves, and that a backward needs for a moment."""
_WAITS: Final = {
    Part.LAYER: Part.LAYER_WAITING, Part.INPUT: Part.LAYER_WAITING, Part.HEAD: Part.HEAD_WAITING,
}  # fmt: skip


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one rank of a plan."""

    plan: Plan
    _needs: dict[tuple[Hashable, ...], Needs] = field(init=False, repr=False, compare=False, default_factory=dict)

    def needs(self, stage: PipelineStage, kind: ActionKind) -> Needs:
        """`kept`, `waiting` and `passing` of a stage; worked out once for all that hold the same."""
        key = stage.stack, stage.has_embedding, stage.has_head, self.plan.sent_activation_count(stage.index), kind
        if key not in self._needs:
            self._needs[key] = self.kept(stage), self.waiting(stage), self.passing(stage, kind)
        return self._needs[key]

    def kept(self, stage: PipelineStage) -> Bytes:
        """Bytes that one microbatch keeps on a stage from forward to backward."""
        return self._bytes(self.kept_parts(stage))

    def waiting(self, stage: PipelineStage) -> Bytes:
        """Bytes that one microbatch keeps on a stage from its input gradients to its weight gradients."""
        counts = Counter(_ends(stage, Part.EMBEDDING_WAITING, Part.HEAD_WAITING))
        for run in stage.stack:
            counts[Part.LAYER_WAITING, run.spec] += run.count
        return self._bytes(counts)

    def passing(self, stage: PipelineStage, kind: ActionKind = ActionKind.BACKWARD) -> Bytes:
        """Bytes that a backward of one microbatch, or a half of it, needs at its fullest, beside what was kept."""
        return max((0.0, *map(self._bytes, self.moments(stage, kind))))

    def kept_parts(self, stage: PipelineStage) -> Counts:
        """What one microbatch keeps on a stage."""
        sent = 0 if stage.has_head else self.plan.sent_activation_count(stage.index)
        counts = Counter({**_ends(stage, Part.EMBEDDING, Part.HEAD), (Part.OUTPUT, None): sent})
        for run in self.plan.layer_runs(stage):
            counts[_kept(run)] += 0 if run.offloaded else run.layers.count
        return counts

    def kept_of(self, run: StageLayers) -> Bytes:
        """Bytes that one microbatch keeps of one layer of a run, wherever they are."""
        return self.size(*_kept(run))

    def hosted(self, stage: PipelineStage) -> Bytes:
        """Bytes that one microbatch keeps of a stage on the host."""
        return sum(run.layers.count * self.kept_of(run) for run in self.plan.layer_runs(stage) if run.offloaded)

    def buffers(self, stages: Iterable[PipelineStage]) -> Bytes:
        """Bytes of offloaded layers that are on the device at once: of so many of the largest, if there are so many.

        A layer's are there from its forward's start until they are copied out, and from the start of the copy back
        to its backward's end.
        """
        activations = self.plan.training.offload.activations
        if activations is None:
            return 0.0
        runs = [run for stage in stages for run in self.plan.layer_runs(stage) if run.offloaded]
        sizes = (size for run in runs for size in [self.kept_of(run)] * min(run.layers.count, activations.buffers))
        return sum(sorted(sizes, reverse=True)[: activations.buffers])

    def moments(self, stage: PipelineStage, kind: ActionKind = ActionKind.BACKWARD) -> Iterator[Counts]:
        """What a pass needs beside what was kept, at the moments of which one is the fullest; freed parts are negative.

        Where more waits for the weights' half than was kept of a layer, the first such layer of a run is fullest.
        """
        if kind is ActionKind.WEIGHT_GRADIENT:
            yield from _gradients(stage)
            return
        whole = kind is ActionKind.BACKWARD
        freed: Counter[Kind] = Counter()
        if stage.has_head:
            yield {(Part.LOSS, None): 1}
            yield {(Part.CAST, None): 1, (Part.HEAD_GRADIENT, None): int(whole)}
            freed.update(_freed((Part.HEAD, None), 1, whole))
        runs = self.plan.layer_runs(stage)
        for further, there in ((True, stage.mtp_layer_count), (False, stage.has_embedding)):
            for run in (item for item in reversed(runs) if item.layers.spec.ahead is further):
                yield from _through(run, freed, whole)
                freed.update(_freed_of(run, run.layers.count, whole))
            if there:
                moment: Counter[Kind] = Counter({(Part.EMBEDDING_GRADIENT, None): int(whole)})
                moment.subtract(freed)
                yield moment

    def size(self, part: Part, spec: LayerSpec | None = None) -> Bytes:
        """Bytes of a part; spec: of which kind of layer, if it is a layer's."""
        return float(_SIZES[part](self) if spec is None else _OF_LAYERS[part](self, spec))

    def _bytes(self, counts: Counts) -> Bytes:
        return float(sum(count * self.size(*kind) for kind, count in counts.items() if count))

    def weight_gradient(self, part: Layer) -> Bytes:
        """The gradient of the largest weight, before it is accumulated, or the largest weight that is unpacked."""
        sharded = isinstance(self.plan.layout.data, FullyShard) and not self.plan.accumulates_full_gradients
        gathered = {group.name for group in self.plan.parameter_groups if sharded and group.shard_count > 1}
        own = (operator for operator in part.operators if operator.weight_gradient and operator.group not in gathered)
        unpacked = max((operator.unpacked for operator in part.operators), default=0.0)
        return max(unpacked, float(max((operator.parameters for operator in own), default=0) * self.width))

    @property
    def output(self) -> Bytes:
        """Bytes of a stage's output that stay until its backward."""
        shard = self.plan.layer_shard
        return 0.0 if self.plan.layout.release_outputs else shard.residual_tokens * self.plan.model.hidden * self.width

    @property
    def width(self) -> Bytes:
        """Bytes of an activation's element."""
        return self.plan.training.recipe.activations.bytes

    @property
    def loss_width(self) -> Bytes:
        """Bytes of the logits' gradients beside what the loss keeps (mostly an FP32 softmax), per logit.

        PyTorch's loss makes two gradients in FP32, of the negative log-likelihood and of the log-softmax; chunk by
        chunk they take the place of logits that are freed; the others make it in the softmax's place and cast it.
        """
        match self.plan.training.loss:
            case Loss.TORCH:
                return 2 * DType.FP32.bytes
            case Loss.CHUNKED:
                return self.width / CHUNKS
        return self.width

    @property
    def loss_kept(self) -> Bytes:
        """Bytes that the loss keeps, per logit."""
        return memory_bound.loss(self.plan.training.loss).kept.bytes(self.plan.training.recipe.activations, 1)

    @property
    def logits(self) -> int:
        """Elements of the logits on this rank."""
        return self.plan.layer_shard.tokens * self.plan.layer_shard.rows(self.plan.model.vocab)

    def kept_layer(self, spec: LayerSpec) -> Bytes:
        """Bytes of a layer whose forward is not run again as a whole."""
        return kept_of_layer(self.plan.layer_by_spec[spec], self.plan.training.recompute)


def kept_of_layer(layer: Layer, recompute: Recompute) -> Bytes:
    """Bytes of a layer whose forward is not run again as a whole."""
    match recompute:
        case SelectiveOperations():
            return layer.input_bytes + sum(operator.results for operator in layer.operators)
        case SelectiveRecompute(modules):
            return layer.kept_beside(modules)
    return layer.kept


_SIZES: Final[Mapping[Part, Callable[[Activations], Bytes]]] = {
    Part.OUTPUT: lambda of: of.output,
    Part.EMBEDDING: lambda of: of.plan.embedding.kept,
    Part.HEAD: lambda of: of.plan.head.kept,
    Part.LOSS: lambda of: of.logits * of.loss_width,
    Part.CAST: lambda of: of.logits * (of.width - of.loss_kept),
    Part.EMBEDDING_WAITING: lambda of: of.plan.embedding.waiting,
    Part.HEAD_WAITING: lambda of: of.plan.head.waiting,
    Part.EMBEDDING_GRADIENT: lambda of: of.weight_gradient(of.plan.embedding),
    Part.HEAD_GRADIENT: lambda of: of.weight_gradient(of.plan.head),
}
_OF_LAYERS: Final[Mapping[Part, Callable[[Activations, LayerSpec], Bytes]]] = {
    Part.INPUT: lambda of, spec: of.plan.layer_by_spec[spec].input_bytes,
    Part.LAYER: lambda of, spec: of.kept_layer(spec),
    Part.WHOLE: lambda of, spec: of.plan.layer_by_spec[spec].kept,
    Part.LAYER_WAITING: lambda of, spec: of.plan.layer_by_spec[spec].waiting,
    Part.LAYER_GRADIENT: lambda of, spec: of.weight_gradient(of.plan.layer_by_spec[spec]),
}
LAYER_PARTS: Final = frozenset(_OF_LAYERS)
"""Parts of which each kind of layer has its own."""


def _kept(run: StageLayers) -> Kind:
    """What a layer of a run keeps."""
    return (Part.INPUT if run.recomputed else Part.LAYER), run.layers.spec


def _ends(stage: PipelineStage, embedding: Part, head: Part) -> dict[Kind, int]:
    """The ends that a stage has, embeddings of further tokens among them."""
    return {(embedding, None): stage.has_embedding + stage.mtp_layer_count, (head, None): int(stage.has_head)}


def _gradients(stage: PipelineStage) -> Iterator[Counts]:
    """The gradient of the largest weight of each kind of part, one at a time."""
    ends = _ends(stage, Part.EMBEDDING_GRADIENT, Part.HEAD_GRADIENT)
    yield from ({kind: 1} for kind, there in ends.items() if there)
    for run in stage.stack:
        yield {(Part.LAYER_GRADIENT, run.spec): 1}


def _through(run: StageLayers, freed: Counter[Kind], whole: bool) -> Iterator[Counts]:
    """Moments of a backward through the layers of a run: in the last one, of halves in the first, too."""
    spec = run.layers.spec
    for passed in (0,) if whole else (0, run.layers.count - 1):
        moment = Counter({(Part.WHOLE, spec): 1, _kept(run): -1, (Part.LAYER_GRADIENT, spec): int(whole)})
        moment.subtract(freed)
        moment.subtract(_freed_of(run, passed, whole))
        yield moment


def _freed_of(run: StageLayers, count: int, whole: bool) -> Counts:
    """What backward frees once it has passed `count` layers of a run; what was on the host is not there to be freed."""
    freed = dict(_freed(_kept(run), count, whole))
    if run.offloaded:
        del freed[_kept(run)]
    return freed


def _freed(kind: Kind, count: int, whole: bool) -> Counts:
    """What backward frees once it has passed `count` of a kind: halves leave what waits for the weight gradients."""
    part, spec = kind
    return {kind: count} if whole else {kind: count, (_WAITS[part], spec): -count}
