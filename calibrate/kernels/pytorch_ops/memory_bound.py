"""How does PyTorch run what streams through memory: norm, activation, rotary, residual, softmax, loss, embedding?

Forward is the formula over operands that require a gradient, as in training; backward its gradients alone, through a
graph that is kept. What a kernel's shape leaves open is chosen as a model has it: scores are square where rows allow,
positions cover whole sequences.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from calibrate.devices.stopwatch import Action
from calibrate.kernels import formulas
from calibrate.kernels.formulas import Unsupported
from calibrate.kernels.pytorch_ops.actions import Kept, backward
from calibrate.kernels.pytorch_ops.random_tensors import drawn, normal
from clustersim.common.dtypes import DType
from clustersim.model.kernels import MemoryBoundOp, MemoryBoundShape
from clustersim.model.training import LossImplementation


@dataclass(frozen=True, slots=True)
class Operands:
    """Makes the random operands of a routine."""

    shape: MemoryBoundShape
    dtype: DType
    device: torch.device

    def tensor(self, *sizes: int) -> Tensor:
        """One that requires a gradient; [rows, width] where no sizes are given."""
        return normal(self.device, self.dtype, *(sizes or (self.shape.rows, self.shape.width)), gradient=True)

    def plain(self, dtype: DType, *sizes: int) -> Tensor:
        """One that does not."""
        return normal(self.device, dtype, *sizes)

    def indices(self, many: int) -> Tensor:
        """[rows] random numbers below `many`."""
        return torch.randint(many, (self.shape.rows,), device=self.device)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A formula over its operands, and those of them that have gradients; gradient: of the result, if not random."""

    forward: Callable[[], Tensor]
    inputs: Sequence[Tensor]
    gradient: Tensor | None = None


Preparation = Callable[[Operands], Prepared]


