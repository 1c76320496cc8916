"""Flash attention in PyTorch, forward and backward.

Queries, keys and values are laid out as the preceding matmuls leave them: [batch, positions, heads,
head_dim].
"""

import torch

from calibrate.devices.stopwatch import Action
from calibrate.kernels import formulas
from calibrate.kernels.pytorch_ops.actions import ResultRetainingAction, backward_action
from calibrate.kernels.pytorch_ops.random_tensors import normal_tensor
from clustersim.common.dtypes import DType
from clustersim.model.kernels import AttentionShape


def prepare_attention(shape: AttentionShape, dtype: DType, device: torch.device, *, gradient: bool) -> Action:
    """Attention over random operands, or its backward; raise UnsupportedKernel for a sliding window."""
    if shape.value_dim is not None:
        raise formulas.UnsupportedKernel(f"attention with values of {shape.value_dim}: not those of queries and keys")
    if shape.window is not None:
        raise formulas.UnsupportedKernel(f"attention of a window of {shape.window}: PyTorch's SDPA has none")
    sizes = (shape.query, shape.heads), (shape.key, shape.kv_heads), (shape.key, shape.kv_heads)
    qkv = [normal_tensor(device, dtype, shape.batch, *size, shape.head_dim, gradient=True) for size in sizes]
    q, k, v = (operand.transpose(1, 2) for operand in qkv)
    if not gradient:
        return ResultRetainingAction(lambda: formulas.attention(q, k, v, causal=shape.causal))
    return backward_action(formulas.attention(q, k, v, causal=shape.causal), qkv)


def attention_bytes(shape: AttentionShape, dtype: DType, *, gradient: bool) -> float:
    """Bytes of operands and result; gradient: plus their gradients."""
    queries = shape.query * shape.heads
    keys = shape.key * shape.kv_heads
    return (4.0 if gradient else 2.0) * shape.batch * (queries + keys) * shape.head_dim * dtype.bytes
