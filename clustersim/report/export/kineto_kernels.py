"""How are kernels and collectives named, and their arguments written, in PyTorch profiler traces?

Matmuls and attention have the names and arguments of PyTorch's operators, from which tools derive FLOP;
other kernels have the simulator's own names. Collectives have NCCL's kernel names, by which tools recognize
communication, and the arguments of PyTorch's `record_param_comms`. Payloads are counted in elements of the
activations' dtype, whatever their own.
Matmuls of formats with scales are PyTorch's scaled matmuls, with scales in their layout; dimensions count
elements, even if a byte holds two. The formats that casts write are an extra argument.
Reference: pytorch/pytorch, torch/csrc/distributed/c10d/ParamCommsUtils.hpp,
aten/src/ATen/native/native_functions.yaml (`_scaled_mm`, `_scaled_grouped_mm`),
aten/src/ATen/native/cuda/ScaledBlas.cpp (dimensions of scales); NVIDIA/nccl, src/device/generate.py
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.cost.timing import CommTiming
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulLayout, MatmulShape, format_kernel_shape
from clustersim.program.task import CollectiveType, CommOp, HostOp, HostOpKind, TokenDispatcher

_NCCL_NAMES: Final = {  # the kernel's name, and c10d's name of the collective
    CollectiveType.ALL_REDUCE: ("AllReduce_Sum_{}", "allreduce"),
    CollectiveType.ALL_GATHER: ("AllGather", "_allgather_base"),
    CollectiveType.REDUCE_SCATTER: ("ReduceScatter_Sum_{}", "_reduce_scatter_base"),
    CollectiveType.BROADCAST: ("Broadcast", "broadcast"),
    CollectiveType.REDUCE: ("Reduce_Sum_{}", "reduce"),
    CollectiveType.SCATTER: ("SendRecv", "scatter"),
    CollectiveType.GATHER: ("SendRecv", "gather"),
    CollectiveType.ALL_TO_ALL: ("SendRecv", "all_to_all"),
    CollectiveType.SEND_RECV: ("SendRecv", "send"),
    CollectiveType.SHIFT: ("SendRecv", "coalesced"),
}
_DISPATCHER_NAMESPACES: Final = {
    TokenDispatcher.DEEPEP: "deep_ep",
    TokenDispatcher.DEEPEP_V2: "deep_ep",
    TokenDispatcher.DEEPEP_UCCL: "uccl_ep",
    TokenDispatcher.HYBRIDEP: "hybrid_ep",
    TokenDispatcher.MORI: "mori",
}
_MEMCPY_NAMES: Final = {
    HostOpKind.D2H: "Memcpy DtoH (Device -> Pinned)",
    HostOpKind.H2D: "Memcpy HtoD (Pinned -> Device)",
}
_SHARDED_OUTPUT: Final = (CollectiveType.REDUCE_SCATTER, CollectiveType.SCATTER)  # each member's output is a shard
_SHARDED_INPUT: Final = (CollectiveType.ALL_GATHER, CollectiveType.GATHER)  # each member's input is a shard
_NCCL_DTYPES: Final = {
    DType.FP32: "f32",
    DType.TF32: "f32",
    DType.BF16: "bf16",
    DType.FP16: "f16",
}  # of activation dtypes
_C10_DTYPES: Final = {
    DType.FP32: "Float", DType.TF32: "Float", DType.BF16: "BFloat16", DType.FP16: "Half",
    **dict.fromkeys(LOW_PRECISION_DTYPES, "Float8_e4m3fn"), DType.NVFP4: "Float4_e2m1fn_x2",
}  # fmt: skip
_SCALE_FORMATS: Final = {  # scale dtype, and elements of a row per scale; None: one scale per tensor
    DType.FP8: ("float", None),
    DType.FP8_ROWWISE: ("float", math.inf),
    DType.FP8_BLOCKWISE: ("float", 128),
    DType.MXFP8: ("c10::Float8_e8m0fnu", 32),
    DType.NVFP4: ("c10::Float8_e4m3fn", 16),
}
_MATMUL_OPERATORS: Final = {  # is_scaled, is_batched: the operator, and its number of absent optional arguments
    (False, False): ("aten::mm", 0),
    (False, True): ("aten::bmm", 0),
    (True, False): ("aten::_scaled_mm", 4),
    (True, True): ("aten::_scaled_grouped_mm", 5),
}
_MAX_LISTED_RANKS: Final = 16  # maximum number of ranks of a group that an event lists
ProcessGroupInfo = dict[str, Any]
"""A process group as in a file's header: its unique name, its description, its ranks."""


