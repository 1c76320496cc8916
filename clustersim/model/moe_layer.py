"""Operators of a mixture-of-experts (MoE) layer on one rank.

The router selects experts and tokens are permuted for them (`moe_router`). The routed tokens are
dispatched to the ranks of their experts; there they are sorted by expert, pass its MLP as grouped matmuls
(`grouped_linear`), and are sent back, where a token's expert outputs are summed (combine). The
probabilities are multiplied with the activation's output, in its kernel, so that expert outputs are not
saved, or with the expert outputs (`Overheads.weighting`). Shared experts are a dense MLP of every token.
Collectives are inserted by lowering (`parallel.token_dispatch`). Tokens are spread evenly over a rank's experts.

Saved are the inputs of the experts' matmuls and activation, the probability of each routed token (FP32),
and the activation's output where it is weighted in separate kernels: Megatron-LM fuses the two for SwiGLU
(`weighted_bias_swiglu_impl`), not for GELU; with unfused activations they are never fused. Reference:
NVIDIA/Megatron-LM, megatron/core/transformer/moe/{token_dispatcher,experts,moe_layer}.py.
"""

from dataclasses import dataclass, replace
from math import comb
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model import memory_bound
from clustersim.model.grouped_linear import GroupedLinear
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.layer_stack import DenseMlp, MlpType, MoeMlp
from clustersim.model.linear import LinearLayer
from clustersim.model.mlp import mlp_operators
from clustersim.model.moe_expert_bias import add_clamp, add_expert_bias
from clustersim.model.moe_router import (
    TokenPermutation,
    data_kernel,
    permute_operator,
    router_operators,
    unpermute_operator,
)
from clustersim.model.operators import EXPERTS, Operator, ParallelRegion, assign_module, mark_module_reader
from clustersim.model.overheads import ExpertRowMasks, ExpertSort, ExpertWeighting, Grouping
from clustersim.model.precision_recipe import MatmulFormats
from clustersim.model.quantization import LinearOperands, linear_casts
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.sharded_layer import (
    RankContext,
    gradient_sum_kernel,
    linear_operator,
    memory_bound_operator,
    residual_stream_operator,
)
from clustersim.model.training import FusedKernel
from clustersim.model.weight_matrices import WeightMatrix

_WEIGHTING_PASSES: Final = 2.0  # passes over the elements: one read, one write
_WEIGHTING_BACKWARD_PASSES: Final = 3.0  # the gradient, the weighted tensor, and its gradient, in one kernel
_UNFUSED_BACKWARD_PASSES: Final = 6.0  # a product of the gradient with each operand, one of them summed, in 3 launches
_PRODUCT_GRADIENTS: Final = 3  # the gradient of an unfused product, and its products with both factors
_SORT, _UNSORT = "experts.sort", "experts.unsort"  # operators
_CONVERTED_WEIGHTING: Final = {  # bytes per element, and kernels, forward and backward, of bf16 by way of FP32
    # to FP32, times the scalar, and back; backward: back, both products, of which the second is summed, and to bf16
    ExpertWeighting.EAGER_OUTPUT: ((2 + 4) + (4 + 4) + (4 + 2), 3, (2 + 4) + (4 + 4) + (4 + 4 + 4 + 4) + (4 + 2), 5),
    # to FP32, read by a matmul that writes tokens; backward: both gradients of it, and to bf16
    ExpertWeighting.BATCHED_OUTPUT: ((2 + 4) + 4, 2, 4 + 4 + (4 + 2), 3),
}
_SORT_PASSES: Final = {  # reads and writes of all tokens, forward and backward
    ExpertSort.CHUNKS: {_SORT: (2, 2), _UNSORT: (2, 2)},
    ExpertSort.INDICES: {_SORT: (2, 2 + 2), _UNSORT: (2, 2)},
    ExpertSort.PADDED_INDICES: {_SORT: (2 + 2, 2 + 2), _UNSORT: (2, 2 + 3)},
}


