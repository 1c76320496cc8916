"""What does a kernel do, by its name? And what does a collective move, by what PyTorch says beside it?

Names are those of CUDA and ROCm libraries (cuBLAS, CUTLASS, cuDNN, hipBLASLt, flash-attention, Transformer Engine),
of PyTorch's own kernels, of Triton's (which list what they fuse) and of traces that this program writes. The first rule
that a name meets holds; what meets none is "other kernels". Fused kernels count as what is rarest in their names.

Collectives are known by `Collective name` and its companions, which newer versions of PyTorch write, else by the
kernel's name; then nothing says their payload, and both messages and all-to-all are send_recv, as in NCCL's name.
Reference: pytorch/pytorch, torch/csrc/distributed/c10d/ParamCommsUtils.hpp
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

from clustersim.common.dtypes import DType
from clustersim.model.kernels import KernelKind
from clustersim.program.task import CollectiveType
from clustersim.results.profiled_step import Moved, SpanKind, SpanLabel

_OWN: Final[Mapping[KernelKind, SpanKind]] = {
    KernelKind.MATMUL: SpanKind.PRODUCTS,
    KernelKind.GROUPED_MATMUL: SpanKind.PRODUCTS,
    KernelKind.STREAMED_MATMULS: SpanKind.PRODUCTS,
    KernelKind.ATTENTION_FORWARD: SpanKind.ATTENTION,
    KernelKind.ATTENTION_BACKWARD: SpanKind.ATTENTION,
    KernelKind.NORM: SpanKind.NORM,
    KernelKind.ACTIVATION: SpanKind.POINTWISE,
    KernelKind.ROTARY: SpanKind.POINTWISE,
    KernelKind.RESIDUAL: SpanKind.POINTWISE,
    KernelKind.DROPOUT: SpanKind.POINTWISE,
    KernelKind.SOFTMAX: SpanKind.LOSS,
    KernelKind.EMBEDDING: SpanKind.EMBEDDING,
    KernelKind.LOSS: SpanKind.LOSS,
    KernelKind.OPTIMIZER: SpanKind.OPTIMIZER,
    KernelKind.COPY: SpanKind.COPIES,
    KernelKind.CAST: SpanKind.COPIES,
}
_OWN_NAME: Final = re.compile(rf"({'|'.join(kind.value for kind in KernelKind)})_[a-z0-9-]+::")
_COMMUNICATES: Final = re.compile(r"nccl|rccl|deep_ep|deepep|hybrid_ep|nvshmem|all_reduce_kernel|onccl")
_RULES: Final = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"flash|fmha|attention|sdpa|fused_attn|attn_fwd|attn_bwd", SpanKind.ATTENTION),
        (r"multi_tensor|adam|lamb|adagrad|\bsgd|lpnorm|l2norm", SpanKind.OPTIMIZER),
        (r"layer_?norm|rms_?norm|ln_(fwd|bwd)|gammabeta|batch_?norm|\bbn_(fw|bw)|group_?norm", SpanKind.NORM),
        (r"gemm|gemv|nvjet|cutlass|xmma|cijk_|matmul|splitk|triton_tem|wgrad|dgrad|fprop|scudnn|cudnn.*conv|winograd",
         SpanKind.PRODUCTS),
        (r"softmax|cross_?entropy|nll_?loss|mse_|_loss", SpanKind.LOSS),
        (r"embedding|index_?select|indexing_backward", SpanKind.EMBEDDING),
        (r"^triton_(poi|red|per)", SpanKind.POINTWISE),
        (r"memset|memcpy|copy|cast|quantiz|amax|transpose|catarray|permute|nchw|fill|concat|index_?put|gather|scatter",
         SpanKind.COPIES),
        (r"elementwise|pointwise|reduce_kernel|gelu|silu|swiglu|relu|rotary|rope|dropout|triton|clamp",
         SpanKind.POINTWISE),
    )
)  # fmt: skip
_COLLECTIVES: Final = (  # what names begin with, once "_" is out of them; longer ones before what they begin with
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
_BYTES: Final = {
    "float": 4, "bfloat16": 2, "half": 2, "double": 8, "long": 8, "int": 4, "short": 2, "char": 1, "byte": 1, "bool": 1,
}  # fmt: skip
_SUMMED: Final = {"float": DType.FP32, "bfloat16": DType.BF16, "half": DType.FP16}
_BOTH_FACTORS: Final = 2  # operands of a product


def kind_of(name: str, category: str) -> SpanKind:
    """What a span of the GPU does. category: the profiler's, `kernel`, `gpu_memcpy` or `gpu_memset`."""
    if category.endswith("memcpy"):
        return SpanKind.HOST if re.search(r"HtoD|DtoH|HostToDevice|DeviceToHost", name) else SpanKind.COPIES
    own = _OWN_NAME.match(name)
    if own is not None:
        return _OWN[KernelKind(own[1])]
    low = name.lower()
    if _COMMUNICATES.search(low):
        return SpanKind.COMMUNICATION
    return next((kind for pattern, kind in _RULES if pattern.search(low)), SpanKind.OTHER)


