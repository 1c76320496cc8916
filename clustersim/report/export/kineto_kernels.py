"""What are kernels and collectives called in a trace of PyTorch's profiler, and which arguments do tools read there?

Matrix products and attention have the names and arguments of PyTorch's operators, from which tools work out FLOP;
other kernels have the simulator's own names. Collectives have NCCL's kernel names, by which tools tell them from
computation, and the arguments of PyTorch's `record_param_comms`. Payloads are counted in elements of the format of
activations, whatever their own.
Products of formats with scales are PyTorch's scaled products, with scales as these take them; dimensions count numbers,
even where two of them lie in a byte. What casts write is said beside them.
Reference: pytorch/pytorch, torch/csrc/distributed/c10d/ParamCommsUtils.hpp, aten/src/ATen/native/native_functions.yaml
(`_scaled_mm`, `_scaled_grouped_mm`), aten/src/ATen/native/cuda/ScaledBlas.cpp (dimensions of scales); NVIDIA/nccl,
src/device/generate.py
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.cost.timing import CommTiming
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.program.task import CollectiveType, CommOp, HostOp, HostOpKind, TokenDispatcher
from clustersim.report.export.span_descriptions import shape_words

_NCCL: Final = {  # the kernel's name, and the name that c10d gives the collective
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
_DISPATCHERS: Final = {
    TokenDispatcher.DEEPEP: "deep_ep",
    TokenDispatcher.DEEPEP_V2: "deep_ep",
    TokenDispatcher.HYBRIDEP: "hybrid_ep",
}
_MEMCPY: Final = {
    HostOpKind.D2H: "Memcpy DtoH (Device -> Pinned)",
    HostOpKind.H2D: "Memcpy HtoD (Pinned -> Device)",
}
_SHARED_OUT: Final = (CollectiveType.REDUCE_SCATTER, CollectiveType.SCATTER)  # each member ends with its share
_SHARED_IN: Final = (CollectiveType.ALL_GATHER, CollectiveType.GATHER)  # each member begins with its share
_NCCL_FORMATS: Final = {DType.FP32: "f32", DType.TF32: "f32", DType.BF16: "bf16", DType.FP16: "f16"}  # of activations
_C10_FORMATS: Final = {
    DType.FP32: "Float", DType.TF32: "Float", DType.BF16: "BFloat16", DType.FP16: "Half",
    **dict.fromkeys(LOW_PRECISION_DTYPES, "Float8_e4m3fn"), DType.NVFP4: "Float4_e2m1fn_x2",
}  # fmt: skip
_SCALES: Final = {  # their type, and how many elements of a row have one in common; None: a tensor's
    DType.FP8: ("float", None),
    DType.FP8_ROWWISE: ("float", math.inf),
    DType.FP8_BLOCKWISE: ("float", 128),
    DType.MXFP8: ("c10::Float8_e8m0fnu", 32),
    DType.NVFP4: ("c10::Float8_e4m3fn", 16),
}
_PRODUCTS: Final = {  # whether scaled, whether several: the operator, and how many more it is not given
    (False, False): ("aten::mm", 0),
    (False, True): ("aten::bmm", 0),
    (True, False): ("aten::_scaled_mm", 4),
    (True, True): ("aten::_scaled_grouped_mm", 5),
}
_LISTED: Final = 16  # ranks of a group that an event lists
Group = dict[str, Any]
"""A process group, as the head of a file has it: its name among all groups, what it is for, its ranks."""


@dataclass(frozen=True, slots=True)
class Called:
    """One kernel: what the host calls it with, and what runs. arguments: of the operator; device: of the kernel.

    category: what the profiler calls its kind.
    """

    operator: str
    arguments: dict[str, Any]
    kernel: str
    device: dict[str, Any]
    category: str = "kernel"


def called_kernel(kernel: Kernel) -> Called:
    """A kernel as PyTorch calls it."""
    name = f"{kernel.kind.value}_{kernel.dtype.value}::{kernel.name}"
    operator, arguments = _operator(kernel)
    device: dict[str, Any] = {"flop": int(kernel.flops), "memory bytes": int(kernel.bytes)}
    made = {"casts": shape_words(kernel.shape)} if kernel.kind is KernelKind.CAST else {}
    return Called(operator, arguments, name, device | made)


def called_exchange(exchange: CommOp, timing: CommTiming, group: Group, dtype: DType, *, received: bool) -> Called:
    """A collective, or a message that is sent or received, as c10d calls NCCL; or what others call."""
    if isinstance(exchange, HostOp):
        return _called_host(exchange)
    if exchange.routing is not None and exchange.collective.is_token_routing:
        return _called_dispatcher(exchange, exchange.routing.dispatcher, group)
    kernel, name = ("SendRecv", "recv") if received else _NCCL[exchange.collective]
    suffix = "" if kernel == "SendRecv" else "_" + re.sub(r"[^A-Z0-9]+", "_", timing.algorithm.upper()).strip("_")
    kernel = f"ncclDevKernel_{kernel.format(_NCCL_FORMATS[dtype])}{suffix}(ncclDevKernelArgsStorage<4096ul>)"
    size, elements = group["pg_size"], int(exchange.payload // dtype.bytes)
    arguments = {
        "Collective name": name,
        "In msg nelems": elements // size if exchange.collective in _SHARED_IN else elements,
        "Out msg nelems": elements // size if exchange.collective in _SHARED_OUT else elements,
        "Group size": size,
        "dtype": _C10_FORMATS[dtype],
        "Process Group Name": group["pg_name"],
        "Process Group Description": group["pg_desc"],
        "Process Group Ranks": _listed(group["ranks"]),
    }
    return Called("record_param_comms", arguments, kernel, arguments)


def _called_dispatcher(exchange: CommOp, dispatcher: TokenDispatcher, group: Group) -> Called:
    """Kernels that send tokens to experts or get results back, by their namespace."""
    name = f"{_DISPATCHERS[dispatcher]}::{exchange.collective.value}"
    arguments = {"Group size": group["pg_size"], "Process Group Ranks": _listed(group["ranks"])}
    return Called(name, arguments, name, {"bytes": int(exchange.payload)})


def _called_host(exchange: HostOp) -> Called:
    """A copy to or from pinned memory of the host, as the profiler names it, or what the host computes itself."""
    if exchange.kind is HostOpKind.ON_HOST:
        return Called(exchange.name, {}, exchange.name, {"bytes": int(exchange.payload)}, category="cpu_op")
    kernel = _MEMCPY[exchange.kind]
    return Called("aten::copy_", {}, kernel, {"bytes": int(exchange.payload)}, category="gpu_memcpy")


def _listed(ranks: Sequence[int]) -> str:
    words = [str(rank) for rank in ranks]
    return f"[{', '.join(words if len(words) <= _LISTED else [*words[: _LISTED - 1], '...', words[-1]])}]"


def _operator(kernel: Kernel) -> tuple[str, dict[str, Any]]:
    """The operator's name and arguments, as the profiler writes them with `record_shapes`."""
    match kernel.shape:
        case MatmulShape() as shape:
            return _product(shape, kernel.dtype)
        case AttentionShape() as shape if kernel.kind is KernelKind.ATTENTION_FORWARD:
            return _attention(shape, kernel.dtype)
    return f"clustersim::{kernel.kind.value}", {}


