"""How does PyTorch run a matrix product?

`torch.mm`, or `torch.bmm` for a batch, with operands that lie in memory as autograd's do. Where the product is added
to what is accumulated, it is the same library's product with beta = 1; into FP32 from narrower operands, only CUDA has
it (`out_dtype`). Formats with scales: `scaled`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from calibrate.devices.stopwatch import Action
from calibrate.kernels.formulas import Unsupported
from calibrate.kernels.pytorch_ops import scaled_matmul
from calibrate.kernels.pytorch_ops.actions import Kept
from calibrate.kernels.pytorch_ops.random_tensors import TORCH, normal
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.model.kernels import MatmulLayout, MatmulShape


def prepare(shape: MatmulShape, dtype: DType, device: torch.device) -> Action:
    """A product with random operands; raise Unsupported where PyTorch has none."""
    if dtype in LOW_PRECISION_DTYPES:
        return Kept(scaled_matmul.multiply(shape, dtype, device))
    a, b = operands(shape, dtype, device)
    if shape.accumulated is None:
        multiply = torch.mm if shape.batch == 1 else torch.bmm
        return Kept(lambda: multiply(a, b))
    return _accumulated(shape, dtype, a, b)


def operands(shape: MatmulShape, dtype: DType, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random A [(batch,) m, k] and B [(batch,) k, n], transposed in memory as the shape says."""
    batch = () if shape.batch == 1 else (shape.batch,)
    a_transposed, b_transposed = shape.operands is MatmulLayout.TN, shape.operands is MatmulLayout.NT
    a = _matrix(device, dtype, (*batch, shape.m, shape.k), transposed=a_transposed)
    return a, _matrix(device, dtype, (*batch, shape.k, shape.n), transposed=b_transposed)


def allocated(shape: MatmulShape, dtype: DType) -> float:
    """Bytes of operands and result."""
    m, n, k = shape.m, shape.n, shape.k
    result = (shape.accumulated or (DType.BF16 if dtype in LOW_PRECISION_DTYPES else dtype)).bytes
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
