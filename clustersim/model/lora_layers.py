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
from clustersim.model.linear import LinearLayer
from clustersim.model.lora import Lora
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.operators import (
    ADAPTERS,
    QUANTIZED,
    LayerOperators,
    LayerShard,
    Operator,
    ParallelRegion,
    RegionInput,
    TpCollective,
    TpCollectives,
    TpCombine,
)
from clustersim.model.precision_recipe import MatmulFormats
from clustersim.model.recompute_modules import ModuleMembership
from clustersim.model.training import Training


def apply_lora(layer: LayerOperators, training: Training, shard: LayerShard) -> LayerOperators:
    """The layer as it is trained: itself, or frozen, with the adapters of the training."""
    if training.lora is None:
        return layer
    is_embedding = not any(
        operator.linear for operator in layer.operators
    )  # the embedding: nothing flows back through it
    operators: list[Operator] = []
    for previous, operator in pairwise((None, *layer.operators)):
        if operator is not None:
            with_adapters = _wrap_with_adapters(
                operator, 0.0 if previous is None else previous.backward_output_bytes, training, shard
            )
            operators += _assign_region_input(
                operator,
                [*with_adapters],
                input_saved=any(adapter_operator.saves_full_input for adapter_operator in operators)
                and not training.lora.dropout,
            )
    if is_embedding:
        operators = [replace(operator, input_gradient=(), saved_bytes=0.0) for operator in operators]
    return replace(layer, operators=tuple(operators))


def _assign_region_input(operator: Operator, operators: list[Operator], *, input_saved: bool) -> list[Operator]:
    """A layer with its adapters, of which the first reads what comes into the region for it.

    kept: adapters before it keep their input, which is this layer's, too, where both read the same.
    """
    if operator.region_input is None:
        return operators
    first, *remaining = (replace(adapter_operator, region_input=None) for adapter_operator in operators)
    shared = input_saved and first.saves_full_input and operator.region_input is RegionInput.SAME
    saved_bytes, deferred_wgrad_bytes = (
        (0.0, first.deferred_wgrad_bytes - first.saved_bytes)
        if shared
        else (first.saved_bytes, first.deferred_wgrad_bytes)
    )
    wgrad_input_bytes = min(first.wgrad_input_bytes, saved_bytes)
    return [
        replace(
            first,
            region_input=operator.region_input,
            saved_bytes=saved_bytes,
            deferred_wgrad_bytes=deferred_wgrad_bytes,
            wgrad_input_bytes=wgrad_input_bytes,
        ),
        *remaining,
    ]


def _wrap_with_adapters(
    operator: Operator, backward_result_bytes: Bytes, training: Training, shard: LayerShard
) -> Iterator[Operator]:
    """A frozen operator, with the halves of its adapters around it, or before it where its inputs are split.

    returned: bytes that the backward of the operator before reads of its result, which this one keeps in its place.
    """
    lora, linear = training.lora, operator.linear
    adapters = () if lora is None or linear is None else tuple(_sharded_adapters(linear, lora, training, shard))
    frozen = _freeze_operator(operator, backward_result_bytes if operator.wgrad_input_bytes else 0.0)
    if linear is None or lora is None or not linear.projections:
        yield frozen
        return
    base_operator = frozen if lora.base is None else _add_dequantization(frozen, linear, lora.base)
    if not adapters:
        yield base_operator
        return
    adapter_pair = _LoraOperators(linear, lora, training, shard, adapters)
    if adapter_pair.shares_input:  # the adapters keep it
        base_operator = replace(base_operator, saved_bytes=operator.saved_bytes - operator.wgrad_input_bytes)
    lora_a, lora_b = adapter_pair.lora_a, adapter_pair.lora_b
    if adapter_pair.shares_input and not shard.sequence_parallel:
        lora_a = replace(lora_a, reads_module=operator.reads_module, wgrad_input_bytes=lora_a.saved_bytes)
    # a frozen layer runs before its adapters, whatever joins them, so it has run when these save
    base_after_adapters = replace(base_operator, saves_outputs=True)
    yield from _assign_modules(
        operator, (lora_a, lora_b, base_after_adapters) if linear.row_parallel else (lora_a, base_operator, lora_b)
    )


