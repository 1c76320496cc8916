"""PyTorch implementations of the measured kernels; `prepare_kernel` returns an action to time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final

import torch

from calibrate.devices.stopwatch import Action
from calibrate.kernels.formulas import UnsupportedKernel
from calibrate.kernels.pytorch_ops import (
    attention,
    grouped_gemm,
    matmul,
    memory_bound,
    optimizer,
    quantization,
    token_routing,
)
from calibrate.kernels.pytorch_ops.memory_use import allocated_bytes, touched_bytes
from clustersim.common.dtypes import DType
from clustersim.model.kernels import (
    TOKEN_ROUTING_OPS,
    AttentionShape,
    Kernel,
    KernelKind,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
)

__all__ = [
    "UnsupportedKernel",
    "allocated_bytes",
    "compile_settings",
    "kernel_settings",
    "prepare_kernel",
    "touched_bytes",
]

_OPTIMIZER_OPS: Final = (
    MemoryBoundOp.ADAM,
    MemoryBoundOp.SGD,
    MemoryBoundOp.GRADIENT_NORM,
    MemoryBoundOp.GRADIENT_CLIP,
)
_RECOMPILE_LIMIT: Final = 1  # variants per formula copy, which is compiled for one set of operand forms


def prepare_kernel(kernel: Kernel, device: torch.device) -> Action:
    """An action that runs the kernel once over its own random operands; raise UnsupportedKernel if there is none."""
    match kernel.shape:
        case MatmulShape() as shape if kernel.kind is not KernelKind.MATMUL:
            return grouped_gemm.prepare_grouped(kernel, shape, device)
        case MatmulShape() as shape:
            return matmul.prepare_matmul(shape, kernel.dtype, device)
        case AttentionShape() as shape:
            gradient = kernel.kind is KernelKind.ATTENTION_BACKWARD
            return attention.prepare_attention(shape, kernel.dtype, device, gradient=gradient)
        case MemoryBoundShape() as shape:
            return _memory_bound_factory(shape.routine)(shape, kernel.dtype, device)
    raise UnsupportedKernel(f"{kernel.name}: nothing says what it computes")


def _memory_bound_factory(op: MemoryBoundOp) -> Callable[[MemoryBoundShape, DType, torch.device], Action]:
    """The function that prepares a memory-bound operation."""
    match op:
        case MemoryBoundOp.QUANTIZE:
            return quantization.prepare_quantization
        case _ if op in _OPTIMIZER_OPS:
            return optimizer.prepare_optimizer
        case _ if op in TOKEN_ROUTING_OPS:
            return token_routing.prepare_routing
    return memory_bound.prepare_memory_bound


@contextmanager
def kernel_settings(kernel: Kernel, device: torch.device) -> Iterator[None]:
    """Set PyTorch up for the kernel while it is prepared and run: TF32 only if that is its format.

    The previous settings are restored afterwards.
    """
    fused = isinstance(kernel.shape, MemoryBoundShape) and kernel.shape.fused
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kernel.dtype is DType.TF32
    try:
        with compile_settings() if fused and device.type == "cuda" else nullcontext():
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous


@contextmanager
def compile_settings() -> Iterator[None]:
    """Let compiled formulas keep their buffers, to rerun backward, and fail instead of falling back."""
    from torch._dynamo import config as dynamo  # takes seconds to import, needed only for compilation
    from torch._functorch import config as functorch

    variants = dynamo.patch(recompile_limit=_RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True)
    with variants, functorch.patch(donated_buffer=False):
        yield
