"""How does PyTorch multiply each expert's rows with the expert's own matrix?

In one kernel (`grouped_mm`), where this build has it for the device and the format; else, and where the kernel is to be
products on streams, one product after the other: on a GPU in turns on four streams, as Transformer Engine's
`GroupedLinear` runs them (transformer_engine/common/util/multi_stream.cpp), which wait for what came before and are
waited for. Rows lie one behind the other; groups may have different numbers of them, which the kernel reads on the
device and a loop knows. Weights are [groups, outputs, inputs], as a linear layer's; the weights' gradient is of each
group's rows. Formats with scales: `scaled_grouped_gemm`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from calibrate.devices.stopwatch import Action
from calibrate.kernels.formulas import Unsupported
from calibrate.kernels.pytorch_ops import scaled_grouped_gemm
from calibrate.kernels.pytorch_ops.actions import Kept
from calibrate.kernels.pytorch_ops.random_tensors import TORCH, normal
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.model.kernels import Kernel, KernelKind, MatmulLayout, MatmulShape

STREAMS: Final = 4
_TRIED: Final = 32  # rows and columns of the product that shows whether there is such a kernel

# public since torch 2.10
_grouped_mm: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def prepare(kernel: Kernel, shape: MatmulShape, device: torch.device, rows: Sequence[int] | None = None) -> Action:
    """Products of groups with random operands; rows: of each group, None: as many in each.

    Raise Unsupported where PyTorch has none.
    """
    each = (_rows(shape),) * shape.batch if rows is None else tuple(rows)
    if kernel.dtype in LOW_PRECISION_DTYPES:
        return Kept(_scaled(kernel, shape, device, each))
    if kernel.kind is KernelKind.GROUPED_MATMUL and shape.accumulated is None and there(kernel.dtype, device):
        return Kept(_in_one(shape, kernel.dtype, device, each))
    return Kept(_one_by_one(shape, kernel.dtype, device, each))


@torch.compiler.disable  # type: ignore[untyped-decorator] # its shapes cannot be traced in all formats, nor rows that values decide
def multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows [rows, inputs] of groups that end at `ends` times weights [groups, outputs, inputs]: [rows, outputs]."""
    made: Tensor = _grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    return made


def loop(rows: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """The same, one product after the other; sizes: rows of each group."""
    return torch.cat([part @ weight.t() for part, weight in zip(torch.split(rows, list(sizes)), weights, strict=True)])


@cache
def there(dtype: DType, device: torch.device) -> bool:
    """Whether PyTorch has one kernel for all groups, on this device and in this format."""
    if _grouped_mm is None:
        return False
    a, b = (torch.zeros(1 + first, _TRIED, _TRIED, dtype=TORCH[dtype], device=device) for first in (0, 1))
    try:
        _grouped_mm(a[0], b.transpose(-2, -1), offs=_ends((_TRIED // 2, _TRIED // 2), device))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _scaled(kernel: Kernel, shape: MatmulShape, device: torch.device, rows: Sequence[int]) -> Callable[[], Any]:
    if kernel.kind is KernelKind.GROUPED_MATMUL and scaled_grouped_gemm.there(kernel.dtype, device):
        return scaled_grouped_gemm.in_one(shape, kernel.dtype, device, rows)
    return _in_turns(scaled_grouped_gemm.one_by_one(shape, kernel.dtype, device, rows), device)


def _rows(shape: MatmulShape) -> int:
    """Rows of one group, which a weights' gradient sums over."""
    return shape.k if shape.operands is MatmulLayout.TN else shape.m


def _ends(rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)


def operands(shape: MatmulShape, dtype: DType, device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of all groups and the weights; of a weights' gradient, gradients (transposed) and rows of all groups."""
    if shape.operands is MatmulLayout.TN:
        return normal(device, dtype, rows, shape.m).t(), normal(device, dtype, rows, shape.n)
    a = normal(device, dtype, rows, shape.k)
    if shape.operands is MatmulLayout.NN:
        return a, normal(device, dtype, shape.batch, shape.k, shape.n)
    return a, normal(device, dtype, shape.batch, shape.n, shape.k).transpose(-2, -1)


def _in_one(shape: MatmulShape, dtype: DType, device: torch.device, rows: Sequence[int]) -> Callable[[], Tensor]:
    a, b = operands(shape, dtype, device, sum(rows))
    ends = _ends(rows, device)

    def run() -> Tensor:
        made: Tensor = _grouped_mm(a, b, offs=ends)
        return made

    return run


def _one_by_one(shape: MatmulShape, dtype: DType, device: torch.device, rows: Sequence[int]) -> Callable[[], Any]:
    """A product of each group, written where the result of all of them lies."""
    a, b = operands(shape, dtype, device, sum(rows))
    result = normal(device, shape.accumulated or dtype, *_result(shape, sum(rows)))
    if shape.operands is MatmulLayout.TN:
        parts = list(zip(torch.split(a, list(rows), 1), torch.split(b, list(rows)), result, strict=True))
    else:
        parts = list(zip(torch.split(a, list(rows)), b, torch.split(result, list(rows)), strict=True))
    return _in_turns([_product(shape, dtype, part) for part in parts], device)


def _in_turns(products: Sequence[Callable[[], Tensor]], device: torch.device) -> Callable[[], Any]:
    """One after the other, on a GPU on several streams."""
    if device.type != "cuda":
        return lambda: [run() for run in products]
    streams = [torch.cuda.Stream() for _ in range(min(STREAMS, len(products)))]  # type: ignore[no-untyped-call]
    return lambda: _on_streams(products, streams)


def _result(shape: MatmulShape, rows: int) -> tuple[int, ...]:
    return (shape.batch, shape.m, shape.n) if shape.operands is MatmulLayout.TN else (rows, shape.n)


def _product(shape: MatmulShape, dtype: DType, part: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    a, b, into = part
    if shape.accumulated is None:
        return lambda: torch.mm(a, b, out=into)
    if TORCH[shape.accumulated] is TORCH[dtype]:
        return lambda: torch.addmm(into, a, b, out=into)
    if a.device.type == "cpu":
        raise Unsupported(f"a product of {dtype.value} added to {shape.accumulated.value}: PyTorch has none on a CPU")
    return lambda: torch.addmm(into, a, b, out_dtype=into.dtype, out=into)


def _on_streams(products: Sequence[Callable[[], Tensor]], streams: Sequence[torch.cuda.Stream]) -> None:
    now = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(now)
    for place, run in enumerate(products):
        with torch.cuda.stream(streams[place % len(streams)]):
            run()
    for stream in streams:
        now.wait_stream(stream)