def prepare(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    """A streaming routine over random operands, or its backward; raise Unsupported where there is no such kernel."""
    made = Operands(shape, dtype, device)
    match shape.routine:
        case MemoryBoundOp.BIAS_GRADIENT:
            gradients = made.plain(dtype, shape.rows, shape.width)
            return Kept(lambda: gradients.sum(0))
        case MemoryBoundOp.POSITIONS if shape.backward:
            return _position_gradient(made)
    if shape.routine in _OF_BUFFERS:
        return Kept(_OF_BUFFERS[shape.routine](made))
    if shape.routine not in _FORMULAS:
        raise Unsupported(f"{shape.routine.value}: it is not measured")
    prepared = _FORMULAS[shape.routine](made)
    if not shape.backward:
        return Kept(prepared.forward)
    return backward(prepared.forward(), prepared.inputs, prepared.gradient)


def _layernorm(made: Operands) -> Prepared:
    x, weight, bias = made.tensor(), made.tensor(made.shape.width), made.tensor(made.shape.width)
    return Prepared(lambda: formulas.layernorm(x, weight, bias), (x, weight, bias))


def _rmsnorm(made: Operands) -> Prepared:
    x, weight = made.tensor(), made.tensor(made.shape.width)
    return Prepared(lambda: formulas.rmsnorm(x, weight, fused=made.shape.fused), (x, weight))


def _gelu(made: Operands) -> Prepared:
    x = made.tensor()
    return Prepared(lambda: formulas.gelu(x), (x,))


def _softcap(made: Operands) -> Prepared:
    x = made.tensor()
    return Prepared(lambda: formulas.softcap(x, fused=made.shape.fused), (x,))


def _swiglu(made: Operands) -> Prepared:
    x = made.tensor(made.shape.rows, 2 * made.shape.width)
    return Prepared(lambda: formulas.swiglu(x, fused=made.shape.fused), (x,))


def _rotary(made: Operands) -> Prepared:
    shape = made.shape
    positions = shape.table if shape.table and shape.rows % shape.table == 0 else shape.rows
    x = made.tensor(shape.rows // positions, positions, shape.width)
    cos, sin = (made.plain(made.dtype, positions, shape.width) for _ in range(2))
    return Prepared(lambda: formulas.rotary(x, cos, sin, fused=shape.fused), (x,))


def _residual(made: Operands) -> Prepared:
    x, y = made.tensor(), made.tensor()
    return Prepared(lambda: formulas.residual(x, y), (x, y))


def _scaled_sum(made: Operands) -> Prepared:
    x, branch = made.tensor(), made.tensor()
    return Prepared(lambda: formulas.scaled_sum(x, branch, fused=made.shape.fused), (x, branch))


def _scale(made: Operands) -> Prepared:
    x = made.tensor()
    return Prepared(lambda: formulas.SCALE * x, (x,))


def _weighting(made: Operands) -> Prepared:
    x, weights = made.tensor(), made.tensor(made.shape.rows, 1)
    return Prepared(lambda: formulas.weighted(x, weights, fused=made.shape.fused), (x, weights))


def _residual_dropout(made: Operands) -> Prepared:
    x, branch = made.tensor(), made.tensor()
    return Prepared(lambda: formulas.residual_dropout(x, branch, fused=made.shape.fused), (x, branch))


def _dropout(made: Operands) -> Prepared:
    x = made.tensor()
    return Prepared(lambda: formulas.dropout(x), (x,))


def _softmax(made: Operands) -> Prepared:
    rows, key = made.shape.rows, made.shape.width
    query = math.gcd(rows, key)
    scores = made.tensor(rows // query, query, key)
    mask = formulas.causal_mask(query, key, made.device)
    return Prepared(lambda: formulas.softmax(scores, mask, fused=made.shape.fused), (scores,))


def _loss(made: Operands, form: LossImplementation) -> Prepared:
    """The gradient is one for each token: Megatron's backward multiplies what it keeps by it, again and again."""
    logits, targets = made.tensor(), made.indices(made.shape.width)
    gradient = torch.tensor(float(made.shape.rows), device=made.device)
    return Prepared(lambda: formulas.cross_entropy(logits, targets, form), (logits,), gradient)


def _lookup(made: Operands) -> Prepared:
    table, tokens = made.tensor(made.shape.table, made.shape.width), made.indices(made.shape.table)
    return Prepared(lambda: functional.embedding(tokens, table), (table,))


def _positions(made: Operands) -> Prepared:
    rows, width, table = made.shape.rows, made.shape.width, made.shape.table
    sequence = rows if rows <= table else math.gcd(rows, table)
    x, weight = made.tensor(rows // sequence, sequence, width), made.tensor(table, width)
    return Prepared(lambda: x + weight[:sequence], (weight,))


def _position_gradient(made: Operands) -> Action:
    """The sum over sequences, added to what is accumulated."""
    prepared = _positions(made)
    result, (weight,) = prepared.forward(), prepared.inputs
    held = made.plain(made.shape.formats[0], *weight.shape)
    given = drawn(torch.empty_like(result))
    return Kept(lambda: held.add_(*torch.autograd.grad(result, (weight,), given, retain_graph=True)))


def _accumulate(made: Operands) -> Callable[[], Tensor]:
    shape = made.shape
    held = made.plain(shape.formats[0], shape.rows, shape.width)
    gradient = made.plain(made.dtype, shape.rows, shape.width)
    return lambda: held.add_(gradient)


def _copy(made: Operands) -> Callable[[], Tensor]:
    source = made.plain(made.dtype, made.shape.rows, made.shape.width)
    if not made.shape.formats:
        return lambda: source.clone()
    (target,) = made.shape.formats
    wanted = made.plain(target, 1).dtype
    return lambda: source.to(wanted)


def _bias_add(made: Operands) -> Callable[[], Tensor]:
    x, bias = made.plain(made.dtype, made.shape.rows, made.shape.width), made.plain(made.dtype, made.shape.width)
    return lambda: x + bias


def _zero(made: Operands) -> Callable[[], Tensor]:
    buffer = made.plain(made.dtype, made.shape.rows, made.shape.width)
    return lambda: buffer.zero_()


def _unscale(made: Operands) -> Callable[[], Tensor]:
    """As gradient scalers do it, of which the look for what is not finite is a part."""
    gradient = made.plain(made.dtype, made.shape.rows, made.shape.width)
    found, inverse = (torch.ones((), device=made.device) for _ in range(2))

    def run() -> Tensor:
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, inverse)
        return gradient

    return run


def _causal_mask(made: Operands) -> Callable[[], Tensor]:
    rows, width = made.shape.rows, made.shape.width
    return lambda: torch.tril(torch.ones(rows, width, device=made.device)) < 0.5


_OF_BUFFERS: Final = MappingProxyType[MemoryBoundOp, Callable[[Operands], Callable[[], Tensor]]](
    {
        MemoryBoundOp.ACCUMULATE: _accumulate,
        MemoryBoundOp.COPY: _copy,
        MemoryBoundOp.BIAS_ADD: _bias_add,
        MemoryBoundOp.ZERO: _zero,
        MemoryBoundOp.UNSCALE: _unscale,
        MemoryBoundOp.CAUSAL_MASK: _causal_mask,
    }
)
"""What has no gradient."""


_FORMULAS: Final = MappingProxyType[MemoryBoundOp, Preparation](
    {
        MemoryBoundOp.LAYERNORM: _layernorm,
        MemoryBoundOp.RMSNORM: _rmsnorm,
        MemoryBoundOp.GELU: _gelu,
        MemoryBoundOp.SWIGLU: _swiglu,
        MemoryBoundOp.SOFTCAP: _softcap,
        MemoryBoundOp.ROTARY: _rotary,
        MemoryBoundOp.RESIDUAL: _residual,
        MemoryBoundOp.SCALED_SUM: _scaled_sum,
        MemoryBoundOp.SCALE: _scale,
        MemoryBoundOp.WEIGHTING: _weighting,
        MemoryBoundOp.RESIDUAL_DROPOUT: _residual_dropout,
        MemoryBoundOp.DROPOUT: _dropout,
        MemoryBoundOp.SOFTMAX: _softmax,
        MemoryBoundOp.LOSS_TORCH: partial(_loss, form=LossImplementation.TORCH),
        MemoryBoundOp.LOSS_VOCAB_PARALLEL: partial(_loss, form=LossImplementation.VOCAB_PARALLEL),
        MemoryBoundOp.LOSS_FUSED: partial(_loss, form=LossImplementation.FUSED),
        MemoryBoundOp.LOSS_CHUNKED: partial(_loss, form=LossImplementation.CHUNKED),
        MemoryBoundOp.LOOKUP: _lookup,
        MemoryBoundOp.POSITIONS: _positions,
    }
)
