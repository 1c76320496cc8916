"""Expert selection and token permutation in PyTorch: the formulas of `moe_formulas`, and their backward.

Experts are selected by random logits, so their load is about even. The routing map marks the first tokens
once more if the routed tokens are no multiple of the tokens. PyTorch has no counterpart of Transformer
Engine's fused kernels; reordering tokens (a permutation) is one kernel in each direction.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from calibrate.devices.stopwatch import Action
from calibrate.kernels import moe_formulas
from calibrate.kernels.formulas import UnsupportedKernel
from calibrate.kernels.pytorch_ops.actions import ResultRetainingAction, backward_action
from calibrate.kernels.pytorch_ops.random_tensors import normal_tensor
from clustersim.common.dtypes import DType
from clustersim.model.kernels import TOP_K_OPS, MemoryBoundOp, MemoryBoundShape


def prepare_routing(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    """One of `TOKEN_ROUTING_OPS`, or its backward; raise UnsupportedKernel if there is no such kernel."""
    if shape.routine is MemoryBoundOp.PERMUTE and shape.table == shape.rows:
        return _reorder_action(shape, dtype, device)
    if shape.fused:
        raise UnsupportedKernel(f"{shape.routine.value}: PyTorch has no fused kernel for it")
    if shape.routine in TOP_K_OPS:
        return _top_k_action(shape, dtype, device)
    match shape.routine:
        case MemoryBoundOp.ROW_MAP:
            return _permutation_map_action(shape, device)
        case MemoryBoundOp.PERMUTE:
            return _permute_action(shape, dtype, device)
    return _unpermute_action(shape, dtype, device)


def _top_k_action(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    logits = normal_tensor(device, dtype, shape.rows, shape.width, gradient=True)
    bias = normal_tensor(device, dtype, shape.width)
    select = _top_k_function(shape, logits, bias)
    if not shape.backward:
        return ResultRetainingAction(select)
    return backward_action(select()[0], (logits,))


def _top_k_function(shape: MemoryBoundShape, logits: Tensor, bias: Tensor) -> Callable[[], moe_formulas.RoutingMap]:
    if shape.routine is MemoryBoundOp.TOP_K:
        return lambda: moe_formulas.top_k_softmax(logits, shape.table)
    grouped = shape.routine is MemoryBoundOp.TOP_K_GROUPED
    return lambda: moe_formulas.top_k_sigmoid(logits, shape.table, bias, grouped=grouped)


def _permutation_map_action(shape: MemoryBoundShape, device: torch.device) -> Action:
    probabilities = normal_tensor(device, DType.FP32, shape.rows, shape.width, gradient=True)
    is_routed = _balanced_routing(shape, device)
    return ResultRetainingAction(lambda: moe_formulas.permutation_map((probabilities, is_routed)))


def _balanced_routing(shape: MemoryBoundShape, device: torch.device) -> Tensor:
    """Mask [rows, width] with `table` marked entries, evenly: the copies of a token are in consecutive columns."""
    copies = torch.arange(shape.table, device=device)
    expert_offset = torch.div(copies, shape.rows, rounding_mode="floor")
    token_indices = copies % shape.rows
    is_routed = torch.zeros(shape.rows, shape.width, dtype=torch.bool, device=device)
    return is_routed.index_put_(
        (token_indices, (token_indices + expert_offset) % shape.width), torch.ones((), dtype=torch.bool, device=device)
    )


def _random_token_indices(shape: MemoryBoundShape, device: torch.device) -> Tensor:
    """Token index of each routed token: [table], all tokens about equally often, in random order."""
    return torch.argsort(torch.rand(shape.table, device=device)) % shape.rows


def _reorder_action(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    tokens = normal_tensor(device, dtype, shape.rows, shape.width)
    order = torch.argsort(torch.rand(shape.rows, device=device))
    return ResultRetainingAction(lambda: tokens.index_select(0, order))


def _permute_action(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    x, token_indices = (
        normal_tensor(device, dtype, shape.rows, shape.width, gradient=True),
        _random_token_indices(shape, device),
    )
    if not shape.backward:
        return ResultRetainingAction(lambda: moe_formulas.permute_tokens(x, token_indices))
    return backward_action(moe_formulas.permute_tokens(x, token_indices), (x,))


def _unpermute_action(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    routed_tokens, token_indices = (
        normal_tensor(device, dtype, shape.table, shape.width, gradient=True),
        _random_token_indices(shape, device),
    )
    if not shape.backward:
        return ResultRetainingAction(lambda: moe_formulas.unpermute_tokens(routed_tokens, token_indices, shape.rows))
    return backward_action(moe_formulas.unpermute_tokens(routed_tokens, token_indices, shape.rows), (routed_tokens,))