def _assign_modules(operator: Operator, operators: Iterable[Operator]) -> Iterator[Operator]:
    """A layer with its adapters in the modules that it is in, whose inputs the first of them keeps."""
    memberships = operator.memberships
    for wrapped in operators:
        yield replace(wrapped, memberships=memberships)
        memberships = tuple(ModuleMembership(module) for module, _ in operator.memberships)


def _freeze_operator(operator: Operator, backward_result_bytes: Bytes) -> Operator:
    """An operator without gradients of weights, which keeps no more than input gradients read."""
    saved_bytes = operator.saved_bytes - operator.wgrad_input_bytes + backward_result_bytes
    return replace(
        operator,
        weight_gradient=(),
        saved_bytes=saved_bytes,
        deferred_wgrad_bytes=0.0,
        wgrad_input_bytes=0.0,
        trainable=False,
    )


def _add_dequantization(operator: Operator, linear: LinearLayer, base: DType) -> Operator:
    """An operator that unpacks its weights before each product."""
    compute_dtype = linear.formats.forward
    name = f"{linear.name}.dequantize"
    dequantize = memory_bound.dequantize_kernel(name, base, compute_dtype, rows=linear.outputs, width=linear.inputs)
    return replace(
        operator,
        forward=(dequantize, *operator.forward),
        input_gradient=(dequantize, *operator.input_gradient),
        recompute_override=(dequantize, *operator.recompute_override)
        if operator.recompute_override
        else operator.recompute_override,
        parameter_group=QUANTIZED,
        dequantized_bytes=float(
            max(outputs for _, outputs in linear.projections) * linear.inputs * compute_dtype.bytes
        ),
    )


@dataclass(frozen=True, slots=True)
class _Adapter:
    """The two products beside some projections of a linear layer, and the outputs of these on this rank."""

    a: LinearLayer
    b: LinearLayer
    base_outputs: int


