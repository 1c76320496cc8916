"""What does it cost to quantize the operands of a linear layer into the format of its matmuls?

Operands in formats with scales (`dtypes`) are produced by kernels that read an operand in the activation
format and write quantized copies: bytes are elements x (reads x high precision + copies x low precision).
A per-tensor scale that is not delayed (known from earlier steps) requires an amax pass first, which reads
the operand once more. Each operand takes part in two matmuls, along different dimensions: the input in
forward and the weight gradient, the output gradient in both gradients, the weights in forward and the
input gradient. A row-wise block is not a column-wise block, so both copies are made; with one scale per
tensor the second copy is a transpose, needed where tensor cores support only the TN (row by row) layout
(Hopper).

Under sequence parallelism operands are quantized before the all-gather and travel in the matmul format; a
transpose is then made of the gathered tensor, by one more pass. The output of a norm is counted in the
activation format, even where the norm writes two quantized copies of half the width.

Tokens may be quantized before the dispatch to experts, and so may the gradients of the experts' outputs
(DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2): then tokens travel in that format, and the
column-wise copy is made of the received ones.

Weights stored or gathered in the matmul format are not quantized again, except for the other copy.

A kernel that reads a row-major tensor down its columns moves more than it uses: a memory access is 32 bytes
of a row. `UNCOALESCED_READ` reads are counted for it, as many as explain that torch's compiled kernel, which
reads and writes BF16, runs at 0.65 TB/s along columns and at 2.1 along rows (H100, pytorch/pytorch issue
149982; later versions of its compiler may be better). torchao's gradients with scales of rows are plain FP8
matmuls, whose results are then multiplied by the scales (`scales_gradients`; `addmm_float8_unwrapped` in
torchao/float8/float8_ops.py, since pytorch/ao pull request 1325): one pass that the compiler may fuse with the
next kernel, which is not assumed.

Casts that are written as tensor operations (torchao's FP8 linear layers) are one kernel for each of these where
nothing compiles them: the absolute values, their largest, then conversion to FP32, scaling, clamping and
conversion to FP8 each read the tensor that the last one wrote, in FP32 (`scratch_bytes`); each linear layer casts
its own input, where a compiler finds that three have the same (`OperandCasts.eager`).

Some kernels are limited by arithmetic, as torchao's Hadamard transforms and stochastic rounding in Triton:
`slowdown` is the time that they take over that of their bytes, measured.

Weights change once per step. Quantized copies are cached until its end (Transformer Engine's weight
cache), or weights are quantized in every pass (torchao, for parameters that FSDP has gathered).

Reference: NVIDIA/TransformerEngine, transformer_engine/pytorch/module/{linear,layernorm_linear,base}.py,
pytorch/csrc/quantizer.cpp, pytorch/csrc/extensions/normalization.cpp; pytorch/ao,
torchao/float8/float8_linear.py.

>>> from clustersim.common.dtypes import DType
>>> cast = OperandCast(reads=1, copies=2)
>>> (kernel,) = quantize_kernels("x", cast, (4096, 8192), high_precision=DType.BF16, low_precision=DType.FP8)
>>> kernel.bytes == 4096 * 8192 * (2 + 2 * 1)
True
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.linear import LinearLayer
from clustersim.model.memory_bound import SCALE
from clustersim.model.precision_recipe import MatmulFormats, OperandCast, PrecisionRecipe, WeightCastTiming

UNCOALESCED_READ: Final = 5.5
"""Reads that take as long as one down the columns: (2 + 2 u) / (2 + 2) = 2.1 / 0.65 TB/s, u = 2 x 3.23 - 1."""


@dataclass(frozen=True, slots=True)
class LinearCasts:
    """Quantization kernels of one linear layer.

    forward, backward, weight_gradient: kernels before each matmul; input_gradient_scaling,
    weight_gradient_scaling: behind those of gradients; cached_weight_elements: weight elements that are quantized
    once per step.
    """

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    weight_gradient: tuple[Kernel, ...] = ()
    cached_weight_elements: int = 0
    input_gradient_scaling: tuple[Kernel, ...] = ()
    weight_gradient_scaling: tuple[Kernel, ...] = ()


@dataclass(frozen=True, slots=True)
class LinearOperands:
    """Operand sizes of a linear layer on one rank.

    tokens, inputs, outputs: rows of its input, columns of its input and output; local_input_tokens,
    local_gradient_tokens: rows of input and output gradient that this rank holds before an all-gather;
    matrix_count: number of such matrices (experts, over which the tokens are spread); after_norm: the input
    comes from a norm fused into the same layer; input_dispatched, gradient_dispatched: the input, or the
    output gradient, arrives from other ranks already quantized row-wise; projections: how many linear layers of
    the software the matrix stands for, all of the same input.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int
    local_input_tokens: int
    local_gradient_tokens: int
    matrix_count: int = 1
    after_norm: bool = False
    input_dispatched: bool = False
    gradient_dispatched: bool = False
    projections: int = 1

    @classmethod
    def from_linear(cls, linear: LinearLayer, residual_tokens: int, *, after_norm: bool) -> "LinearOperands":
        """Operands of a linear layer; residual_tokens: tokens of the residual stream on this rank."""
        local_tokens = min(linear.tokens, residual_tokens)
        local_sizes = (linear.tokens, local_tokens) if linear.row_parallel else (local_tokens, linear.tokens)
        sizes = (linear.tokens, linear.inputs, linear.outputs, *local_sizes)
        return cls(linear.name, *sizes, after_norm=after_norm, projections=max(1, len(linear.projections)))