def label_of(name: str, category: str, arguments: Mapping[str, Any], dims: Any, groups: Mapping[str, Any]) -> SpanLabel:
    """What a span says. arguments: its own; dims: of the operator that launched it; groups: ranks by group's name."""
    kind = kind_of(name, category)
    moved = _moved(name, arguments, groups) if kind is SpanKind.COMMUNICATION else None
    return SpanLabel(name, kind, moved, _product(dims) if kind is SpanKind.PRODUCTS else None)


def _moved(name: str, arguments: Mapping[str, Any], groups: Mapping[str, Any]) -> Moved:
    called = str(arguments.get("Collective name", ""))
    dtype = str(arguments.get("dtype", "")).lower()
    elements = max(_number(arguments.get(f"{way} msg nelems")) for way in ("In", "Out"))
    width = 1 if dtype.startswith("float8") else _BYTES.get(dtype, 0)
    group, ranks = str(arguments.get("Process Group Name", "")), _number(arguments.get("Group size"))
    members = groups.get(group) or _members(str(arguments.get("Process Group Ranks", "")), ranks)
    found = _collective(called) or _collective(_kernel_word(name))
    own = bool(re.search(r"deep_?ep|hybrid_?ep", name.lower()))
    routed = CollectiveType.COMBINE if "combine" in name else CollectiveType.DISPATCH
    word = routed.value if own else found.value if found else "other"
    payload = float(_number(arguments.get("bytes")) if own else elements * width)
    summed = _SUMMED[dtype].value if found is not None and found.is_reduction and dtype in _SUMMED else ""
    return Moved(word, ranks or len(members), payload, group, members, summed)


def _kernel_word(name: str) -> str:
    """`AllReduce` of `ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)`."""
    found = re.search(r"nccl(?:Dev)?Kernel_(\w+)", name)
    return found[1] if found else ""


def _collective(word: str) -> CollectiveType | None:
    plain = re.sub("[-_]", "", word).lower()
    return next((kind for start, kind in _COLLECTIVES if plain.startswith(start)), None)


def _members(words: str, size: int) -> tuple[int, ...]:
    """Ranks of `[0, 2, 4]`; of a list that is cut as many as the group has, if all that is shown is evenly apart."""
    shown = [int(item) for item in re.findall(r"\d+", words.partition("...")[0])]
    if "..." not in words:
        return tuple(shown)
    apart = {after - before for before, after in pairwise(shown)}
    if len(apart) != 1:
        return ()
    return tuple(range(shown[0], shown[0] + size * apart.pop(), (shown[1] - shown[0])))


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _product(dims: Any) -> tuple[int, int, int, int] | None:
    """m, n, k and batch of the first two operands that fit each other; m and n in order, as A B is also B' A'."""
    operands = [dim for dim in dims if isinstance(dim, list) and len(dim) in (2, 3)] if isinstance(dims, list) else []
    for first, second in pairwise(operands):
        flat = all(isinstance(size, int) for size in (*first, *second))
        if flat and len(first) == len(second) and first[-1] == second[-2] and first[:-2] == second[:-2]:
            m, n = sorted((first[-2], second[-1]), reverse=True)
            return m, n, first[-1], first[0] if len(first) > _BOTH_FACTORS else 1
    return None
