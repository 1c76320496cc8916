"""What does it cost to bring the operands of a linear layer into the format of its products?

Formats with scales (`dtypes`) are made by kernels that read an operand in the format of activations and write copies of
it: bytes are elements x (reads x wide + copies x narrow). A scale for a whole tensor that is not known from earlier
steps must be found first, which reads the operand once more. Each operand is in two products, along different
dimensions: the input in forward and the weights' gradient, the output's gradient in both gradients, the weights in
forward and the input's gradient. A block of a row is none of a column, so both copies are made; with one scale for the
tensor the second is a transpose, made where tensor cores multiply rows by rows alone (Hopper).

Under sequence parallelism operands are cast before they are gathered, and travel in the format of products; a transpose
is then made of what has come, by one more pass. What a norm writes is counted in the format of activations, even where
it writes two copies half as wide.

Tokens may be cast before they are sent to experts, and the gradients of what these make of them (DeepSeek-AI 2024,
arXiv:2412.19437, section 3.3.2): then rows travel in that format, and the copy by columns is made of what has come.

Weights that were stored or gathered in the format of products are not cast again, but for the other copy.

Weights change once a step. What is cast then is kept until its end (Transformer Engine's cached weights), or they are
cast in each pass (torchao, beside parameters that FSDP has gathered).

Reference: NVIDIA/TransformerEngine, transformer_engine/pytorch/module/{linear,layernorm_linear,base}.py,
pytorch/csrc/quantizer.cpp, pytorch/csrc/extensions/normalization.cpp; pytorch/ao, torchao/float8/float8_linear.py.

>>> from clustersim.common.dtypes import DType
>>> one = quantize("x", Cast(reads=1, copies=2), (4096, 8192), wide=DType.BF16, narrow=DType.FP8)
>>> one[0].bytes == 4096 * 8192 * (2 + 2 * 1)
True
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.linear import LinearLayer
from clustersim.model.precision_recipe import MatmulFormats, OperandCast, PrecisionRecipe, WeightCastTiming


@dataclass(frozen=True, slots=True)
class LinearCasts:
    """The kernels that bring the operands of one linear layer into the formats of its products.

    forward, backward, weight_gradient: before each product; weights: elements that are cast once a step.
    """

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    weight_gradient: tuple[Kernel, ...] = ()
    cached_weight_elements: int = 0


@dataclass(frozen=True, slots=True)
class LinearOperands:
    """A linear layer's operands as one rank has them.

    tokens, inputs, outputs: rows of its input, and columns of it and of its output; came, came_back: rows of its input
    and of its output's gradient that this rank had before others' were gathered; matrices: how many such layers (of
    experts, among which the tokens are spread); behind_norm: its input comes from a norm in the same layer;
    sent, sent_back: its input, and its output's gradient, come from other ranks as they were cast there, by rows.
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

    @classmethod
    def from_linear(cls, linear: LinearLayer, residual_tokens: int, *, after_norm: bool = False) -> "LinearOperands":
        """Those of a linear layer; own: tokens of the residual stream on this rank."""
        local_tokens = min(linear.tokens, residual_tokens)
        local_sizes = (linear.tokens, local_tokens) if linear.row_parallel else (local_tokens, linear.tokens)
        return cls(linear.name, linear.tokens, linear.inputs, linear.outputs, *local_sizes, after_norm=after_norm)


def linear_casts(recipe: PrecisionRecipe, formats: MatmulFormats, operands: LinearOperands) -> LinearCasts:
    """What is cast for a linear layer whose products have these formats."""
    casts, low_precision = recipe.casts, formats.low_precision
    if casts is None or low_precision is None:
        return LinearCasts()
    builder = _CastBuilder(operands, formats, recipe.activations, low_precision)
    cast_per_pass, gathered_quantized = (
        casts.weight_timing is WeightCastTiming.PASS,
        recipe.matrix_formats.gathered in LOW_PRECISION_DTYPES,
    )
    return LinearCasts(
        builder.input_casts(casts.behind_norm if operands.after_norm else casts.input)
        + (builder.weight_casts(casts.weight) if cast_per_pass and not gathered_quantized else ()),
        builder.output_gradient_casts(casts.output_gradient, transposed=casts.uses_transpose)
        + (
            builder.weight_transpose()
            if gathered_quantized and casts.weight_backward
            else builder.weight_casts(casts.weight_backward)
        ),
        builder.backward_input_casts(casts.input_backward, transposed=casts.uses_transpose),
        0 if cast_per_pass else operands.matrix_count * operands.inputs * operands.outputs,
    )