def linear_casts(recipe: PrecisionRecipe, formats: MatmulFormats, operands: LinearOperands) -> LinearCasts:
    """The quantization kernels of a linear layer whose matmuls have these formats."""
    casts, low_precision = recipe.casts, formats.low_precision
    if casts is None or low_precision is None:
        return LinearCasts()
    builder = _CastBuilder(operands, formats, recipe.activations, low_precision)
    cast_per_pass, gathered_quantized = (
        casts.weight_timing is WeightCastTiming.PASS,
        recipe.matrix_formats.gathered in LOW_PRECISION_DTYPES,
    )
    input_count = operands.projections if casts.eager else 1
    return LinearCasts(
        input_count * builder.input_casts(casts.after_norm if operands.after_norm else casts.input)
        + (builder.weight_casts(casts.weight) if cast_per_pass and not gathered_quantized else ()),
        builder.output_gradient_casts(casts.output_gradient, transposed=casts.uses_transpose)
        + (
            builder.weight_transpose()
            if gathered_quantized and casts.weight_backward
            else builder.weight_casts(casts.weight_backward)
        ),
        input_count * builder.backward_input_casts(casts.input_backward, transposed=casts.uses_transpose),
        0 if cast_per_pass else operands.matrix_count * operands.inputs * operands.outputs,
        *(builder.gradient_scaling() if casts.scales_gradients else ()),
    )


@dataclass(frozen=True, slots=True)
class _CastBuilder:
    """Builds the quantization kernels of one linear layer's operands."""

    operands: LinearOperands
    formats: MatmulFormats
    high_precision: DType
    low_precision: DType

    def input_casts(self, cast: OperandCast) -> tuple[Kernel, ...]:
        """Quantization of the input, for forward and the weight gradient."""
        operands, formats = self.operands, (self.formats.forward, self.formats.weight_gradient)
        return self._quantize_operand(
            "input",
            _rowwise_if_dispatched(cast, operands.input_dispatched),
            (operands.local_input_tokens, operands.inputs),
            formats,
        )

    def output_gradient_casts(self, cast: OperandCast, *, transposed: bool) -> tuple[Kernel, ...]:
        """Quantization of the output gradient, for both gradient matmuls."""
        operands, formats = self.operands, (self.formats.input_gradient, self.formats.weight_gradient)
        casts = self._quantize_operand(
            "output_gradient",
            _rowwise_if_dispatched(cast, operands.gradient_dispatched),
            (operands.local_gradient_tokens, operands.outputs),
            formats,
        )
        needs_transpose = operands.gradient_dispatched or (
            transposed and operands.local_gradient_tokens < operands.tokens
        )
        return casts + self._transpose_operand(
            "output_gradient", (operands.tokens, operands.outputs), needed=needs_transpose
        )

    def backward_input_casts(self, cast: OperandCast | None, *, transposed: bool) -> tuple[Kernel, ...]:
        """Quantization of the input in backward, where it was saved in high precision or is gathered again."""
        operands, formats = self.operands, (self.formats.weight_gradient,)
        casts = (
            ()
            if cast is None
            else self._quantize_operand("input_backward", cast, (operands.local_input_tokens, operands.inputs), formats)
        )
        needs_transpose = operands.input_dispatched or (transposed and operands.local_input_tokens < operands.tokens)
        return casts + self._transpose_operand(
            "input_backward", (operands.tokens, operands.inputs), needed=needs_transpose
        )

    def weight_casts(self, cast: OperandCast | None) -> tuple[Kernel, ...]:
        """Quantization of the weights within a pass."""
        operands, formats = self.operands, (self.formats.forward, self.formats.input_gradient)
        return (
            ()
            if cast is None
            else self._quantize_operand(
                "weight", cast, (operands.matrix_count * operands.outputs, operands.inputs), formats
            )
        )

    def gradient_scaling(self) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
        """The multiplications of the input's and of the weights' gradient by their scales."""
        operands, formats = self.operands, self.formats
        weight_rows = operands.matrix_count * operands.outputs
        return (
            self._scale("input_gradient", operands.tokens, formats.input_gradient),
            self._scale("weight_gradient", weight_rows, formats.weight_gradient),
        )

    def _scale(self, gradient: str, rows: int, matmul_format: DType) -> tuple[Kernel, ...]:
        """The multiplication of a gradient [rows, inputs] by its scales, if its matmul has any."""
        if matmul_format not in LOW_PRECISION_DTYPES:
            return ()
        shape = SCALE.shape_for(rows, self.operands.inputs)
        return (SCALE.forward_kernel(f"{self.operands.name}.scale_{gradient}", self.high_precision, shape),)

    def weight_transpose(self) -> tuple[Kernel, ...]:
        """The other (column-wise) copy of weights that arrived in the matmul format."""
        operands = self.operands
        return self._transpose_operand(
            "weight", (operands.matrix_count * operands.outputs, operands.inputs), needed=True
        )

    def _quantize_operand(
        self, operand: str, cast: OperandCast, sizes: tuple[int, int], formats: Iterable[DType]
    ) -> tuple[Kernel, ...]:
        """Quantize an operand: as many copies as there are matmuls in a low-precision format that need one."""
        copy_count = sum(dtype in LOW_PRECISION_DTYPES for dtype in formats)
        if not copy_count:
            return ()
        limited_cast = replace(cast, copies=min(cast.copies, copy_count))
        return quantize_kernels(
            f"{self.operands.name}.cast_{operand}",
            limited_cast,
            sizes,
            high_precision=self.high_precision,
            low_precision=self.low_precision,
        )

    def _transpose_operand(self, operand: str, sizes: tuple[int, int], *, needed: bool) -> tuple[Kernel, ...]:
        needs_kernel = needed and self.formats.weight_gradient in LOW_PRECISION_DTYPES
        return (
            (transpose_kernel(f"{self.operands.name}.transpose_{operand}", sizes, self.low_precision),)
            if needs_kernel
            else ()
        )


