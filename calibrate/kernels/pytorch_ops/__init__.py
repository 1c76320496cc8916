"""HOW DOES PYTORCH RUN EACH KERNEL? One file for each family; `prepare` gives something to time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final

import torch

from calibrate.devices.stopwatch import Action
from calibrate.kernels.formulas import Unsupported
from calibrate.kernels.pytorch_ops import (
    attention,
    grouped_gemm,
    matmul,
    memory_bound,
    optimizer,
    quantization,
    token_routing,
)
from calibrate.kernels.pytorch_ops.memory_use import allocated, touched
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

__all__ = ["Unsupported", "allocated", "compiling", "prepare", "settings", "touched"]

_UPDATES: Final = (MemoryBoundOp.ADAM, MemoryBoundOp.SGD, MemoryBoundOp.GRADIENT_NORM, MemoryBoundOp.GRADIENT_CLIP)
_COMPILED: Final = 1  # variants of a formula that is compiled for one form of operands


def prepare(kernel: Kernel, device: torch.device) -> Action:
    """What runs the kernel once, over random operands of its own; raise Unsupported where there is no such kernel."""
    match kernel.shape:
        case MatmulShape() as shape if kernel.kind is not KernelKind.MATMUL:
            return grouped_gemm.prepare(kernel, shape, device)
        case MatmulShape() as shape:
            return matmul.prepare(shape, kernel.dtype, device)
        case AttentionShape() as shape:
            gradient = kernel.kind is KernelKind.ATTENTION_BACKWARD
            return attention.prepare(shape, kernel.dtype, device, gradient=gradient)
        case MemoryBoundShape() as shape:
            return _streaming(shape.routine)(shape, kernel.dtype, device)
    raise Unsupported(f"{kernel.name}: nothing says what it computes")


def _streaming(routine: MemoryBoundOp) -> Callable[[MemoryBoundShape, DType, torch.device], Action]:
    """What prepares a kernel that streams its operands."""
    match routine:
        case MemoryBoundOp.QUANTIZE:
            return quantization.prepare
        case _ if routine in _UPDATES:
            return optimizer.prepare
        case _ if routine in TOKEN_ROUTING_OPS:
            return token_routing.prepare
    return memory_bound.prepare


@contextmanager
def settings(kernel: Kernel, device: torch.device) -> Iterator[None]:
    """PyTorch as the kernel needs it, while it is prepared and run: TF32 where that is its format, and not otherwise.

    All is as before afterwards.
    """
    fused = isinstance(kernel.shape, MemoryBoundShape) and kernel.shape.fused
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kernel.dtype is DType.TF32
    try:
        with compiling() if fused and device.type == "cuda" else nullcontext():
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def compiling() -> Iterator[None]:
    """Compiled formulas keep their buffers, so that backward can run again, and are never left uncompiled."""
    from torch._dynamo import config as dynamo  # takes seconds to import, and only compiling needs it
    from torch._functorch import config as functorch

    variants = dynamo.patch(recompile_limit=_COMPILED, fail_on_recompile_limit_hit=True)
    with variants, functorch.patch(donated_buffer=False):
        yield
