"""Grouped matmul of experts' tokens with their weights in PyTorch.

In one kernel (`grouped_mm`) if this build has it for the device and the format; otherwise, and for streamed
matmuls, one matmul per group: on a GPU round-robin on four streams, as Transformer Engine's `GroupedLinear`
runs them (transformer_engine/common/util/multi_stream.cpp), which wait for previous work and are waited for.
Tokens are contiguous by group; groups may differ in size, which the kernel reads on the device and a loop
knows on the host. Weights are [groups, outputs, inputs], as a linear layer's; the weight gradient sums over
each group's tokens. Block-scaled formats: `scaled_grouped_gemm`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from calibrate.devices.stopwatch import Action
from calibrate.kernels.formulas import UnsupportedKernel
from calibrate.kernels.pytorch_ops import scaled_grouped_gemm
from calibrate.kernels.pytorch_ops.actions import ResultRetainingAction
from calibrate.kernels.pytorch_ops.random_tensors import TORCH_DTYPES, normal_tensor
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.model.kernels import Kernel, KernelKind, MatmulLayout, MatmulShape

STREAM_COUNT: Final = 4
_PROBE_SIZE: Final = 32  # dimensions of the matmul that probes for the kernel

# public since torch 2.10
_grouped_mm: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def prepare_grouped(
    kernel: Kernel, shape: MatmulShape, device: torch.device, group_sizes: Sequence[int] | None = None
) -> Action:
    """Grouped matmul of random operands; group_sizes: tokens of each group, None: equal sizes.

    Raise UnsupportedKernel if PyTorch has none.
    """
    sizes = (_group_size(shape),) * shape.batch if group_sizes is None else tuple(group_sizes)
    if kernel.dtype in LOW_PRECISION_DTYPES:
        return ResultRetainingAction(_scaled_grouped(kernel, shape, device, sizes))
    if (
        kernel.kind is KernelKind.GROUPED_MATMUL
        and shape.accumulated is None
        and has_grouped_kernel(kernel.dtype, device)
    ):
        return ResultRetainingAction(_single_kernel(shape, kernel.dtype, device, sizes))
    return ResultRetainingAction(_matmul_per_group(shape, kernel.dtype, device, sizes))


def grouped_matmul(tokens: Tensor, weights: Tensor, group_ends: Tensor) -> Tensor:
    """Tokens [tokens, inputs] by group times weights [groups, outputs, inputs]: [tokens, outputs]."""
    result: Tensor = _grouped_mm(tokens, weights.transpose(-2, -1), offs=group_ends)
    return result


@cache
def has_grouped_kernel(dtype: DType, device: torch.device) -> bool:
    """Whether PyTorch has a grouped kernel on this device and in this format."""
    if _grouped_mm is None:
        return False
    a, b = (
        torch.zeros(1 + extra_dimension, _PROBE_SIZE, _PROBE_SIZE, dtype=TORCH_DTYPES[dtype], device=device)
        for extra_dimension in (0, 1)
    )
    try:
        _grouped_mm(a[0], b.transpose(-2, -1), offs=_group_ends((_PROBE_SIZE // 2, _PROBE_SIZE // 2), device))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _scaled_grouped(
    kernel: Kernel, shape: MatmulShape, device: torch.device, group_sizes: Sequence[int]
) -> Callable[[], Any]:
    if kernel.kind is KernelKind.GROUPED_MATMUL and scaled_grouped_gemm.has_grouped_kernel(kernel.dtype, device):
        return scaled_grouped_gemm.single_kernel(shape, kernel.dtype, device, group_sizes)
    return _run_sequentially(scaled_grouped_gemm.matmul_per_expert(shape, kernel.dtype, device, group_sizes), device)


def _group_size(shape: MatmulShape) -> int:
    """Tokens of one group, the reduction dimension of a weight gradient."""
    return shape.k if shape.operands is MatmulLayout.TN else shape.m


def _group_ends(group_sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(group_sizes)), dtype=torch.int32, device=device)


def grouped_operands(shape: MatmulShape, dtype: DType, device: torch.device, token_count: int) -> tuple[Tensor, Tensor]:
    """Tokens of all groups and weights; for a weight gradient, output gradients (transposed) and tokens."""
    if shape.operands is MatmulLayout.TN:
        return normal_tensor(device, dtype, token_count, shape.m).t(), normal_tensor(
            device, dtype, token_count, shape.n
        )
    a = normal_tensor(device, dtype, token_count, shape.k)
    if shape.operands is MatmulLayout.NN:
        return a, normal_tensor(device, dtype, shape.batch, shape.k, shape.n)
    return a, normal_tensor(device, dtype, shape.batch, shape.n, shape.k).transpose(-2, -1)


def _single_kernel(
    shape: MatmulShape, dtype: DType, device: torch.device, group_sizes: Sequence[int]
) -> Callable[[], Tensor]:
    a, b = grouped_operands(shape, dtype, device, sum(group_sizes))
    group_ends = _group_ends(group_sizes, device)

    def run() -> Tensor:
        result: Tensor = _grouped_mm(a, b, offs=group_ends)
        return result

    return run


def _matmul_per_group(
    shape: MatmulShape, dtype: DType, device: torch.device, group_sizes: Sequence[int]
) -> Callable[[], Any]:
    """One matmul per group, writing into a common result."""
    a, b = grouped_operands(shape, dtype, device, sum(group_sizes))
    result = normal_tensor(device, shape.accumulated or dtype, *_result_shape(shape, sum(group_sizes)))
    if shape.operands is MatmulLayout.TN:
        group_operands = list(
            zip(torch.split(a, list(group_sizes), 1), torch.split(b, list(group_sizes)), result, strict=True)
        )
    else:
        group_operands = list(
            zip(torch.split(a, list(group_sizes)), b, torch.split(result, list(group_sizes)), strict=True)
        )
    return _run_sequentially([_group_matmul(shape, dtype, operand_triple) for operand_triple in group_operands], device)


def _run_sequentially(matmuls: Sequence[Callable[[], Tensor]], device: torch.device) -> Callable[[], Any]:
    """Run one after the other, on a GPU on several streams."""
    if device.type != "cuda":
        return lambda: [run() for run in matmuls]
    streams = [torch.cuda.Stream() for _ in range(min(STREAM_COUNT, len(matmuls)))]  # type: ignore[no-untyped-call]
    return lambda: _run_on_streams(matmuls, streams)


def _result_shape(shape: MatmulShape, token_count: int) -> tuple[int, ...]:
    return (shape.batch, shape.m, shape.n) if shape.operands is MatmulLayout.TN else (token_count, shape.n)


def _group_matmul(
    shape: MatmulShape, dtype: DType, operand_triple: tuple[Tensor, Tensor, Tensor]
) -> Callable[[], Tensor]:
    a, b, output = operand_triple
    if shape.accumulated is None:
        return lambda: torch.mm(a, b, out=output)
    if TORCH_DTYPES[shape.accumulated] is TORCH_DTYPES[dtype]:
        return lambda: torch.addmm(output, a, b, out=output)
    if a.device.type == "cpu":
        raise UnsupportedKernel(
            f"a matmul of {dtype.value} added to {shape.accumulated.value}: PyTorch has none on a CPU"
        )
    return lambda: torch.addmm(output, a, b, out_dtype=output.dtype, out=output)


def _run_on_streams(matmuls: Sequence[Callable[[], Tensor]], streams: Sequence[torch.cuda.Stream]) -> None:
    current_stream = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(current_stream)
    for index, run in enumerate(matmuls):
        with torch.cuda.stream(streams[index % len(streams)]):
            run()
    for stream in streams:
        current_stream.wait_stream(stream)