def _rowwise_if_dispatched(cast: OperandCast, dispatched: bool) -> OperandCast:
    """For dispatched operands only the row-wise copy is made; the other one is made of the received tensor."""
    return replace(cast, copies=min(1, cast.copies)) if dispatched else cast


def quantize_kernels(
    name: str, cast: OperandCast, sizes: tuple[int, int], *, high_precision: DType, low_precision: DType
) -> tuple[Kernel, ...]:
    """The kernels, counted as one, that quantize a tensor of sizes [rows, width] into a format with scales."""
    if not cast.launch_count:
        return ()
    formats, is_fused = (low_precision,) * cast.copies, not cast.scratch_bytes
    shape = MemoryBoundShape(MemoryBoundOp.QUANTIZE, *sizes, fused=is_fused, table=cast.reads, formats=formats)
    reads = cast.reads + (UNCOALESCED_READ - 1.0) * cast.uncoalesced_reads
    element_bytes = reads * high_precision.bytes + cast.copies * low_precision.bytes + cast.scratch_bytes
    moved_bytes = float(shape.elements * element_bytes * cast.slowdown)
    return (Kernel(name, KernelKind.CAST, high_precision, 0.0, moved_bytes, shape, cast.launch_count),)


def recast_kernel(kernel: Kernel, *, absolutes_saved: bool) -> Kernel:
    """An eager cast that is run again: its largest element is saved, which read the absolute values.

    absolutes_saved: so are these, which read the tensor and were written.
    """
    elements = kernel.shape.elements if isinstance(kernel.shape, MemoryBoundShape) else 0
    passes, launches = (3, 2) if absolutes_saved else (1, 1)
    remaining_bytes = kernel.bytes - passes * elements * kernel.dtype.bytes
    return replace(kernel, bytes=remaining_bytes, launches=kernel.launches - launches)


def transpose_kernel(name: str, sizes: tuple[int, int], low_precision: DType) -> Kernel:
    """The kernel that makes a column-wise copy of a row-wise quantized tensor received from other ranks."""
    shape = MemoryBoundShape(MemoryBoundOp.QUANTIZE, *sizes, fused=True, table=1, formats=(low_precision,))
    return Kernel(name, KernelKind.CAST, low_precision, 0.0, 2.0 * shape.elements * low_precision.bytes, shape)


def weight_cast_kernels(recipe: PrecisionRecipe, element_counts: Iterable[int]) -> tuple[Kernel, ...]:
    """The kernels that quantize all weights at the beginning of a step. element_counts: elements of each matrix."""
    casts, low_precision = recipe.casts, recipe.matmul_formats.low_precision
    if casts is None or low_precision is None:
        return ()
    nonzero_counts = [size for size in element_counts if size]
    if not nonzero_counts:
        return ()
    total_size = sum(nonzero_counts), 1
    if recipe.matrix_formats.gathered not in LOW_PRECISION_DTYPES:
        (kernel,) = quantize_kernels(
            "weights.cast", casts.weight, total_size, high_precision=recipe.activations, low_precision=low_precision
        )
    elif casts.weight.copies > 1:
        kernel = transpose_kernel("weights.transpose", total_size, low_precision)
    else:
        return ()
    return (replace(kernel, launches=kernel.launches * len(nonzero_counts)),)


def cached_weight_bytes(recipe: PrecisionRecipe, elements: int) -> Bytes:
    """Bytes of the quantized weight copies that are cached for the step."""
    casts, low_precision = recipe.casts, recipe.matmul_formats.low_precision
    if casts is None or low_precision is None or not elements:
        return 0.0
    stored_quantized = (
        recipe.matrix_formats.stored in LOW_PRECISION_DTYPES
    )  # one of the copies is the stored weight itself
    return float(elements * (casts.weight.copies - stored_quantized) * low_precision.bytes)
