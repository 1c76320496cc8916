"""Matrix multiplication in PyTorch.

`torch.mm`, or `torch.bmm` for a batch, with operands laid out as autograd's are. Accumulation into an
existing result is the same library call with beta = 1; into FP32 from low-precision operands it exists only
on CUDA (`out_dtype`). Block-scaled formats: `scaled_matmul`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from calibrate.devices.stopwatch import Action
from calibrate.kernels.formulas import UnsupportedKernel
from calibrate.kernels.pytorch_ops import scaled_matmul
from calibrate.kernels.pytorch_ops.actions import ResultRetainingAction
from calibrate.kernels.pytorch_ops.random_tensors import TORCH_DTYPES, normal_tensor
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.model.kernels import MatmulLayout, MatmulShape


def prepare_matmul(shape: MatmulShape, dtype: DType, device: torch.device) -> Action:
    """A matmul of random operands; raise UnsupportedKernel if PyTorch has none."""
    if dtype in LOW_PRECISION_DTYPES:
        return ResultRetainingAction(scaled_matmul.random_scaled_matmul(shape, dtype, device))
    a, b = matmul_operands(shape, dtype, device)
    if shape.accumulated is None:
        multiply = torch.mm if shape.batch == 1 else torch.bmm
        return ResultRetainingAction(lambda: multiply(a, b))
    return _accumulating_matmul(shape, dtype, a, b)


def matmul_operands(shape: MatmulShape, dtype: DType, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random A [(batch,) m, k] and B [(batch,) k, n], transposed in memory as the shape's layout says."""
    batch = () if shape.batch == 1 else (shape.batch,)
    transpose_a, transpose_b = shape.operands is MatmulLayout.TN, shape.operands is MatmulLayout.NT
    a = _random_matrix(device, dtype, (*batch, shape.m, shape.k), transposed=transpose_a)
    return a, _random_matrix(device, dtype, (*batch, shape.k, shape.n), transposed=transpose_b)


def matmul_bytes(shape: MatmulShape, dtype: DType) -> float:
    """Bytes of operands and result."""
    m, n, k = shape.m, shape.n, shape.k
    result = (shape.accumulated or (DType.BF16 if dtype in LOW_PRECISION_DTYPES else dtype)).bytes
    return float(shape.batch * ((m * k + k * n) * dtype.bytes + m * n * result))


def _random_matrix(device: torch.device, dtype: DType, sizes: tuple[int, ...], *, transposed: bool) -> Tensor:
    if not transposed:
        return normal_tensor(device, dtype, *sizes)
    *batch, row_count, columns = sizes
    return normal_tensor(device, dtype, *batch, columns, row_count).transpose(-1, -2)


def _accumulating_matmul(shape: MatmulShape, dtype: DType, a: Tensor, b: Tensor) -> Action:
    accumulator_dtype = shape.accumulated or dtype
    accumulator = normal_tensor(a.device, accumulator_dtype, *a.shape[:-1], b.shape[-1])
    add_matmul: Callable[..., Tensor] = torch.addmm if shape.batch == 1 else torch.baddbmm
    if TORCH_DTYPES[accumulator_dtype] is TORCH_DTYPES[dtype]:
        return ResultRetainingAction(lambda: add_matmul(accumulator, a, b, out=accumulator))
    if a.device.type == "cpu":
        raise UnsupportedKernel(
            f"a matmul of {dtype.value} added to {accumulator_dtype.value}: PyTorch has none on a CPU"
        )
    return ResultRetainingAction(
        lambda: add_matmul(accumulator, a, b, out_dtype=TORCH_DTYPES[accumulator_dtype], out=accumulator)
    )
