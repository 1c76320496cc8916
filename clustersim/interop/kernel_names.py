"""What does a kernel compute, by its name? And what does a collective transfer, by its trace arguments?

Names are those of CUDA and ROCm libraries (cuBLAS, CUTLASS, cuDNN, hipBLASLt, flash-attention, Transformer
Engine), of PyTorch's own kernels, of Triton's (which list what they fuse) and of traces that this program
writes. The first matching pattern decides; kernels without a match are "other kernels". Fused kernels count
as the most specific operation in their name.

Collectives are identified by `Collective name` and related arguments, which newer versions of PyTorch
record, else by the kernel's name; then the payload is unknown, and both p2p messages and all-to-all are
send_recv, as in NCCL's name. Reference: pytorch/pytorch, torch/csrc/distributed/c10d/ParamCommsUtils.hpp
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

from clustersim.common.dtypes import DType
from clustersim.model.kernels import KernelKind
from clustersim.program.task import CollectiveType
from clustersim.results.profiled_step import GpuSpanKind, GpuSpanLabel, ProfiledCollective

_KIND_BY_KERNEL_KIND: Final[Mapping[KernelKind, GpuSpanKind]] = {
    KernelKind.MATMUL: GpuSpanKind.MATMUL,
    KernelKind.GROUPED_MATMUL: GpuSpanKind.MATMUL,
    KernelKind.STREAMED_MATMULS: GpuSpanKind.MATMUL,
    KernelKind.ATTENTION_FORWARD: GpuSpanKind.ATTENTION,
    KernelKind.ATTENTION_BACKWARD: GpuSpanKind.ATTENTION,
    KernelKind.NORM: GpuSpanKind.NORM,
    KernelKind.ACTIVATION: GpuSpanKind.POINTWISE,
    KernelKind.ROTARY: GpuSpanKind.POINTWISE,
    KernelKind.RESIDUAL: GpuSpanKind.POINTWISE,
    KernelKind.DROPOUT: GpuSpanKind.POINTWISE,
    KernelKind.SOFTMAX: GpuSpanKind.LOSS,
    KernelKind.EMBEDDING: GpuSpanKind.EMBEDDING,
    KernelKind.LOSS: GpuSpanKind.LOSS,
    KernelKind.OPTIMIZER: GpuSpanKind.OPTIMIZER,
    KernelKind.COPY: GpuSpanKind.COPIES,
    KernelKind.CAST: GpuSpanKind.COPIES,
    KernelKind.SCAN: GpuSpanKind.ATTENTION,
    KernelKind.SPARSE_ATTENTION: GpuSpanKind.ATTENTION,
}
_SIMULATED_NAME: Final = re.compile(rf"({'|'.join(kind.value for kind in KernelKind)})_[a-z0-9-]+::")
_COMMUNICATION_NAME: Final = re.compile(r"nccl|rccl|^gloo:|deep_ep|deepep|hybrid_ep|nvshmem|all_reduce_kernel|onccl")
_KIND_PATTERNS: Final = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"l2norm_(fwd|bwd)", GpuSpanKind.NORM),
        (r"causal_conv1d", GpuSpanKind.POINTWISE),
        (r"chunk_(fwd|bwd|scan|state|gated|kda|gla|cumsum|local|scaled|delta|transform)|state_passing|bmm_chunk|"
         r"recompute_w_u|prepare_wy|solve_tril|selective_scan|lightning_attn", GpuSpanKind.ATTENTION),
        (r"flash|fmha|attention|sdpa|fused_attn|attn_fwd|attn_bwd|compute_dot_do_o|convert_dq", GpuSpanKind.ATTENTION),
        (r"multi_tensor|adam|lamb(?!da)|adagrad|\bsgd|lpnorm|l2norm", GpuSpanKind.OPTIMIZER),
        (r"layer_?norm|rms_?norm|ln_(fwd|bwd)|gammabeta|batch_?norm|\bbn_(fw|bw)|group_?norm", GpuSpanKind.NORM),
        (r"gemm|gemv|nvjet|cutlass|xmma|cijk_|matmul|splitk|triton_tem|wgrad|dgrad|fprop|scudnn|cudnn.*conv|winograd",
         GpuSpanKind.MATMUL),
        (r"softmax|cross_?entropy|nll_?loss|mse_|_loss", GpuSpanKind.LOSS),
        (r"embedding|index_?select|indexing_backward|sum_and_scatter|compute_grad_weight", GpuSpanKind.EMBEDDING),
        (r"^triton_(poi|red|per)", GpuSpanKind.POINTWISE),
        (r"memset|memcpy|copy|(?<!no)cast|quantiz|amax|transpose|catarray|permute|nchw|fill|concat|index_?put|gather|scatter",
         GpuSpanKind.COPIES),
        (r"elementwise|pointwise|reduce_kernel|gelu|silu|swiglu|relu|rotary|rope|dropout|triton|clamp",
         GpuSpanKind.POINTWISE),
    )
)  # fmt: skip
_COLLECTIVE_PREFIXES: Final = (  # prefixes of names without "_"; longer prefixes before their own prefixes
    ("allreduce", CollectiveType.ALL_REDUCE),
    ("allgather", CollectiveType.ALL_GATHER),
    ("reducescatter", CollectiveType.REDUCE_SCATTER),
    ("alltoall", CollectiveType.ALL_TO_ALL),
    ("broadcast", CollectiveType.BROADCAST),
    ("reduce", CollectiveType.REDUCE),
    ("scatter", CollectiveType.SCATTER),
    ("gather", CollectiveType.GATHER),
    ("sendrecv", CollectiveType.SEND_RECV),
    ("send", CollectiveType.SEND_RECV),
    ("recv", CollectiveType.SEND_RECV),
)
_DTYPE_BYTES: Final = {
    "float": 4, "bfloat16": 2, "half": 2, "double": 8, "long": 8, "int": 4, "short": 2, "char": 1, "byte": 1, "bool": 1,
}  # fmt: skip
_REDUCE_DTYPES: Final = {"float": DType.FP32, "bfloat16": DType.BF16, "half": DType.FP16}
_MATRIX_RANK: Final = 2  # dimensions of a matrix without batch


def classify_kernel(name: str, category: str) -> GpuSpanKind:
    """Category of a GPU span. category: the profiler's, `kernel`, `gpu_memcpy` or `gpu_memset`."""
    if category.endswith("memcpy"):
        return GpuSpanKind.HOST if re.search(r"HtoD|DtoH|HostToDevice|DeviceToHost", name) else GpuSpanKind.COPIES
    simulated = _SIMULATED_NAME.match(name)
    if simulated is not None:
        return _KIND_BY_KERNEL_KIND[KernelKind(simulated[1])]
    lowered = name.lower()
    if _COMMUNICATION_NAME.search(lowered):
        return GpuSpanKind.COMMUNICATION
    return next((kind for pattern, kind in _KIND_PATTERNS if pattern.search(lowered)), GpuSpanKind.OTHER)


