"""What does a layer do when its weights are frozen and adapters are trained beside them?

Frozen weights have no gradient: the products of weight gradients are gone, and with them the inputs that only these
read. What input gradients read is kept as before (inputs of norms and activations, queries, keys, values and the
attention's result). Nothing flows back through the embedding; the first layer's input gradient is run, as activation
checkpointing and pipelines have it (peft, `enable_input_require_grads`), although nothing below needs it. Norms run the
same kernels. Biases are counted with their matrix.

An adapter is two products, A [tokens, inputs] to [tokens, rank] and B to [tokens, outputs]; its result, scaled, is
added to the frozen layer's: one kernel where kernels are fused (torch.compile), else two (torchtune `LoRALinear`, peft
`lora.Linear`). Backward scales the gradient, and adds the adapter's input gradient to the frozen layer's, as autograd
does. A keeps its input, once for all adapters of a fused layer (and of a parallel block whose branches read the same);
with dropout each keeps its own, and the mask. B keeps A's result.

Tensor parallelism is Megatron-Bridge's (`ParallelLinearAdapter`). Beside a column-parallel layer A and B are split by
columns: A's result is gathered, and B's input gradient summed. Beside a row-parallel one A is split by rows, and its
result summed; B is split by columns, its result gathered, and its input gradient summed; where the sequence is split
the gradient that comes to B is gathered. A keeps its input whole, so no rank gathers it again. Assumed: the input
gradients of a layer and its adapters are reduced together.

Quantised weights (QLoRA) are those of all projections of the layers; each product of forward and backward has them
unpacked before it, by one kernel that reads them and their scales and writes them in the products' format
(bitsandbytes; torchao's where it is compiled), one projection after the other. Reference: Hu et al. 2021
(arXiv:2106.09685), Dettmers et al. 2023 (arXiv:2305.14314).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel
from clustersim.model.linear import Linear
from clustersim.model.lora import Lora
from clustersim.model.memory_bound import Streaming
from clustersim.model.operators import (
    ADAPTERS,
    QUANTIZED,
    Entry,
    Joining,
    Joint,
    Joints,
    Layer,
    Operator,
    Region,
    Shard,
)
from clustersim.model.precision_recipe import Products
from clustersim.model.recompute_modules import Within
from clustersim.model.training import Training


def adapted(layer: Layer, training: Training, shard: Shard) -> Layer:
    """The layer as it is trained: itself, or frozen, with the adapters of the training."""
    if training.lora is None:
        return layer
    below = not any(operator.linear for operator in layer.operators)  # the embedding: nothing flows back through it
    made: list[Operator] = []
    for before, operator in pairwise((None, *layer.operators)):
        if operator is not None:
            beside = _beside(operator, 0.0 if before is None else before.returned, training, shard)
            made += _entered(operator, [*beside], kept=any(item.whole for item in made) and not training.lora.dropout)
    if below:
        made = [replace(operator, input_gradient=(), kept=0.0) for operator in made]
    return replace(layer, operators=tuple(made))


def _entered(operator: Operator, made: list[Operator], *, kept: bool) -> list[Operator]:
    """A layer with its adapters, of which the first reads what comes into the region for it.

    kept: adapters before it keep their input, which is this layer's, too, where both read the same.
    """
    if operator.entry is None:
        return made
    first, *others = (replace(item, entry=None) for item in made)
    shared = kept and first.whole and operator.entry is Entry.SAME
    bytes_kept, waiting = (0.0, first.waiting - first.kept) if shared else (first.kept, first.waiting)
    read = min(first.read, bytes_kept)
    return [replace(first, entry=operator.entry, kept=bytes_kept, waiting=waiting, read=read), *others]


def _beside(operator: Operator, returned: Bytes, training: Training, shard: Shard) -> Iterator[Operator]:
    """A frozen operator, with the halves of its adapters around it, or before it where its inputs are split.

    returned: bytes that the backward of the operator before reads of its result, which this one keeps in its place.
    """
    lora, linear = training.lora, operator.linear
    adapters = () if lora is None or linear is None else tuple(_adapters(linear, lora, training, shard))
    frozen = _frozen(operator, returned if operator.read else 0.0)
    if linear is None or lora is None or not linear.parts:
        yield frozen
        return
    stored = frozen if lora.base is None else _quantized(frozen, linear, lora.base)
    if not adapters:
        yield stored
        return
    around = _Around(linear, lora, training, shard, adapters)
    if around.shares_input:  # the adapters keep it
        stored = replace(stored, kept=operator.kept - operator.read)
    inward, outward = around.inward, around.outward
    if around.shares_input and not shard.sequence_parallel:
        inward = replace(inward, reads=operator.reads, read=inward.kept)
    # a frozen layer runs before its adapters, whatever joins them, so it has run when these save
    late = replace(stored, saves_late=True)
    yield from _placed(operator, (inward, outward, late) if linear.rows else (inward, stored, outward))


def _placed(operator: Operator, made: Iterable[Operator]) -> Iterator[Operator]:
    """A layer with its adapters in the modules that it is in, whose inputs the first of them keeps."""
    inside = operator.within
    for item in made:
        yield replace(item, within=inside)
        inside = tuple(Within(module) for module, _ in operator.within)


def _frozen(operator: Operator, returned: Bytes) -> Operator:
    """An operator without gradients of weights, which keeps no more than input gradients read."""
    kept = operator.kept - operator.read + returned
    return replace(operator, weight_gradient=(), kept=kept, waiting=0.0, read=0.0, trained=False)


def _quantized(operator: Operator, linear: Linear, base: DType) -> Operator:
    """An operator that unpacks its weights before each product."""
    made = linear.formats.forward
    name = f"{linear.name}.dequantize"
    unpack = memory_bound.dequantize(name, base, made, rows=linear.outputs, width=linear.inputs)
    return replace(
        operator,
        forward=(unpack, *operator.forward),
        input_gradient=(unpack, *operator.input_gradient),
        again=(unpack, *operator.again) if operator.again else operator.again,
        group=QUANTIZED,
        unpacked=float(max(outputs for _, outputs in linear.parts) * linear.inputs * made.bytes),
    )


@dataclass(frozen=True, slots=True)
class _Adapter:
    """The two products beside some projections of a linear layer, and the outputs of these on this rank."""

    a: Linear
    b: Linear
    outputs: int


def _adapters(linear: Linear, lora: Lora, training: Training, shard: Shard) -> Iterator[_Adapter]:
    """The adapters of a linear layer on one rank."""
    formats, parts = Products.all_in(training.recipe.activations), dict(linear.parts)
    for target in lora.targets:
        outputs = sum(parts.get(projection, 0) for projection in target.covers)
        if not outputs:
            continue
        name = f"{linear.name}.{target.value}" if len(parts) > 1 else linear.name
        rank, cut = (lora.rank, -(-outputs // shard.tp)) if linear.rows else (lora.rank // shard.tp, outputs)
        a = Linear(f"{name}.lora_a", linear.tokens, linear.inputs, rank, formats)
        yield _Adapter(a, Linear(f"{name}.lora_b", linear.tokens, lora.rank, cut, formats), outputs)


@dataclass(frozen=True, slots=True)
class _Around:
    """The adapters of one linear layer, as two operators: all products A, and all products B."""

    linear: Linear
    lora: Lora
    training: Training
    shard: Shard
    adapters: tuple[_Adapter, ...]

    @property
    def shares_input(self) -> bool:
        """Whether all adapters read the linear layer's own input."""
        return not self.lora.dropout

    @property
    def inward(self) -> Operator:
        """From the inputs to the rank."""
        made = self._operator("lora_a", [adapter.a for adapter in self.adapters])
        inputs = self.linear.tokens, self.linear.inputs
        names = [f"{item.a.name}.gradient_sum" for item in self.adapters]
        summed = [self._streamed(memory_bound.GRADIENT_SUM, name, inputs) for name in names]
        kept = self._bytes(*inputs)
        if not self.shares_input:
            made, kept = self._dropped(made), len(self.adapters) * (kept + inputs[0] * inputs[1])
        return replace(
            made,
            input_gradient=(*made.input_gradient, *summed),
            kept=kept,
            waiting=kept + sum(self._bytes(element.a.tokens, element.a.outputs) for element in self.adapters),
            whole=True,
            joints=Joints(result=self._narrow(Joining.SUMMED if self.linear.rows else Joining.GATHERED)),
        )

    @property
    def outward(self) -> Operator:
        """From the rank to the outputs, and their sum with the frozen layer's."""
        made = self._operator("lora_b", [adapter.b for adapter in self.adapters])
        scaled = [(item.b.name, (self._tokens, item.outputs)) for item in self.adapters]
        over = memory_bound.SCALED_SUM[self.training.fused]
        kept = sum(self._bytes(element.b.tokens, element.b.inputs) for element in self.adapters)
        wide = self._wide
        return replace(
            made,
            forward=(*made.forward, *(self._streamed(over, f"{name}.scaled_sum", shape) for name, shape in scaled)),
            input_gradient=(
                *(self._streamed(memory_bound.SCALE, f"{name}.scale", shape) for name, shape in scaled),
                *made.input_gradient,
            ),
            kept=kept,
            waiting=kept + sum(self._bytes(entry.b.tokens, entry.b.outputs) for entry in self.adapters),
            joints=Joints(
                result=wide,
                entering=wide if self.shard.sequence_parallel else (),
                leaving=self._narrow(Joining.SUMMED),
            ),
        )

    @property
    def _tokens(self) -> int:
        """Tokens at which the adapters' results meet the frozen layer's."""
        return self.shard.residual_tokens if self.linear.rows else self.shard.tokens

    @property
    def _wide(self) -> tuple[Joint, ...]:
        """The results of B that were split by columns beside a layer whose own result is whole."""
        if self.shard.tp == 1 or not self.linear.rows:
            return ()
        return tuple(
            Joint(Joining.GATHERED, self._bytes(adapter.b.tokens, adapter.outputs)) for adapter in self.adapters
        )

    def _narrow(self, how: Joining) -> tuple[Joint, ...]:
        """What is between A and B."""
        if self.shard.tp == 1:
            return ()
        return tuple(Joint(how, self._bytes(adapter.b.tokens, adapter.b.inputs)) for adapter in self.adapters)

    def _operator(self, name: str, linears: Sequence[Linear]) -> Operator:
        """The products of some linear layers as one operator."""
        recipe, how = self.training.recipe, self.training.accumulation
        return Operator(
            f"{self.linear.name}.{name}",
            Region.SHARDED,
            forward=tuple(kernel for linear in linears for kernel in linear.forward(recipe)),
            input_gradient=tuple(kernel for item in linears for kernel in item.input_gradient(recipe)),
            weight_gradient=tuple(kernel for element in linears for kernel in element.weight_gradient(recipe, how)),
            parameters=sum(entry.parameters for entry in linears),
            group=ADAPTERS,
        )

    def _dropped(self, made: Operator) -> Operator:
        """The products A of inputs of which dropout has left a part."""
        over = memory_bound.DROPOUT
        shape = over.over(self.linear.tokens, self.linear.inputs)
        names = [f"{adapter.a.name}.dropout" for adapter in self.adapters]
        dtype = self.training.recipe.activations
        dropouts = (over.forward_kernel(name, dtype, shape) for name in names)
        masks = (kernel for name in names for kernel in over.backward_kernels(name, dtype, shape))
        return replace(made, forward=(*dropouts, *made.forward), input_gradient=(*made.input_gradient, *masks))

    def _streamed(self, over: Streaming, name: str, shape: tuple[int, int]) -> Kernel:
        return over.forward_kernel(name, self.training.recipe.activations, over.over(*shape))

    def _bytes(self, rows: int, width: int) -> Bytes:
        """Bytes of an activation."""
        return float(rows * width * self.training.recipe.activations.bytes)
