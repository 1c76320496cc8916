"""Layers with frozen weights and LoRA adapters: which kernels run, what is saved and communicated?

Frozen weights have no gradient: the weight-gradient matmuls disappear, and with them the saved inputs
that only they read. What input gradients read is saved as before (inputs of norms and activations,
queries, keys, values and the attention output). Nothing is propagated back through the embedding; the
input gradient of the first layer is computed all the same, as activation checkpointing and pipelines
require it (peft, `enable_input_require_grads`). Norms run the same kernels. Biases are counted with their
matrix.

An adapter is two matmuls, A [tokens, inputs] to [tokens, rank] and B to [tokens, outputs]. Its scaled
result is added to the output of the frozen layer: one kernel where kernels are fused (torch.compile),
else two (torchtune `LoRALinear`, peft `lora.Linear`). Backward scales the gradient and adds the adapter's
input gradient to that of the frozen layer, as autograd does. A saves its input, once for all adapters of
a fused layer (and of a parallel block whose branches read the same input); with dropout each adapter
saves its own copy and the mask. B saves A's output.

Tensor parallelism follows Megatron-Bridge (`ParallelLinearAdapter`). For a column-parallel layer A and B
are split by columns: A's output is all-gathered and B's input gradient all-reduced. For a row-parallel
layer A is split by rows and its output all-reduced; B is split by columns, its output all-gathered and
its input gradient all-reduced; under sequence parallelism the gradient that enters B is all-gathered. A
saves its full (unsharded) input, so no rank gathers it again. Assumed: the input gradients of a layer and
of its adapters are reduced in one collective.

Quantized base weights (QLoRA) are those of all projections of the layers. Before every forward and
backward matmul one kernel dequantizes them: it reads weights and scales and writes the compute format
(bitsandbytes; torchao where it is compiled), one projection after the other. Reference: Hu et al. 2021
(arXiv:2106.09685), Dettmers et al. 2023 (arXiv:2305.14314).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model import memory_bound
from clustersim.model.frozen_layers import freeze_operator
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
from clustersim.model.training import FusedKernel, Training


def apply_lora(layer: LayerOperators, training: Training, shard: LayerShard) -> LayerOperators:
    """The layer as it is trained: unchanged, or frozen with LoRA adapters if the training has them."""
    if training.lora is None:
        return layer
    is_embedding = not any(
        operator.linear for operator in layer.operators
    )  # the embedding: no gradient is propagated through it
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
    """Operators of a frozen layer and its adapters; the first of them reads the region's input.

    input_saved: an earlier adapter already saves its input, which this layer shares where both read the same
    tensor.
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
    """A frozen operator with its adapters: between A and B, or after both if it is row-parallel.

    backward_result_bytes: bytes of the previous operator's output which that operator's backward reads; this
    one saves them.
    """
    lora, linear = training.lora, operator.linear
    adapters = () if lora is None or linear is None else tuple(_sharded_adapters(linear, lora, training, shard))
    frozen = freeze_operator(operator, backward_result_bytes)
    if linear is None or lora is None or not linear.projections:
        yield frozen
        return
    base_operator = frozen if lora.base is None else _add_dequantization(frozen, linear, lora.base)
    if not adapters:
        yield base_operator
        return
    adapter_pair = _LoraOperators(linear, lora, training, shard, adapters)
    if adapter_pair.shares_input:  # the adapters save it
        base_operator = replace(base_operator, saved_bytes=operator.saved_bytes - operator.wgrad_input_bytes)
    lora_a, lora_b = adapter_pair.lora_a, adapter_pair.lora_b
    if adapter_pair.shares_input and not shard.sequence_parallel:
        lora_a = replace(lora_a, reads_module=operator.reads_module, wgrad_input_bytes=lora_a.saved_bytes)
    # a frozen layer runs before its adapters, whatever the collectives, so it has run when these save their tensors
    base_after_adapters = replace(base_operator, saves_outputs=True)
    yield from _assign_modules(
        operator, (lora_a, lora_b, base_after_adapters) if linear.row_parallel else (lora_a, base_operator, lora_b)
    )


def _assign_modules(operator: Operator, operators: Iterable[Operator]) -> Iterator[Operator]:
    """Assign a layer and its adapters to the layer's modules; the first operator saves the module inputs."""
    memberships = operator.memberships
    for wrapped in operators:
        yield replace(wrapped, memberships=memberships)
        memberships = tuple(ModuleMembership(module) for module, _ in operator.memberships)


def _add_dequantization(operator: Operator, linear: LinearLayer, base: DType) -> Operator:
    """An operator that dequantizes its weights before each matmul."""
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
    """Matmuls A and B of one adapter, and the output columns of its projections on this rank."""

    a: LinearLayer
    b: LinearLayer
    base_outputs: int


def _sharded_adapters(linear: LinearLayer, lora: Lora, training: Training, shard: LayerShard) -> Iterator[_Adapter]:
    """The adapters of a linear layer on one rank, sharded over tensor-parallel ranks."""
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
    """The adapters of one linear layer as two operators: all matmuls A, and all matmuls B."""

    linear: LinearLayer
    lora: Lora
    training: Training
    shard: LayerShard
    adapters: tuple[_Adapter, ...]

    @property
    def shares_input(self) -> bool:
        """Whether all adapters read the linear layer's own input (no dropout)."""
        return not self.lora.dropout

    @property
    def lora_a(self) -> Operator:
        """All matmuls A: inputs to rank."""
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
        """All matmuls B: rank to outputs, and the scaled sum with the frozen layer's output."""
        operator = self._matmul_operator("lora_b", [adapter.b for adapter in self.adapters])
        output_shapes = [(adapter.b.name, (self._output_tokens, adapter.base_outputs)) for adapter in self.adapters]
        scaled_sum = memory_bound.SCALED_SUM[self.training.fuses(FusedKernel.RESIDUAL)]
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
        """Tokens for which the adapters' outputs are added to the frozen layer's output."""
        return self.shard.residual_tokens if self.linear.row_parallel else self.shard.tokens

    @property
    def _output_collectives(self) -> tuple[TpCollective, ...]:
        """All-gathers of B's column-split outputs for a layer whose own output is not split (row-parallel)."""
        if self.shard.tp == 1 or not self.linear.row_parallel:
            return ()
        return tuple(
            TpCollective(TpCombine.GATHER, self._activation_bytes(adapter.b.tokens, adapter.base_outputs))
            for adapter in self.adapters
        )

    def _rank_collectives(self, combine: TpCombine) -> tuple[TpCollective, ...]:
        """Collectives on the [tokens, rank] tensors between A and B."""
        if self.shard.tp == 1:
            return ()
        return tuple(
            TpCollective(combine, self._activation_bytes(adapter.b.tokens, adapter.b.inputs))
            for adapter in self.adapters
        )

    def _matmul_operator(self, name: str, linears: Sequence[LinearLayer]) -> Operator:
        """The matmuls of some linear layers as one operator."""
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
        """Matmuls A with dropout of their inputs."""
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
        """Bytes of an activation [rows, width]."""
        return float(rows * width * self.training.recipe.activations.bytes)
