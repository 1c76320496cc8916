"""Which operators on one rank map a diffusion transformer's time step and text, and modulate its layers?

Vectors are one per sample, so their matrices are products of few rows, which every tensor-parallel rank runs. A norm's
output is scaled and shifted, and a branch's result multiplied by a gate before the residual add: separate kernels where
norms are not fused with what follows, since the vectors are broadcast over a sample's tokens. Backward also sums the
gradients of the vectors over the tokens.
"""

from dataclasses import replace

from clustersim.model import memory_bound
from clustersim.model.conditioning import Conditioning, Modulation, TextInput
from clustersim.model.kernels import KernelKind, MemoryBoundOp
from clustersim.model.layer_stack import MlpType
from clustersim.model.memory_bound import MemoryBoundSpec, MemoryPasses
from clustersim.model.model_ends import PatchHead
from clustersim.model.operators import Operator, ParallelRegion
from clustersim.model.sharded_layer import (
    RankContext,
    linear_operator,
    memory_bound_operator,
    replicated_linear,
    residual_stream_operator,
)
from clustersim.model.training import FusedKernel

# x (1 + scale) + shift. Backward: the gradient of x (read, write), those of scale (two reads) and shift (one).
_MODULATE_FUSED = MemoryBoundSpec(
    KernelKind.RESIDUAL, MemoryBoundOp.SCALE, MemoryPasses(2), MemoryPasses(3), saved=MemoryPasses(1), fused=True
)
_MODULATE_UNFUSED = MemoryBoundSpec(
    KernelKind.RESIDUAL,
    MemoryBoundOp.SCALE,
    MemoryPasses(4, launches=2),
    MemoryPasses(5, launches=3),
    saved=MemoryPasses(1),
)
# The mean squared error in FP32. Backward writes the gradient.
_SQUARED_ERROR = MemoryBoundSpec(
    KernelKind.LOSS, MemoryBoundOp.RESIDUAL, MemoryPasses(1, fp32=1), MemoryPasses(1, fp32=2), saved=MemoryPasses(0, 1)
)


def modulation_operators(rank: RankContext, modulation: Modulation) -> list[Operator]:
    """Shifts, scales and gates of a layer for every sample of the microbatch."""
    hidden, samples = rank.model.hidden, rank.shard.batch
    if modulation.shares_matrix:
        spec = memory_bound.residual_spec(dropout=False, fused=True)
        shape = spec.shape_for(samples, modulation.vectors * hidden)
        operator = memory_bound_operator(ParallelRegion.REPLICATED, "modulation.table", rank.dtype, spec, (shape,))
        return [replace(operator, parameter_count=modulation.vectors * hidden)]
    return [_silu(rank, "modulation.silu"), _vector_linear(rank, "modulation", (hidden, modulation.vectors * hidden))]


def modulate_operator(rank: RankContext, name: str) -> Operator:
    """The scale and shift of a norm's output."""
    spec = _MODULATE_FUSED if rank.training.fuses(FusedKernel.NORM) else _MODULATE_UNFUSED
    return residual_stream_operator(rank, name, spec)


def gate_operator(rank: RankContext, name: str) -> Operator:
    """A branch's result times its gate."""
    return residual_stream_operator(rank, name, memory_bound.LAYER_SCALE)


def conditioning_operators(rank: RankContext, conditioning: Conditioning) -> list[Operator]:
    """The MLPs of a sample's vectors, the matrix that layers share, and a text's tokens."""
    hidden = rank.model.hidden
    operators: list[Operator] = []
    for index, (inputs, outputs) in enumerate(conditioning.vector_sizes(hidden)):
        operator = _vector_linear(rank, f"conditioning.{index}", (inputs, outputs))
        is_first = index % 2 == 0 and index < 2 * len(conditioning.vectors)
        # an MLP's input, the features of a time step or of another model, has no gradient
        operators.append(replace(operator, input_gradient=()) if is_first else operator)
        operators.append(_silu(rank, f"{operator.name}.silu"))
    if operators and conditioning.classes:
        first = operators[0]
        operators[0] = replace(first, parameter_count=first.parameter_count + conditioning.classes * hidden)
    text = [] if conditioning.text is None else _text_operators(rank, conditioning.text)
    return [*operators, *text]


def patch_head_operators(rank: RankContext, head: PatchHead) -> list[Operator]:
    """The modulation of the final norm, the matrix to the values of a patch, and the squared error."""
    hidden, shard = rank.model.hidden, rank.shard
    tokens = shard.residual_tokens * (rank.model.sample_tokens - head.drops) // rank.model.sample_tokens
    linear = replicated_linear(rank, "head.patches", (tokens, hidden, head.outputs), bias=True)
    shape = _SQUARED_ERROR.shape_for(tokens, head.outputs)
    return [
        *modulation_operators(rank, head.modulation),
        modulate_operator(rank, "head.modulate"),
        linear_operator(rank, linear, rank.saved_input_bytes(tokens * hidden), is_replicated=True),
        memory_bound_operator(ParallelRegion.REPLICATED, "head.loss", rank.dtype, _SQUARED_ERROR, (shape,)),
    ]


def _text_operators(rank: RankContext, text: TextInput) -> list[Operator]:
    """Matrices with GELU between them, and the concatenation with the patches where the text joins them."""
    hidden, tokens = rank.model.hidden, rank.shard.batch * text.tokens
    activation = memory_bound.activation_spec(MlpType.GELU, fused=True)
    operators: list[Operator] = []
    for index, (inputs, outputs) in enumerate(text.sizes(hidden)):
        linear = replicated_linear(rank, f"text.{index}", (tokens, inputs, outputs), bias=True)
        operator = linear_operator(rank, linear, rank.saved_input_bytes(tokens * inputs), is_replicated=True)
        if index == 0:
            operators.append(replace(operator, input_gradient=()))  # the text's encoder is frozen
            continue
        shape = activation.shape_for(tokens, hidden)
        operators.append(
            memory_bound_operator(ParallelRegion.REPLICATED, "text.activation", rank.dtype, activation, (shape,))
        )
        operators.append(operator)
    if not text.joins:
        return operators
    kernel = memory_bound.copy_kernel("text.concat", rank.dtype, rank.residual_elements)
    return [*operators, Operator(kernel.name, ParallelRegion.REPLICATED, (kernel,))]


def _silu(rank: RankContext, name: str) -> Operator:
    shape = memory_bound.SILU.shape_for(rank.shard.batch, rank.model.hidden)
    return memory_bound_operator(ParallelRegion.REPLICATED, name, rank.dtype, memory_bound.SILU, (shape,))


def _vector_linear(rank: RankContext, name: str, sizes: tuple[int, int]) -> Operator:
    """A matrix [inputs, outputs] that a vector of each sample passes."""
    samples, (inputs, outputs) = rank.shard.batch, sizes
    linear = replicated_linear(rank, name, (samples, inputs, outputs), bias=True)
    return linear_operator(rank, linear, rank.saved_input_bytes(samples * inputs), is_replicated=True)