def _sharded_adapters(linear: LinearLayer, lora: Lora, training: Training, shard: LayerShard) -> Iterator[_Adapter]:
    """The adapters of a linear layer on one rank."""
    formats, projection_outputs = MatmulFormats.uniform(training.recipe.activations), dict(linear.projections)
    for target in lora.targets:
        outputs = sum(projection_outputs.get(projection, 0) for projection in target.projections)
        if not outputs:
            continue
        name = f"{linear.name}.{target.value}" if len(projection_outputs) > 1 else linear.name
        rank, sharded_outputs = (
            (lora.rank, -(-outputs // shard.tp)) if linear.row_parallel else (lora.rank // shard.tp, outputs)
        )
        a = LinearLayer(f"{name}.lora_a", linear.tokens, linear.inputs, rank, formats)
        yield _Adapter(a, LinearLayer(f"{name}.lora_b", linear.tokens, lora.rank, sharded_outputs, formats), outputs)


@dataclass(frozen=True, slots=True)
class _LoraOperators:
    """The adapters of one linear layer, as two operators: all products A, and all products B."""

    linear: LinearLayer
    lora: Lora
    training: Training
    shard: LayerShard
    adapters: tuple[_Adapter, ...]

    @property
    def shares_input(self) -> bool:
        """Whether all adapters read the linear layer's own input."""
        return not self.lora.dropout

    @property
    def lora_a(self) -> Operator:
        """From the inputs to the rank."""
        operator = self._matmul_operator("lora_a", [adapter.a for adapter in self.adapters])
        inputs = self.linear.tokens, self.linear.inputs
        names = [f"{adapter.a.name}.gradient_sum" for adapter in self.adapters]
        gradient_sums = [self._memory_bound_kernel(memory_bound.GRADIENT_SUM, name, inputs) for name in names]
        saved_bytes = self._activation_bytes(*inputs)
        if not self.shares_input:
            operator, saved_bytes = (
                self._add_dropout(operator),
                len(self.adapters) * (saved_bytes + inputs[0] * inputs[1]),
            )
        return replace(
            operator,
            input_gradient=(*operator.input_gradient, *gradient_sums),
            saved_bytes=saved_bytes,
            deferred_wgrad_bytes=saved_bytes
            + sum(self._activation_bytes(adapter.a.tokens, adapter.a.outputs) for adapter in self.adapters),
            saves_full_input=True,
            tp_collectives=TpCollectives(
                after_forward=self._rank_collectives(TpCombine.SUM if self.linear.row_parallel else TpCombine.GATHER)
            ),
        )

    @property
    def lora_b(self) -> Operator:
        """From the rank to the outputs, and their sum with the frozen layer's."""
        operator = self._matmul_operator("lora_b", [adapter.b for adapter in self.adapters])
        output_shapes = [(adapter.b.name, (self._output_tokens, adapter.base_outputs)) for adapter in self.adapters]
        scaled_sum = memory_bound.SCALED_SUM[self.training.fused]
        saved_bytes = sum(self._activation_bytes(adapter.b.tokens, adapter.b.inputs) for adapter in self.adapters)
        output_collectives = self._output_collectives
        return replace(
            operator,
            forward=(
                *operator.forward,
                *(self._memory_bound_kernel(scaled_sum, f"{name}.scaled_sum", shape) for name, shape in output_shapes),
            ),
            input_gradient=(
                *(
                    self._memory_bound_kernel(memory_bound.SCALE, f"{name}.scale", shape)
                    for name, shape in output_shapes
                ),
                *operator.input_gradient,
            ),
            saved_bytes=saved_bytes,
            deferred_wgrad_bytes=saved_bytes
            + sum(self._activation_bytes(adapter.b.tokens, adapter.b.outputs) for adapter in self.adapters),
            tp_collectives=TpCollectives(
                after_forward=output_collectives,
                before_backward=output_collectives if self.shard.sequence_parallel else (),
                after_input_gradient=self._rank_collectives(TpCombine.SUM),
            ),
        )

    @property
    def _output_tokens(self) -> int:
        """Tokens at which the adapters' results meet the frozen layer's."""
        return self.shard.residual_tokens if self.linear.row_parallel else self.shard.tokens

    @property
    def _output_collectives(self) -> tuple[TpCollective, ...]:
        """The results of B that were split by columns beside a layer whose own result is whole."""
        if self.shard.tp == 1 or not self.linear.row_parallel:
            return ()
        return tuple(
            TpCollective(TpCombine.GATHER, self._activation_bytes(adapter.b.tokens, adapter.base_outputs))
            for adapter in self.adapters
        )

    def _rank_collectives(self, combine: TpCombine) -> tuple[TpCollective, ...]:
        """What is between A and B."""
        if self.shard.tp == 1:
            return ()
        return tuple(
            TpCollective(combine, self._activation_bytes(adapter.b.tokens, adapter.b.inputs))
            for adapter in self.adapters
        )

    def _matmul_operator(self, name: str, linears: Sequence[LinearLayer]) -> Operator:
        """The products of some linear layers as one operator."""
        recipe, accumulation = self.training.recipe, self.training.accumulation
        return Operator(
            f"{self.linear.name}.{name}",
            ParallelRegion.SHARDED,
            forward=tuple(kernel for linear in linears for kernel in linear.forward(recipe)),
            input_gradient=tuple(kernel for linear in linears for kernel in linear.input_gradient(recipe)),
            weight_gradient=tuple(
                kernel for linear in linears for kernel in linear.weight_gradient(recipe, accumulation)
            ),
            parameter_count=sum(linear.parameter_count for linear in linears),
            parameter_group=ADAPTERS,
        )

    def _add_dropout(self, operator: Operator) -> Operator:
        """The products A of inputs of which dropout has left a part."""
        dropout = memory_bound.DROPOUT
        shape = dropout.shape_for(self.linear.tokens, self.linear.inputs)
        names = [f"{adapter.a.name}.dropout" for adapter in self.adapters]
        dtype = self.training.recipe.activations
        dropouts = (dropout.forward_kernel(name, dtype, shape) for name in names)
        masks = (kernel for name in names for kernel in dropout.backward_kernels(name, dtype, shape))
        return replace(
            operator, forward=(*dropouts, *operator.forward), input_gradient=(*operator.input_gradient, *masks)
        )

    def _memory_bound_kernel(self, spec: MemoryBoundSpec, name: str, shape: tuple[int, int]) -> Kernel:
        return spec.forward_kernel(name, self.training.recipe.activations, spec.shape_for(*shape))

    def _activation_bytes(self, rows: int, width: int) -> Bytes:
        """Bytes of an activation."""
        return float(rows * width * self.training.recipe.activations.bytes)
