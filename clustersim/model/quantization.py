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

from clustersim.common.dtypes import NARROW, DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, Routine, StreamShape
from clustersim.model.linear import Linear
from clustersim.model.precision_recipe import Cast, Products, Recipe, WeightCasts


@dataclass(frozen=True, slots=True)
class LinearCasts:
    """The kernels that bring the operands of one linear layer into the formats of its products.

    forward, backward, weight_gradient: before each product; weights: elements that are cast once a step.
    """

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    weight_gradient: tuple[Kernel, ...] = ()
    weights: int = 0


@dataclass(frozen=True, slots=True)
class Operands:
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
    came: int
    came_back: int
    matrices: int = 1
    behind_norm: bool = False
    sent: bool = False
    sent_back: bool = False

    @classmethod
    def of(cls, linear: Linear, own: int, *, behind_norm: bool = False) -> "Operands":
        """Those of a linear layer; own: tokens of the residual stream on this rank."""
        few = min(linear.tokens, own)
        came = (linear.tokens, few) if linear.rows else (few, linear.tokens)
        return cls(linear.name, linear.tokens, linear.inputs, linear.outputs, *came, behind_norm=behind_norm)


def linear_casts(recipe: Recipe, products: Products, operands: Operands) -> LinearCasts:
    """What is cast for a linear layer whose products have these formats."""
    casts, narrow = recipe.casts, products.narrow
    if casts is None or narrow is None:
        return LinearCasts()
    make = _Made(operands, products, recipe.activations, narrow)
    passes, comes = casts.weights is WeightCasts.PASS, recipe.matrices.gathered in NARROW
    return LinearCasts(
        make.input(casts.behind_norm if operands.behind_norm else casts.input)
        + (make.weight(casts.weight) if passes and not comes else ()),
        make.gradient(casts.output_gradient, transposed=casts.transposed)
        + (make.weight_transposed() if comes and casts.weight_again else make.weight(casts.weight_again)),
        make.again(casts.input_again, transposed=casts.transposed),
        0 if passes else operands.matrices * operands.inputs * operands.outputs,
    )


@dataclass(frozen=True, slots=True)
class _Made:
    """The casts of some operands."""

    operands: Operands
    products: Products
    wide: DType
    narrow: DType

    def input(self, cast: Cast) -> tuple[Kernel, ...]:
        """The input's, for forward and the weights' gradient."""
        own, used = self.operands, (self.products.forward, self.products.weight_gradient)
        return self._cast("input", _by_rows(cast, own.sent), (own.came, own.inputs), used)

    def gradient(self, cast: Cast, *, transposed: bool) -> tuple[Kernel, ...]:
        """The output gradient's, for both gradients."""
        own, used = self.operands, (self.products.input_gradient, self.products.weight_gradient)
        made = self._cast("output_gradient", _by_rows(cast, own.sent_back), (own.came_back, own.outputs), used)
        there = own.sent_back or (transposed and own.came_back < own.tokens)
        return made + self._transposed("output_gradient", (own.tokens, own.outputs), there=there)

    def again(self, cast: Cast | None, *, transposed: bool) -> tuple[Kernel, ...]:
        """The input's, where it was saved as it was, or is gathered again."""
        own, used = self.operands, (self.products.weight_gradient,)
        made = () if cast is None else self._cast("input_again", cast, (own.came, own.inputs), used)
        there = own.sent or (transposed and own.came < own.tokens)
        return made + self._transposed("input_again", (own.tokens, own.inputs), there=there)

    def weight(self, cast: Cast | None) -> tuple[Kernel, ...]:
        """The weights', in a pass."""
        own, used = self.operands, (self.products.forward, self.products.input_gradient)
        return () if cast is None else self._cast("weight", cast, (own.matrices * own.outputs, own.inputs), used)

    def weight_transposed(self) -> tuple[Kernel, ...]:
        """The weights' other copy, where they have come in the format of products."""
        own = self.operands
        return self._transposed("weight", (own.matrices * own.outputs, own.inputs), there=True)

    def _cast(self, of: str, cast: Cast, sizes: tuple[int, int], used: Iterable[DType]) -> tuple[Kernel, ...]:
        """As many copies as there are products in the format that want one."""
        wanted = sum(d_type in NARROW for d_type in used)
        if not wanted:
            return ()
        own = replace(cast, copies=min(cast.copies, wanted))
        return quantize(f"{self.operands.name}.cast_{of}", own, sizes, wide=self.wide, narrow=self.narrow)

    def _transposed(self, of: str, sizes: tuple[int, int], *, there: bool) -> tuple[Kernel, ...]:
        wanted = there and self.products.weight_gradient in NARROW
        return (transpose(f"{self.operands.name}.transpose_{of}", sizes, self.narrow),) if wanted else ()


def _by_rows(cast: Cast, sent: bool) -> Cast:
    """Of what is sent only the copy by rows is made; the other one is made of what has come."""
    return replace(cast, copies=min(1, cast.copies)) if sent else cast


def quantize(name: str, cast: Cast, sizes: tuple[int, int], *, wide: DType, narrow: DType) -> tuple[Kernel, ...]:
    """The kernels, counted as one, that bring a tensor of sizes [rows, width] into a format with scales."""
    if not cast.launches:
        return ()
    shape = StreamShape(Routine.QUANTIZE, *sizes, fused=True, table=cast.reads, formats=(narrow,) * cast.copies)
    moved = float(shape.elements * (cast.reads * wide.bytes + cast.copies * narrow.bytes))
    return (Kernel(name, KernelKind.CAST, wide, 0.0, moved, shape, cast.launches),)


def transpose(name: str, sizes: tuple[int, int], narrow: DType) -> Kernel:
    """The kernel that makes a column-wise copy of a row-wise one that has come from other ranks."""
    shape = StreamShape(Routine.QUANTIZE, *sizes, fused=True, table=1, formats=(narrow,))
    return Kernel(name, KernelKind.CAST, narrow, 0.0, 2.0 * shape.elements * narrow.bytes, shape)


def cast_weights(recipe: Recipe, matrices: Iterable[int]) -> tuple[Kernel, ...]:
    """The kernels that cast weights at the beginning of a step. matrices: elements of each."""
    casts, narrow = recipe.casts, recipe.products.narrow
    if casts is None or narrow is None:
        return ()
    sizes = [size for size in matrices if size]
    if not sizes:
        return ()
    whole = sum(sizes), 1
    if recipe.matrices.gathered not in NARROW:
        (made,) = quantize("weights.cast", casts.weight, whole, wide=recipe.activations, narrow=narrow)
    elif casts.weight.copies > 1:
        made = transpose("weights.transpose", whole, narrow)
    else:
        return ()
    return (replace(made, launches=made.launches * len(sizes)),)


def kept_copies(recipe: Recipe, elements: int) -> Bytes:
    """Bytes of the copies of so many elements of weights that are kept beside them for the step."""
    casts, narrow = recipe.casts, recipe.products.narrow
    if casts is None or narrow is None or not elements:
        return 0.0
    there = recipe.matrices.stored in NARROW  # one of them is what is stored
    return float(elements * (casts.weight.copies - there) * narrow.bytes)