def make_span_label(
    name: str, category: str, arguments: Mapping[str, Any], dims: Any, groups: Mapping[str, Any]
) -> GpuSpanLabel:
    """Label of a span. arguments: the event's; dims: the launching operator's input sizes; groups: ranks by name."""
    kind = classify_kernel(name, category)
    collective_call = _parse_collective(name, arguments, groups) if kind is GpuSpanKind.COMMUNICATION else None
    return GpuSpanLabel(name, kind, collective_call, _matmul_sizes(dims) if kind is GpuSpanKind.MATMUL else None)


def _parse_collective(name: str, arguments: Mapping[str, Any], groups: Mapping[str, Any]) -> ProfiledCollective:
    collective_name = str(arguments.get("Collective name", ""))
    dtype = str(arguments.get("dtype", "")).lower()
    element_count = max(_positive_int(arguments.get(f"{direction} msg nelems")) for direction in ("In", "Out"))
    width = 1 if dtype.startswith("float8") else _DTYPE_BYTES.get(dtype, 0)
    group, group_size = str(arguments.get("Process Group Name", "")), _positive_int(arguments.get("Group size"))
    members = groups.get(group) or _parse_members(str(arguments.get("Process Group Ranks", "")), group_size)
    collective = _collective_type(collective_name) or _collective_type(_nccl_kernel_name(name))
    is_dispatcher = bool(re.search(r"deep_?ep|hybrid_?ep", name.lower()))
    dispatcher_op = CollectiveType.COMBINE if "combine" in name else CollectiveType.DISPATCH
    type_name = dispatcher_op.value if is_dispatcher else collective.value if collective else "other"
    payload = float(_positive_int(arguments.get("bytes")) if is_dispatcher else element_count * width)
    reduce_dtype = (
        _REDUCE_DTYPES[dtype].value
        if collective is not None and collective.is_reduction and dtype in _REDUCE_DTYPES
        else ""
    )
    return ProfiledCollective(type_name, group_size or len(members), payload, group, members, reduce_dtype)


def _nccl_kernel_name(name: str) -> str:
    """`AllReduce` of `ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)`."""
    match = re.search(r"nccl(?:Dev)?Kernel_(\w+)", name)
    return match[1] if match else ""


def _collective_type(name: str) -> CollectiveType | None:
    normalized = re.sub("[-_]", "", name).lower()
    return next((kind for prefix, kind in _COLLECTIVE_PREFIXES if normalized.startswith(prefix)), None)


def _parse_members(text: str, size: int) -> tuple[int, ...]:
    """Ranks of `[0, 2, 4]`; a truncated list is extended to the group size if its stride is constant."""
    listed = [int(rank_text) for rank_text in re.findall(r"\d+", text.partition("...")[0])]
    if "..." not in text:
        return tuple(listed)
    strides = {following - previous for previous, following in pairwise(listed)}
    if len(strides) != 1:
        return ()
    return tuple(range(listed[0], listed[0] + size * strides.pop(), (listed[1] - listed[0])))


def _positive_int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _matmul_sizes(dims: Any) -> tuple[int, int, int, int] | None:
    """m, n, k and batch of the first two operands that match; m >= n, since A B is also (B' A')'."""
    operands = [dim for dim in dims if isinstance(dim, list) and len(dim) in (2, 3)] if isinstance(dims, list) else []
    for first, second in pairwise(operands):
        are_integers = all(isinstance(size, int) for size in (*first, *second))
        if are_integers and len(first) == len(second) and first[-1] == second[-2] and first[:-2] == second[:-2]:
            m, n = sorted((first[-2], second[-1]), reverse=True)
            return m, n, first[-1], first[0] if len(first) > _MATRIX_RANK else 1
    return None