def moe_operators(rank: RankContext, moe: MoeMlp) -> list[Operator]:
    """The operators of a MoE layer between its norm and the residual add."""
    experts = _LocalExperts(rank, moe)
    shared = _shared_experts(rank, moe) if moe.shared else []
    permute = [] if experts.permutes_after_dispatch else [permute_operator(rank, moe)]
    unpermute = [] if experts.permutes_after_dispatch else [unpermute_operator(rank, moe)]
    combined = experts.combined_operators()
    return [*router_operators(rank, moe), *permute, *experts.expert_operators(), *combined, *unpermute, *shared]


def _shared_experts(rank: RankContext, moe: MoeMlp) -> list[Operator]:
    """The shared experts, and the sum of their output with that of the routed experts."""
    up, *remaining = mlp_operators(rank, DenseMlp(moe.shared, moe.form), "shared")
    remaining += _shared_gate(rank) if moe.shared_gate else []
    shared_bytes = rank.shared_input_bytes(rank.residual_elements)  # the router saves it, too
    up = replace(
        up,
        saved_bytes=up.saved_bytes - shared_bytes,
        deferred_wgrad_bytes=up.deferred_wgrad_bytes - shared_bytes,
        wgrad_input_bytes=up.wgrad_input_bytes - shared_bytes,
    )
    up = replace(up, input_gradient=(*up.input_gradient, gradient_sum_kernel(rank, "shared.up")))
    total = memory_bound.residual_spec(dropout=False, fused=rank.training.fuses(FusedKernel.RESIDUAL))
    return [
        *assign_module((up, *remaining), RecomputeModule.SHARED_EXPERTS),
        residual_stream_operator(rank, "mlp.sum", total),
    ]


def _shared_gate(rank: RankContext) -> list[Operator]:
    """A gate value per token, and the shared experts' output times it; both are saved."""
    tokens, hidden = rank.shard.residual_tokens, rank.model.hidden
    linear = LinearLayer("shared.gate", tokens, hidden, 1, MatmulFormats.uniform(rank.dtype))
    gate = replace(
        linear_operator(rank, linear, 0.0), region=ParallelRegion.REPLICATED, linear=None
    )  # the router saves it
    shape = MemoryBoundShape(MemoryBoundOp.WEIGHTING, tokens, hidden, fused=rank.training.fuses(FusedKernel.ACTIVATION))
    forward, backward = _weighting_kernels("shared.scale", rank.dtype, shape)
    saved_bytes = float(shape.elements * rank.dtype.bytes)
    return [gate, Operator("shared.scale", ParallelRegion.REPLICATED, (forward,), (backward,), saved_bytes=saved_bytes)]


def _weighting_kernels(name: str, dtype: DType, shape: MemoryBoundShape) -> tuple[Kernel, Kernel]:
    """Kernels that multiply each row by a scalar, and compute the gradients of both."""
    tensor_bytes, kind, backward_shape = (
        shape.elements * dtype.bytes,
        KernelKind.RESIDUAL,
        replace(shape, backward=True),
    )
    backward_passes, launches = (_WEIGHTING_BACKWARD_PASSES, 1) if shape.fused else (_UNFUSED_BACKWARD_PASSES, 3)
    return (
        data_kernel(name, kind, dtype, shape, _WEIGHTING_PASSES * tensor_bytes),
        data_kernel(
            f"{name}.input_gradient", kind, dtype, backward_shape, backward_passes * tensor_bytes, launches=launches
        ),
    )