def _attention(shape: AttentionShape, dtype: DType) -> tuple[str, dict[str, Any]]:
    """PyTorch's own attention has no window; the flash-attn package's has, and counts the keys before the query's."""
    queries = [shape.batch, shape.heads, shape.query, shape.head_dim]
    keys = [shape.batch, shape.kv_heads, shape.key, shape.head_dim]
    name, concrete = "aten::_scaled_dot_product_flash_attention", ["", "", "", "0.", str(shape.causal), "False", ""]
    if shape.window is not None:
        queries, keys = ([batch, tokens, heads, width] for batch, heads, tokens, width in (queries, keys))
        name = "flash_attn::_flash_attn_forward"
        concrete = ["", "", "", "0.", "", str(shape.causal), str(shape.window - 1), "0", "0.", "", "False"]
    return name, _arguments([queries, keys, keys], [_word(dtype)] * 3, concrete, more="Scalar")


def _product(shape: MatmulShape, dtype: DType) -> tuple[str, dict[str, Any]]:
    """Operands of scaled products lie along what is summed over, A by rows and B by columns, as they were cast."""
    m, n, k, scaled, several = shape.m, shape.n, shape.k, dtype in LOW_PRECISION_DTYPES, shape.batch != 1
    dims, words = [[m, k], [k, n]], [_word(dtype)] * 2
    strides = [[k, 1], [1, k] if scaled or shape.operands is MatmulLayout.NT else [n, 1]]
    if scaled:
        dims, words = dims + _scales(shape, dtype), words + [_SCALES[dtype][0]] * 2
    elif shape.operands is MatmulLayout.TN:
        strides[0] = [1, m]
    if several:
        strides = [[rows * columns, *stride] for (rows, columns), stride in zip(dims[:2], strides, strict=True)]
        dims = [[shape.batch, *dim] for dim in dims]
    name, absent = _PRODUCTS[scaled, several]
    return name, _arguments(dims, words, [""] * (len(dims) + absent)) | {"Input Strides": strides}


def _scales(shape: MatmulShape, dtype: DType) -> list[list[int]]:
    """Dimensions of the scales of A and B; blocks of 128 are as high as wide in weights, which gradients have not."""
    _, width = _SCALES[dtype]
    if width is None:
        return [[], []]
    many = math.ceil(shape.k / width) or 1
    high = 128 if dtype is DType.FP8_BLOCKWISE and shape.operands is not MatmulLayout.TN else 1
    return [[shape.m, many], [many, math.ceil(shape.n / high)]]


def _word(dtype: DType) -> str:
    return "float" if dtype is DType.FP32 else f"c10::{_C10_FORMATS[dtype]}"


def _arguments(dims: list[list[int]], words: list[str], concrete: list[str], *, more: str = "") -> dict[str, Any]:
    """Arguments that are tensors, and behind them as many more as there are values. more: of which type these are."""
    rest = len(concrete) - len(dims)
    return {
        "Input Dims": [*dims, *([[]] * rest)],
        "Input type": [*words, *([more] * rest)],
        "Concrete Inputs": concrete,
    }