@dataclass(frozen=True, slots=True)
class KinetoKernel:
    """One kernel: the host operator that calls it, and the device kernel.

    arguments: of the operator; device_arguments: of the kernel.

    category: the profiler's event category.
    """

    operator: str
    arguments: dict[str, Any]
    kernel: str
    device_arguments: dict[str, Any]
    category: str = "kernel"


def to_kineto_kernel(kernel: Kernel) -> KinetoKernel:
    """A kernel as PyTorch calls it."""
    name = f"{kernel.kind.value}_{kernel.dtype.value}::{kernel.name}"
    operator, arguments = _operator(kernel)
    device: dict[str, Any] = {"flop": int(kernel.flops), "memory bytes": int(kernel.bytes)}
    cast_argument = {"casts": format_kernel_shape(kernel.shape)} if kernel.kind is KernelKind.CAST else {}
    return KinetoKernel(operator, arguments, name, device | cast_argument)


def to_kineto_comm(
    comm_op: CommOp, timing: CommTiming, group: ProcessGroupInfo, dtype: DType, *, is_receive: bool
) -> KinetoKernel:
    """A collective, or a sent or received message, as c10d calls NCCL; or a dispatcher's or the host's operation."""
    if isinstance(comm_op, HostOp):
        return _to_kineto_host_op(comm_op)
    if comm_op.routing is not None and comm_op.collective.is_token_routing:
        return _to_kineto_dispatch(comm_op, comm_op.routing.dispatcher, group)
    kernel, name = ("SendRecv", "recv") if is_receive else _NCCL_NAMES[comm_op.collective]
    suffix = "" if kernel == "SendRecv" else "_" + re.sub(r"[^A-Z0-9]+", "_", timing.algorithm.upper()).strip("_")
    kernel = f"ncclDevKernel_{kernel.format(_NCCL_DTYPES[dtype])}{suffix}(ncclDevKernelArgsStorage<4096ul>)"
    group_size, elements = group["pg_size"], int(comm_op.payload // dtype.bytes)
    arguments = {
        "Collective name": name,
        "In msg nelems": elements // group_size if comm_op.collective in _SHARDED_INPUT else elements,
        "Out msg nelems": elements // group_size if comm_op.collective in _SHARDED_OUTPUT else elements,
        "Group size": group_size,
        "dtype": _C10_DTYPES[dtype],
        "Process Group Name": group["pg_name"],
        "Process Group Description": group["pg_desc"],
        "Process Group Ranks": _format_ranks(group["ranks"]),
    }
    return KinetoKernel("record_param_comms", arguments, kernel, arguments)


def _to_kineto_dispatch(comm_op: CommOp, dispatcher: TokenDispatcher, group: ProcessGroupInfo) -> KinetoKernel:
    """Token dispatch or combine kernels, by the dispatcher's namespace."""
    name = f"{_DISPATCHER_NAMESPACES[dispatcher]}::{comm_op.collective.value}"
    arguments = {"Group size": group["pg_size"], "Process Group Ranks": _format_ranks(group["ranks"])}
    return KinetoKernel(name, arguments, name, {"bytes": int(comm_op.payload)})


def _to_kineto_host_op(host_op: HostOp) -> KinetoKernel:
    """A copy to or from pinned host memory, as the profiler names it, or work computed on the host."""
    if host_op.kind in (HostOpKind.ON_HOST, HostOpKind.LAUNCH):
        return KinetoKernel(host_op.name, {}, host_op.name, {"bytes": int(host_op.payload)}, category="cpu_op")
    kernel = _MEMCPY_NAMES[host_op.kind]
    return KinetoKernel("aten::copy_", {}, kernel, {"bytes": int(host_op.payload)}, category="gpu_memcpy")


def _format_ranks(ranks: Sequence[int]) -> str:
    labels = [str(rank) for rank in ranks]
    if len(labels) > _MAX_LISTED_RANKS:
        labels = [*labels[: _MAX_LISTED_RANKS - 1], "...", labels[-1]]
    return f"[{', '.join(labels)}]"


def _operator(kernel: Kernel) -> tuple[str, dict[str, Any]]:
    """The operator's name and arguments, as the profiler writes them with `record_shapes`."""
    match kernel.shape:
        case MatmulShape() as shape:
            return _matmul_operator(shape, kernel.dtype)
        case AttentionShape() as shape if kernel.kind is KernelKind.ATTENTION_FORWARD:
            return _attention_operator(shape, kernel.dtype)
    return f"clustersim::{kernel.kind.value}", {}


def _attention_operator(shape: AttentionShape, dtype: DType) -> tuple[str, dict[str, Any]]:
    """PyTorch's attention has no window; flash-attn's has, which counts the keys before the query's."""
    queries = [shape.batch, shape.heads, shape.query, shape.head_dim]
    keys = [shape.batch, shape.kv_heads, shape.key, shape.head_dim]
    name, concrete = "aten::_scaled_dot_product_flash_attention", ["", "", "", "0.", str(shape.causal), "False", ""]
    if shape.window is not None:
        queries, keys = ([batch, tokens, heads, width] for batch, heads, tokens, width in (queries, keys))
        name = "flash_attn::_flash_attn_forward"
        concrete = ["", "", "", "0.", "", str(shape.causal), str(shape.window - 1), "0", "0.", "", "False"]
    return name, _operator_arguments([queries, keys, keys], [_c10_dtype(dtype)] * 3, concrete, scalar_type="Scalar")


def _matmul_operator(shape: MatmulShape, dtype: DType) -> tuple[str, dict[str, Any]]:
    """Scaled matmuls' operands are contiguous along the summed dimension, A by rows and B by columns."""
    m, n, k, is_scaled, is_batched = shape.m, shape.n, shape.k, dtype in LOW_PRECISION_DTYPES, shape.batch != 1
    dimensions, dtypes = [[m, k], [k, n]], [_c10_dtype(dtype)] * 2
    strides = [[k, 1], [1, k] if is_scaled or shape.operands is MatmulLayout.NT else [n, 1]]
    if is_scaled:
        dimensions, dtypes = dimensions + _scale_dimensions(shape, dtype), dtypes + [_SCALE_FORMATS[dtype][0]] * 2
    elif shape.operands is MatmulLayout.TN:
        strides[0] = [1, m]
    if is_batched:
        strides = [
            [row_count * column_count, *dimension]
            for (row_count, column_count), dimension in zip(dimensions[:2], strides, strict=True)
        ]
        dimensions = [[shape.batch, *dimension] for dimension in dimensions]
    name, absent_count = _MATMUL_OPERATORS[is_scaled, is_batched]
    return name, _operator_arguments(dimensions, dtypes, [""] * (len(dimensions) + absent_count)) | {
        "Input Strides": strides
    }


def _scale_dimensions(shape: MatmulShape, dtype: DType) -> list[list[int]]:
    """Dimensions of the scales of A and B; 128x128 blocks for weights, 1x128 for gradients."""
    _, width = _SCALE_FORMATS[dtype]
    if width is None:
        return [[], []]
    block_count = math.ceil(shape.k / width) or 1
    block_height = 128 if dtype is DType.FP8_BLOCKWISE and shape.operands is not MatmulLayout.TN else 1
    return [[shape.m, block_count], [block_count, math.ceil(shape.n / block_height)]]


def _c10_dtype(dtype: DType) -> str:
    return "float" if dtype is DType.FP32 else f"c10::{_C10_DTYPES[dtype]}"


def _operator_arguments(
    dimensions: list[list[int]], dtypes: list[str], concrete: list[str], *, scalar_type: str = ""
) -> dict[str, Any]:
    """Tensor arguments, followed by scalar arguments for the remaining concrete values. scalar_type: their type."""
    scalar_count = len(concrete) - len(dimensions)
    return {
        "Input Dims": [*dimensions, *([[]] * scalar_count)],
        "Input type": [*dtypes, *([scalar_type] * scalar_count)],
        "Concrete Inputs": concrete,
    }
