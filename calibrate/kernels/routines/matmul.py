"""How does PyTorch run a matrix product?

`torch.mm`, or `torch.bmm` for a batch, with operands that lie in memory as autograd's do. Where the product is added
to what is accumulated, it is the same library's product with beta = 1; into FP32 from narrower operands, only CUDA has
it (`out_dtype`). FP8 tensor cores multiply rows by rows alone (cuBLAS: TN in its column-major words), so frameworks
keep transposed copies, and all layouts are measured as that one; fast accumulation is for the forward only, as
Transformer Engine has it.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from calibrate.devices.stopwatch import Action
from calibrate.kernels.formulas import Unsupported
from calibrate.kernels.routines.action import Kept
from calibrate.kernels.routines.formats import TORCH, normal
from clustersim.dtypes import DType
from clustersim.workload.kernels import MatmulShape, Operands

_ALIGNED: Final = 16  # elements to a multiple of which FP8 operands must be cut


def prepare(shape: MatmulShape, dtype: DType, device: torch.device) -> Action:
    """A product with random operands; raise Unsupported where PyTorch has none."""
    if dtype is DType.FP8:
        return _fp8(shape, device)
    a, b = operands(shape, dtype, device)
    if shape.accumulated is None:
        multiply = torch.mm if shape.batch == 1 else torch.bmm
        return Kept(lambda: multiply(a, b))
    return _accumulated(shape, dtype, a, b)


def operands(shape: MatmulShape, dtype: DType, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random A [(batch,) m, k] and B [(batch,) k, n], transposed in memory as the shape says."""
    batch = () if shape.batch == 1 else (shape.batch,)
    a_transposed, b_transposed = shape.operands is Operands.TN, shape.operands is Operands.NT
    a = _matrix(device, dtype, (*batch, shape.m, shape.k), transposed=a_transposed)
    return a, _matrix(device, dtype, (*batch, shape.k, shape.n), transposed=b_transposed)


def allocated(shape: MatmulShape, dtype: DType) -> float:
    """Bytes of operands and result."""
    m, n, k = shape.m, shape.n, shape.k
    result = (shape.accumulated or (DType.BF16 if dtype is DType.FP8 else dtype)).bytes
    return float(shape.batch * ((m * k + k * n) * dtype.bytes + m * n * result))


def _matrix(device: torch.device, dtype: DType, sizes: tuple[int, ...], *, transposed: bool) -> Tensor:
    if not transposed:
        return normal(device, dtype, *sizes)
    *batch, rows, columns = sizes
    return normal(device, dtype, *batch, columns, rows).transpose(-1, -2)


def _accumulated(shape: MatmulShape, dtype: DType, a: Tensor, b: Tensor) -> Action:
    kept = shape.accumulated or dtype
    held = normal(a.device, kept, *a.shape[:-1], b.shape[-1])
    add: Callable[..., Tensor] = torch.addmm if shape.batch == 1 else torch.baddbmm
    if TORCH[kept] is TORCH[dtype]:
        return Kept(lambda: add(held, a, b, out=held))
    if a.device.type == "cpu":
        raise Unsupported(f"a product of {dtype.value} added to {kept.value}: PyTorch has none on a CPU")
    return Kept(lambda: add(held, a, b, out_dtype=TORCH[kept], out=held))


def _fp8(shape: MatmulShape, device: torch.device) -> Action:
    if shape.batch > 1 or shape.accumulated is not None:
        raise Unsupported("PyTorch has no FP8 product of a batch, or that is accumulated")
    if shape.n % _ALIGNED or shape.k % _ALIGNED:
        raise Unsupported(f"FP8 operands are cut to multiples of {_ALIGNED}; n is {shape.n}, k is {shape.k}")
    a = normal(device, DType.FP8, shape.m, shape.k)
    b = normal(device, DType.FP8, shape.n, shape.k).t()
    scale = torch.ones((), device=device)
    fast = shape.operands is Operands.NT
    return Kept(lambda: torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast))
