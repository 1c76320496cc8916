"""How does PyTorch run flash attention, forward and backward?

Queries, keys and values lie in memory as the products before them leave them: [batch, positions, heads, head_dim].
"""

import torch

from calibrate.devices.stopwatch import Action
from calibrate.kernels import formulas
from calibrate.kernels.pytorch_ops.actions import Kept, backward
from calibrate.kernels.pytorch_ops.random_tensors import normal
from clustersim.common.dtypes import DType
from clustersim.model.kernels import AttentionShape


def prepare(shape: AttentionShape, dtype: DType, device: torch.device, *, gradient: bool) -> Action:
    """Attention over random operands, or the gradients of its three operands; raise Unsupported for a window."""
    if shape.value_dim is not None:
        raise formulas.Unsupported(f"attention with values of {shape.value_dim}: not those of queries and keys")
    if shape.window is not None:
        raise formulas.Unsupported(f"attention of a window of {shape.window}: PyTorch's SDPA has none")
    sizes = (shape.query, shape.heads), (shape.key, shape.kv_heads), (shape.key, shape.kv_heads)
    made = [normal(device, dtype, shape.batch, *size, shape.head_dim, gradient=True) for size in sizes]
    q, k, v = (operand.transpose(1, 2) for operand in made)
    if not gradient:
        return Kept(lambda: formulas.attention(q, k, v, causal=shape.causal))
    return backward(formulas.attention(q, k, v, causal=shape.causal), made)


def allocated(shape: AttentionShape, dtype: DType, *, gradient: bool) -> float:
    """Bytes of operands and result; gradient: and of the gradients of all four."""
    queries = shape.query * shape.heads
    keys = shape.key * shape.kv_heads
    return (4.0 if gradient else 2.0) * shape.batch * (queries + keys) * shape.head_dim * dtype.bytes
