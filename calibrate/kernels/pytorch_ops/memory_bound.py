"""Memory-bound operations in PyTorch: norm, activation, rotary, residual, softmax, loss, embedding.

Forward is the formula over operands that require a gradient, as in training; backward computes only the
gradients, through a retained graph. What a kernel's shape leaves open is chosen as a model has it: scores
are square if the row count allows, positions cover full sequences.
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
from calibrate.kernels.formulas import UnsupportedKernel
from calibrate.kernels.pytorch_ops.actions import ResultRetainingAction, backward_action
from calibrate.kernels.pytorch_ops.random_tensors import fill_normal, normal_tensor
from clustersim.common.dtypes import DType
from clustersim.model.kernels import MemoryBoundOp, MemoryBoundShape
from clustersim.model.training import LossImplementation


@dataclass(frozen=True, slots=True)
class RandomOperands:
    """Makes the random operands of an operation."""

    shape: MemoryBoundShape
    dtype: DType
    device: torch.device

    def differentiable(self, *sizes: int) -> Tensor:
        """A tensor that requires a gradient; [rows, width] by default."""
        return normal_tensor(self.device, self.dtype, *(sizes or (self.shape.rows, self.shape.width)), gradient=True)

    def constant(self, dtype: DType, *sizes: int) -> Tensor:
        """A tensor without gradient."""
        return normal_tensor(self.device, dtype, *sizes)

    def random_indices(self, upper: int) -> Tensor:
        """Random indices below `upper`: [rows]."""
        return torch.randint(upper, (self.shape.rows,), device=self.device)


@dataclass(frozen=True, slots=True)
class PreparedFormula:
    """A formula over its operands, and those with gradients; gradient: of the result, if not random."""

    forward: Callable[[], Tensor]
    inputs: Sequence[Tensor]
    gradient: Tensor | None = None


FormulaFactory = Callable[[RandomOperands], PreparedFormula]


def prepare_memory_bound(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    """A memory-bound operation, or its backward; raise UnsupportedKernel if there is no such kernel."""
    operands = RandomOperands(shape, dtype, device)
    match shape.routine:
        case MemoryBoundOp.BIAS_GRADIENT:
            gradients = operands.constant(dtype, shape.rows, shape.width)
            return ResultRetainingAction(lambda: gradients.sum(0))
        case MemoryBoundOp.POSITIONS if shape.backward:
            return _position_gradient(operands)
    if shape.routine in _BUFFER_OPS:
        return ResultRetainingAction(_BUFFER_OPS[shape.routine](operands))
    if shape.routine not in _FORMULAS:
        raise UnsupportedKernel(f"{shape.routine.value}: it is not measured")
    prepared = _FORMULAS[shape.routine](operands)
    if not shape.backward:
        return ResultRetainingAction(prepared.forward)
    return backward_action(prepared.forward(), prepared.inputs, prepared.gradient)


def _layernorm(operands: RandomOperands) -> PreparedFormula:
    x, weight, bias = (
        operands.differentiable(),
        operands.differentiable(operands.shape.width),
        operands.differentiable(operands.shape.width),
    )
    return PreparedFormula(lambda: formulas.layernorm(x, weight, bias), (x, weight, bias))


def _rmsnorm(operands: RandomOperands) -> PreparedFormula:
    x, weight = operands.differentiable(), operands.differentiable(operands.shape.width)
    return PreparedFormula(lambda: formulas.rmsnorm(x, weight, fused=operands.shape.fused), (x, weight))


def _gelu(operands: RandomOperands) -> PreparedFormula:
    x = operands.differentiable()
    return PreparedFormula(lambda: formulas.gelu(x), (x,))


def _softcap(operands: RandomOperands) -> PreparedFormula:
    x = operands.differentiable()
    return PreparedFormula(lambda: formulas.softcap(x, fused=operands.shape.fused), (x,))


def _swiglu(operands: RandomOperands) -> PreparedFormula:
    x = operands.differentiable(operands.shape.rows, 2 * operands.shape.width)
    return PreparedFormula(lambda: formulas.swiglu(x, fused=operands.shape.fused), (x,))


def _rotary(operands: RandomOperands) -> PreparedFormula:
    shape = operands.shape
    positions = shape.table if shape.table and shape.rows % shape.table == 0 else shape.rows
    x = operands.differentiable(shape.rows // positions, positions, shape.width)
    cos, sin = (operands.constant(operands.dtype, positions, shape.width) for _ in range(2))
    return PreparedFormula(lambda: formulas.rotary(x, cos, sin, fused=shape.fused), (x,))


def _residual(operands: RandomOperands) -> PreparedFormula:
    x, y = operands.differentiable(), operands.differentiable()
    return PreparedFormula(lambda: formulas.residual_add(x, y), (x, y))


def _lora_sum(operands: RandomOperands) -> PreparedFormula:
    x, branch = operands.differentiable(), operands.differentiable()
    return PreparedFormula(lambda: formulas.lora_sum(x, branch, fused=operands.shape.fused), (x, branch))


def _scale(operands: RandomOperands) -> PreparedFormula:
    x = operands.differentiable()
    return PreparedFormula(lambda: formulas.LORA_SCALE * x, (x,))


def _weighting(operands: RandomOperands) -> PreparedFormula:
    if operands.shape.formats:
        raise UnsupportedKernel(f"{operands.shape.routine.value}: by way of another format it is not measured")
    x, weights = operands.differentiable(), operands.differentiable(operands.shape.rows, 1)
    return PreparedFormula(lambda: formulas.scale_by_probability(x, weights, fused=operands.shape.fused), (x, weights))


def _residual_dropout(operands: RandomOperands) -> PreparedFormula:
    x, branch = operands.differentiable(), operands.differentiable()
    return PreparedFormula(lambda: formulas.residual_dropout(x, branch, fused=operands.shape.fused), (x, branch))


def _dropout(operands: RandomOperands) -> PreparedFormula:
    x = operands.differentiable()
    return PreparedFormula(lambda: formulas.dropout(x), (x,))


def _softmax(operands: RandomOperands) -> PreparedFormula:
    row_count, key = operands.shape.rows, operands.shape.width
    query = math.gcd(row_count, key)
    scores = operands.differentiable(row_count // query, query, key)
    mask = formulas.causal_mask(query, key, operands.device)
    return PreparedFormula(lambda: formulas.softmax(scores, mask, fused=operands.shape.fused), (scores,))


def _loss(operands: RandomOperands, implementation: LossImplementation) -> PreparedFormula:
    """The result's gradient is one per token: Megatron's backward repeatedly multiplies its saved tensor by it."""
    logits, targets = operands.differentiable(), operands.random_indices(operands.shape.width)
    gradient = torch.tensor(float(operands.shape.rows), device=operands.device)
    return PreparedFormula(lambda: formulas.cross_entropy(logits, targets, implementation), (logits,), gradient)


def _lookup(operands: RandomOperands) -> PreparedFormula:
    table, tokens = (
        operands.differentiable(operands.shape.table, operands.shape.width),
        operands.random_indices(operands.shape.table),
    )
    return PreparedFormula(lambda: functional.embedding(tokens, table), (table,))


def _position_embedding(operands: RandomOperands) -> PreparedFormula:
    row_count, width, table = operands.shape.rows, operands.shape.width, operands.shape.table
    sequence = row_count if row_count <= table else math.gcd(row_count, table)
    x, weight = operands.differentiable(row_count // sequence, sequence, width), operands.differentiable(table, width)
    return PreparedFormula(lambda: x + weight[:sequence], (weight,))


def _position_gradient(operands: RandomOperands) -> Action:
    """Gradient of learned positions, summed over sequences and accumulated."""
    prepared = _position_embedding(operands)
    result, (weight,) = prepared.forward(), prepared.inputs
    accumulator = operands.constant(operands.shape.formats[0], *weight.shape)
    output_gradient = fill_normal(torch.empty_like(result))
    return ResultRetainingAction(
        lambda: accumulator.add_(*torch.autograd.grad(result, (weight,), output_gradient, retain_graph=True))
    )


def _accumulate(operands: RandomOperands) -> Callable[[], Tensor]:
    shape = operands.shape
    accumulator = operands.constant(shape.formats[0], shape.rows, shape.width)
    gradient = operands.constant(operands.dtype, shape.rows, shape.width)
    return lambda: accumulator.add_(gradient)


def _copy(operands: RandomOperands) -> Callable[[], Tensor]:
    source = operands.constant(operands.dtype, operands.shape.rows, operands.shape.width)
    if not operands.shape.formats:
        return lambda: source.clone()
    (target,) = operands.shape.formats
    target_dtype = operands.constant(target, 1).dtype
    return lambda: source.to(target_dtype)


def _bias_add(operands: RandomOperands) -> Callable[[], Tensor]:
    x, bias = (
        operands.constant(operands.dtype, operands.shape.rows, operands.shape.width),
        operands.constant(operands.dtype, operands.shape.width),
    )
    return lambda: x + bias


def _zero(operands: RandomOperands) -> Callable[[], Tensor]:
    buffer = operands.constant(operands.dtype, operands.shape.rows, operands.shape.width)
    return lambda: buffer.zero_()


def _unscale(operands: RandomOperands) -> Callable[[], Tensor]:
    """As a gradient scaler does it, including the check for non-finite values."""
    gradient = operands.constant(operands.dtype, operands.shape.rows, operands.shape.width)
    overflow, inverse = (torch.ones((), device=operands.device) for _ in range(2))

    def run() -> Tensor:
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], overflow, inverse)
        return gradient

    return run


def _causal_mask(operands: RandomOperands) -> Callable[[], Tensor]:
    row_count, width = operands.shape.rows, operands.shape.width
    return lambda: torch.tril(torch.ones(row_count, width, device=operands.device)) < 0.5


_BUFFER_OPS: Final = MappingProxyType[MemoryBoundOp, Callable[[RandomOperands], Callable[[], Tensor]]](
    {
        MemoryBoundOp.ACCUMULATE: _accumulate,
        MemoryBoundOp.COPY: _copy,
        MemoryBoundOp.BIAS_ADD: _bias_add,
        MemoryBoundOp.ZERO: _zero,
        MemoryBoundOp.UNSCALE: _unscale,
        MemoryBoundOp.CAUSAL_MASK: _causal_mask,
    }
)
"""Operations without gradient."""


_FORMULAS: Final = MappingProxyType[MemoryBoundOp, FormulaFactory](
    {
        MemoryBoundOp.LAYERNORM: _layernorm,
        MemoryBoundOp.RMSNORM: _rmsnorm,
        MemoryBoundOp.GELU: _gelu,
        MemoryBoundOp.SWIGLU: _swiglu,
        MemoryBoundOp.SOFTCAP: _softcap,
        MemoryBoundOp.ROTARY: _rotary,
        MemoryBoundOp.RESIDUAL: _residual,
        MemoryBoundOp.SCALED_SUM: _lora_sum,
        MemoryBoundOp.SCALE: _scale,
        MemoryBoundOp.WEIGHTING: _weighting,
        MemoryBoundOp.RESIDUAL_DROPOUT: _residual_dropout,
        MemoryBoundOp.DROPOUT: _dropout,
        MemoryBoundOp.SOFTMAX: _softmax,
        MemoryBoundOp.LOSS_TORCH: partial(_loss, implementation=LossImplementation.TORCH),
        MemoryBoundOp.LOSS_VOCAB_PARALLEL: partial(_loss, implementation=LossImplementation.VOCAB_PARALLEL),
        MemoryBoundOp.LOSS_FUSED: partial(_loss, implementation=LossImplementation.FUSED),
        MemoryBoundOp.LOSS_CHUNKED: partial(_loss, implementation=LossImplementation.CHUNKED),
        MemoryBoundOp.LOOKUP: _lookup,
        MemoryBoundOp.POSITIONS: _position_embedding,
    }
)