def _output_weighting(rank: RankContext, rows: int, region: ParallelRegion) -> Operator:
    """What experts return times its probability, an operator of its own; in FP32 on the ranks of the tokens."""
    is_fused, weighting = rank.training.fuses(FusedKernel.ACTIVATION), rank.training.overheads.weighting
    if weighting is ExpertWeighting.OUTPUT and not is_fused:
        weighting = ExpertWeighting.EAGER_OUTPUT
    converted = _CONVERTED_WEIGHTING.get(weighting) if region is ParallelRegion.REPLICATED else None
    is_fused = is_fused and weighting in (ExpertWeighting.OUTPUT, ExpertWeighting.UNCONVERTED_OUTPUT)
    formats = () if converted is None else (DType.FP32,)
    shape = MemoryBoundShape(MemoryBoundOp.WEIGHTING, rows, rank.model.hidden, fused=is_fused, formats=formats)
    forward, backward = _weighting_kernels("experts.output_weighting", rank.dtype, shape)
    if converted is not None:
        forward_bytes, forward_launches, backward_bytes, backward_launches = converted
        forward = replace(forward, bytes=float(forward_bytes * shape.elements), launches=forward_launches)
        backward = replace(backward, bytes=float(backward_bytes * shape.elements), launches=backward_launches)
    saved = float(shape.elements * (rank.dtype if converted is None else DType.FP32).bytes)
    gradients = 0.0 if is_fused or weighting is ExpertWeighting.BATCHED_OUTPUT else _PRODUCT_GRADIENTS * saved
    return Operator(forward.name, region, (forward,), (backward,), saved_bytes=saved, gradient_bytes=gradients)


