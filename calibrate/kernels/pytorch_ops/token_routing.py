"""How does PyTorch choose experts, and copy tokens for them? The formulas of `kernels.moe_formulas`, and their backward.

Experts are chosen by random logits, so they are used about evenly. A map marks the first tokens once more where copies
are no multiple of the tokens. What Transformer Engine has fused kernels for, PyTorch has none for; rows that are put
into another order, each once, are one kernel both ways.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from calibrate.devices.stopwatch import Action
from calibrate.kernels import moe_formulas
from calibrate.kernels.formulas import Unsupported
from calibrate.kernels.pytorch_ops.actions import Kept, backward
from calibrate.kernels.pytorch_ops.random_tensors import normal
from clustersim.common.dtypes import DType
from clustersim.model.kernels import TOP_K_OPS, MemoryBoundOp, MemoryBoundShape


def prepare(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    """One of `TOKEN_ROUTING_OPS`, or its backward; raise Unsupported where there is no such kernel."""
    if shape.routine is MemoryBoundOp.PERMUTE and shape.table == shape.rows:
        return _sorted(shape, dtype, device)
    if shape.fused:
        raise Unsupported(f"{shape.routine.value}: PyTorch has no fused kernel for it")
    if shape.routine in TOP_K_OPS:
        return _choice(shape, dtype, device)
    match shape.routine:
        case MemoryBoundOp.ROW_MAP:
            return _map(shape, device)
        case MemoryBoundOp.PERMUTE:
            return _permute(shape, dtype, device)
    return _unpermute(shape, dtype, device)


def _choice(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    logits = normal(device, dtype, shape.rows, shape.width, gradient=True)
    bias = normal(device, dtype, shape.width)
    choose = _chooser(shape, logits, bias)
    if not shape.backward:
        return Kept(choose)
    return backward(choose()[0], (logits,))


def _chooser(shape: MemoryBoundShape, logits: Tensor, bias: Tensor) -> Callable[[], moe_formulas.Choice]:
    if shape.routine is MemoryBoundOp.TOP_K:
        return lambda: moe_formulas.softmax_choice(logits, shape.table)
    grouped = shape.routine is MemoryBoundOp.TOP_K_GROUPED
    return lambda: moe_formulas.sigmoid_choice(logits, shape.table, bias, grouped=grouped)


def _map(shape: MemoryBoundShape, device: torch.device) -> Action:
    probabilities = normal(device, DType.FP32, shape.rows, shape.width, gradient=True)
    marks = _marks(shape, device)
    return Kept(lambda: moe_formulas.row_map((probabilities, marks)))


def _marks(shape: MemoryBoundShape, device: torch.device) -> Tensor:
    """[rows, width] of which `table` are marked, evenly: the copies of a token are in columns behind one another."""
    copies = torch.arange(shape.table, device=device)
    turn = torch.div(copies, shape.rows, rounding_mode="floor")
    rows = copies % shape.rows
    marks = torch.zeros(shape.rows, shape.width, dtype=torch.bool, device=device)
    return marks.index_put_((rows, (rows + turn) % shape.width), torch.ones((), dtype=torch.bool, device=device))


def _places(shape: MemoryBoundShape, device: torch.device) -> Tensor:
    """The token of each copy: [table] all tokens about as often, in the order of random experts."""
    return torch.argsort(torch.rand(shape.table, device=device)) % shape.rows


def _sorted(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    rows = normal(device, dtype, shape.rows, shape.width)
    order = torch.argsort(torch.rand(shape.rows, device=device))
    return Kept(lambda: rows.index_select(0, order))


def _permute(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    x, places = normal(device, dtype, shape.rows, shape.width, gradient=True), _places(shape, device)
    if not shape.backward:
        return Kept(lambda: moe_formulas.permuted(x, places))
    return backward(moe_formulas.permuted(x, places), (x,))


def _unpermute(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    rows, places = normal(device, dtype, shape.table, shape.width, gradient=True), _places(shape, device)
    if not shape.backward:
        return Kept(lambda: moe_formulas.unpermuted(rows, places, shape.rows))
    return backward(moe_formulas.unpermuted(rows, places, shape.rows), (rows,))