@dataclass(frozen=True, slots=True)
class _CastBuilder:
    """The casts of some operands."""

    operands: LinearOperands
    formats: MatmulFormats
    high_precision: DType
    low_precision: DType

    def input_casts(self, cast: OperandCast) -> tuple[Kernel, ...]:
        """The input's, for forward and the weights' gradient."""
        operands, formats = self.operands, (self.formats.forward, self.formats.weight_gradient)
        return self._quantize_operand(
            "input",
            _rowwise_if_dispatched(cast, operands.input_dispatched),
            (operands.local_input_tokens, operands.inputs),
            formats,
        )

    def output_gradient_casts(self, cast: OperandCast, *, transposed: bool) -> tuple[Kernel, ...]:
        """The output gradient's, for both gradients."""
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
        """The input's, where it was saved as it was, or is gathered again."""
        operands, formats = self.operands, (self.formats.weight_gradient,)
        casts = (
            ()
            if cast is None
            else self._quantize_operand("input_again", cast, (operands.local_input_tokens, operands.inputs), formats)
        )
        needs_transpose = operands.input_dispatched or (transposed and operands.local_input_tokens < operands.tokens)
        return casts + self._transpose_operand(
            "input_again", (operands.tokens, operands.inputs), needed=needs_transpose
        )

    def weight_casts(self, cast: OperandCast | None) -> tuple[Kernel, ...]:
        """The weights', in a pass."""
        operands, formats = self.operands, (self.formats.forward, self.formats.input_gradient)
        return (
            ()
            if cast is None
            else self._quantize_operand(
                "weight", cast, (operands.matrix_count * operands.outputs, operands.inputs), formats
            )
        )

    def weight_transpose(self) -> tuple[Kernel, ...]:
        """The weights' other copy, where they have come in the format of products."""
        operands = self.operands
        return self._transpose_operand(
            "weight", (operands.matrix_count * operands.outputs, operands.inputs), needed=True
        )

    def _quantize_operand(
        self, operand: str, cast: OperandCast, sizes: tuple[int, int], formats: Iterable[DType]
    ) -> tuple[Kernel, ...]:
        """As many copies as there are products in the format that want one."""
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
    """Of what is sent only the copy by rows is made; the other one is made of what has come."""
    return replace(cast, copies=min(1, cast.copies)) if dispatched else cast


def quantize_kernels(
    name: str, cast: OperandCast, sizes: tuple[int, int], *, high_precision: DType, low_precision: DType
) -> tuple[Kernel, ...]:
    """The kernels, counted as one, that bring a tensor of sizes [rows, width] into a format with scales."""
    if not cast.launch_count:
        return ()
    shape = MemoryBoundShape(
        MemoryBoundOp.QUANTIZE, *sizes, fused=True, table=cast.reads, formats=(low_precision,) * cast.copies
    )
    moved_bytes = float(shape.elements * (cast.reads * high_precision.bytes + cast.copies * low_precision.bytes))
    return (Kernel(name, KernelKind.CAST, high_precision, 0.0, moved_bytes, shape, cast.launch_count),)


def transpose_kernel(name: str, sizes: tuple[int, int], low_precision: DType) -> Kernel:
    """The kernel that makes a column-wise copy of a row-wise one that has come from other ranks."""
    shape = MemoryBoundShape(MemoryBoundOp.QUANTIZE, *sizes, fused=True, table=1, formats=(low_precision,))
    return Kernel(name, KernelKind.CAST, low_precision, 0.0, 2.0 * shape.elements * low_precision.bytes, shape)


def weight_cast_kernels(recipe: PrecisionRecipe, element_counts: Iterable[int]) -> tuple[Kernel, ...]:
    """The kernels that cast weights at the beginning of a step. matrices: elements of each."""
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
    """Bytes of the copies of so many elements of weights that are kept beside them for the step."""
    casts, low_precision = recipe.casts, recipe.matmul_formats.low_precision
    if casts is None or low_precision is None or not elements:
        return 0.0
    stored_quantized = recipe.matrix_formats.stored in LOW_PRECISION_DTYPES  # one of them is what is stored
    return float(elements * (casts.weight.copies - stored_quantized) * low_precision.bytes)