@dataclass(frozen=True, slots=True)
class _LocalExperts:
    """The experts of one rank and the tokens dispatched to them."""

    rank: RankContext
    moe: MoeMlp

    @property
    def expert_count(self) -> int:
        """Number of experts on this rank."""
        return self.moe.experts // self.rank.shard.ep

    @property
    def tokens(self) -> int:
        """Routed tokens that this rank receives from all ranks of its expert-parallel group."""
        balanced = self.moe.routed_tokens(self.rank.shard.residual_tokens) * self.rank.shard.etp
        return balanced if self.rank.shard.load_factor == 1.0 else max(1, round(balanced * self.rank.shard.load_factor))

    @property
    def ffn(self) -> int:
        """Width of an expert on this rank."""
        return self.moe.ffn // self.rank.shard.etp

    @property
    def _is_fused(self) -> bool:
        """Whether the matmul kernels include the operations between them."""
        return self.rank.training.grouping is Grouping.FUSED

    @property
    def permutes_after_dispatch(self) -> bool:
        """Whether tokens are copied per expert on this rank, after the dispatch."""
        return self.rank.shard.permute_after_dispatch and self.rank.shard.ep * self.rank.shard.etp > 1

    @property
    def _permutation(self) -> TokenPermutation:
        """Permutation of received tokens, each received once, to one row per token and local expert."""
        moe, source_tokens = self.moe, self.rank.shard.residual_tokens * self.rank.shard.etp * self.rank.shard.ep
        miss_probability = comb(moe.experts - self.expert_count, moe.top_k) / comb(moe.experts, moe.top_k)
        received = min(source_tokens, source_tokens * (1.0 - miss_probability) * self.rank.shard.load_factor)
        return TokenPermutation(self.rank, round(received), self.tokens, self.expert_count, ParallelRegion.EXPERT)

    def expert_operators(self) -> list[Operator]:
        """Sort by expert, the expert MLP, and the sort back into the order of arrival."""
        rank, form = self.rank, self.moe.form
        spec = memory_bound.activation_spec(form, fused=rank.training.fuses(FusedKernel.ACTIVATION))
        activation = memory_bound_operator(
            ParallelRegion.EXPERT, "experts.activation", rank.dtype, spec, (spec.shape_for(self.tokens, self.ffn),)
        )
        activation = replace(
            activation, saved_bytes=activation.saved_bytes + self.tokens * DType.FP32.bytes
        )  # the probability of each routed token
        is_separate = form is MlpType.GELU or not rank.training.fuses(FusedKernel.ACTIVATION)
        if is_separate and not self._weights_outputs:
            activation = self._add_weighting(activation)
        up_factor = 2 if form is MlpType.SWIGLU else 1
        if self._is_fused:
            activation = replace(activation, forward=(), input_gradient=())
        module_input_bytes = float(self.tokens * (up_factor * self.ffn * rank.dtype.bytes + DType.FP32.bytes))
        down = self._grouped_operator("experts.down", self.ffn, rank.model.hidden, is_up=False)
        if self.moe.bias:
            activation = add_clamp(activation, rank.dtype, self.tokens, up_factor * self.ffn)
            down = add_expert_bias(down, rank.dtype, self.expert_count, (self.tokens, rank.model.hidden))
        matmuls = [
            *self._row_masks("experts.input_mask", rank.model.hidden, in_place=True),
            self._grouped_operator("experts.up", rank.model.hidden, up_factor * self.ffn, is_up=True),
            *self._row_masks("experts.up_mask", up_factor * self.ffn),
            *assign_module([activation], RecomputeModule.MOE_ACTIVATION, module_input_bytes),
            *mark_module_reader([down], RecomputeModule.MOE_ACTIVATION),
            *self._row_masks("experts.down_mask", rank.model.hidden),
        ]
        if self.permutes_after_dispatch:
            weighting = [_output_weighting(rank, self.tokens, ParallelRegion.EXPERT)] if self._weights_outputs else []
            makes_mask = rank.shard.receives_indices and rank.training.overheads.indices_unfused
            return [
                *([self._permutation.mask_operator(self.moe.top_k)] if makes_mask else []),
                self._permutation.permute_operator(_SORT),
                *matmuls,
                *weighting,
                self._permutation.unpermute_operator(_UNSORT),
            ]
        if (self.expert_count == 1 or rank.shard.ep == 1) and self._sort is not ExpertSort.PADDED_INDICES:
            return matmuls
        return [self._sort_operator(_SORT), *matmuls, self._sort_operator(_UNSORT)]

    def _row_masks(self, name: str, width: int, *, in_place: bool = False) -> list[Operator]:
        """A mask over all rows where the framework has one: filled in a copy, or in place; in backward, in a copy.

        Filling reads and writes all rows, as a copy does. A compiler fuses it with what is around it.
        """
        rank = self.rank
        masks = rank.training.overheads.expert_row_masks
        applies = masks is ExpertRowMasks.ALWAYS or (masks is ExpertRowMasks.EXPERT_PARALLEL and rank.shard.ep > 1)
        if not applies or rank.training.fuses(FusedKernel.ACTIVATION):
            return []
        fill, *backward = (
            memory_bound.copy_kernel(kernel, rank.dtype, self.tokens * width)
            for kernel in (name, f"{name}.gradient_copy", f"{name}.input_gradient")
        )
        copies = () if in_place else (replace(fill, name=f"{name}.copy"),)
        return [Operator(name, ParallelRegion.EXPERT, (*copies, fill), tuple(backward))]

    def combined_operators(self) -> list[Operator]:
        """What follows on the ranks that tokens return to, before those of a token are summed."""
        if self.permutes_after_dispatch or not self._weights_outputs:
            return []
        rows = self.moe.routed_tokens(self.rank.shard.residual_tokens)
        return [_output_weighting(self.rank, rows, ParallelRegion.REPLICATED)]

    @property
    def _weights_outputs(self) -> bool:
        return self.rank.training.overheads.weighting is not ExpertWeighting.ACTIVATION

    @property
    def _sort(self) -> ExpertSort:
        return self.rank.training.overheads.expert_sort

    def _add_weighting(self, activation: Operator) -> Operator:
        """The activation with its output multiplied by the tokens' probabilities in separate kernels."""
        shape = MemoryBoundShape(MemoryBoundOp.WEIGHTING, self.tokens, self.ffn)
        forward, backward = _weighting_kernels("experts.weighting", self.rank.dtype, shape)
        return replace(
            activation,
            forward=(*activation.forward, forward),
            input_gradient=(backward, *activation.input_gradient),
            saved_bytes=activation.saved_bytes + shape.elements * self.rank.dtype.bytes,
        )

    def _linear_operands(self, name: str, inputs: int, outputs: int, *, is_up: bool) -> LinearOperands:
        """Operand sizes: the up matmul's input, and the down matmul's output gradient, come from the tokens' ranks."""
        quantized_dispatch = self.rank.training.recipe.dispatch_format is not None
        local_tokens = self.rank.shard.residual_tokens
        input_tokens, gradient_tokens = (
            (local_tokens if quantized_dispatch and is_up else self.tokens),
            (local_tokens if quantized_dispatch and not is_up else self.tokens),
        )
        operands = LinearOperands(
            name, self.tokens, inputs, outputs, input_tokens, gradient_tokens, matrix_count=self.expert_count
        )
        return replace(
            operands,
            input_dispatched=quantized_dispatch and is_up,
            gradient_dispatched=quantized_dispatch and not is_up,
        )

    def _grouped_operator(self, name: str, inputs: int, outputs: int, *, is_up: bool) -> Operator:
        rank, recipe = self.rank, self.rank.training.recipe
        sizes = self.expert_count, self.tokens, inputs, outputs
        linear = GroupedLinear(name, *sizes, rank.matmul_formats, self.moe.bias, rank.training.grouping)
        input_bytes = rank.saved_input_bytes(self.tokens * inputs)
        casts = linear_casts(recipe, rank.matmul_formats, self._linear_operands(name, inputs, outputs, is_up=is_up))
        forward_casts, backward_casts = casts.forward, casts.backward
        if self._is_fused:  # casts between the two matmuls are fused
            forward_casts, backward_casts = (forward_casts, ()) if is_up else ((), backward_casts)
        return Operator(
            name,
            ParallelRegion.EXPERT,
            (*forward_casts, *linear.forward(recipe)),
            (*backward_casts, *linear.input_gradient(recipe)),
            (*casts.weight_gradient, *linear.weight_gradient(recipe, rank.training.accumulation)),
            parameter_count=linear.parameter_count,
            parameter_group=EXPERTS,
            saved_bytes=input_bytes,
            deferred_wgrad_bytes=input_bytes
            + self.tokens * outputs * rank.deferred_gradient_dtype(rank.matmul_formats).bytes,
            wgrad_input_bytes=input_bytes,
            cached_cast_elements=casts.cached_weight_elements,
            matrices=self._expert_matrices(inputs, outputs, is_up=is_up),
        )

    def _expert_matrices(self, inputs: int, outputs: int, *, is_up: bool) -> tuple[WeightMatrix, ...]:
        """The matrices of an up or down projection; etp ranks share the width."""
        is_split = is_up and not self.rank.training.overheads.joins_gate
        widths = [self.ffn] * (outputs // self.ffn) if is_split else [outputs]
        return tuple(WeightMatrix(width, inputs, self.expert_count, shares_inputs=not is_up) for width in widths)

    def _sort_operator(self, name: str) -> Operator:
        """Reordering of tokens; without a fused kernel chunks are concatenated, which moves as much.

        By indices, backward of the sort adds rows to zeros. A row of zeros more is a copy before the sort; behind
        the sort back it is dropped, whose backward copies the gradient into zeros.
        """
        rank, hidden = self.rank, self.rank.model.hidden
        shape = MemoryBoundShape(MemoryBoundOp.PERMUTE, self.tokens, hidden, fused=True, table=self.tokens)
        forward_passes, backward_passes = _SORT_PASSES[self._sort][name]
        pass_bytes = shape.elements * rank.dtype.bytes
        backward_name = f"{name}.input_gradient"
        backward = data_kernel(backward_name, KernelKind.COPY, rank.dtype, shape, backward_passes * pass_bytes)
        return Operator(
            name,
            ParallelRegion.EXPERT,
            (data_kernel(name, KernelKind.COPY, rank.dtype, shape, forward_passes * pass_bytes),),
            (backward,),
        )
