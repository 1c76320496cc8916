"""How does PyTorch's ring attention run the blocks of keys, and how does it merge what they give?

`_templated_ring_attention` of torch/distributed/tensor/experimental/_attention.py (pytorch/pytorch@0123248a; since 2.6
behind `context_parallel`) calls the attention kernel once for each of the P blocks. Of balanced causal halves
(`_HeadTailLoadBalancer`) the first call is a causal square of the rank's own 2c tokens, each other one a rectangle of
half the queries or half the keys: 2 c^2 scores, as many as the square. Without balancing the last rank, which all wait
for, has a causal square and whole ones. A call reads its queries and writes its output.

Results are merged in FP32 (`convert_to_f32`): out -= sigmoid(lse' - lse) (out - out'), `_SDPAMerger`; the gradients of
queries, keys and values are accumulated in FP32 in every call, `_templated_ring_attention_backward`. Passes per element
(a in the activations' format, f in FP32). Eager, forward, of each merge: conversion of the block's output (a + f),
difference (3 f), times the sigmoid (2 f), subtraction (3 f); the first block's is converted (a + f), the result back
(f + a); keys and values are concatenated for each exchange, used or not (2 a). Backward, on the rank that has only half
of the keys in all calls but the first: the queries' gradient is added (a + 2 f), half of the keys' and values' too, and
both halves are concatenated (a / 2 + f, 2 f), then those of keys with those of values (2 f). Compiled, a merge is one
kernel that reads the block's output and reads and writes the sum (a + 2 f), an accumulation too. Statistics of softmax,
a head dimension smaller, are not counted, nor are copies of keys and values for each query head.

FP32 sums and the buffers in flight exist while attention runs: the output forward; backward the gradients of queries,
and of keys and values those that were received, are sent and are received next; the sum that has got only half of its
elements, of queries or of keys and values, exists twice (`_partial_update`); and the concatenated keys and values.
"""

from dataclasses import replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.attention import AttentionCore
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp
from clustersim.model.memory_bound import MemoryBoundSpec, MemoryPasses
from clustersim.model.operators import Operator

_FIRST: Final = MemoryPasses(1, fp32=1)
_MERGE: Final = {True: MemoryPasses(1, fp32=2), False: MemoryPasses(1, fp32=9, launches=9)}
_LAST: Final = {True: MemoryPasses(0), False: MemoryPasses(1, fp32=1)}
_CONCATENATION: Final = {True: MemoryPasses(0), False: MemoryPasses(2)}
_SUM: Final = MemoryPasses(1, fp32=2)
_SUM_CONCATENATION: Final = {True: MemoryPasses(0, fp32=4, launches=3), False: MemoryPasses(0, fp32=2)}


def split_into_blocks(core: AttentionCore, operator: Operator, blocks: int, *, compiled: bool) -> Operator:
    """The attention core's operator, one kernel for each of `blocks` blocks of keys, with what merges these.

    operator: of one kernel over all keys in each direction, of the rank that has most to do.
    """
    shares, (forward, backward) = _score_shares(core, blocks), _block_kernels(core, blocks)
    (full_forward,), (full_backward,) = operator.forward, operator.input_gradient
    forward, backward = (
        [replace(kernel, flops=share * full.flops) for kernel, share in zip(kernels, shares, strict=True)]
        for kernels, full in ((forward, full_forward), (backward, full_backward))
    )
    return replace(
        operator,
        forward=_interleave(forward, _forward_merges(core, blocks, compiled=compiled)),
        input_gradient=_interleave(backward, _backward_merges(core, blocks, compiled=compiled)),
        temporary_bytes=operator.temporary_bytes + _buffer_bytes(core),
    )


def _is_balanced(core: AttentionCore) -> bool:
    """Whether each rank has a chunk from each end of the sequence, not the last of consecutive tokens."""
    return not core.shape.trailing


def _block_kernels(core: AttentionCore, blocks: int) -> tuple[list[Kernel], list[Kernel]]:
    """The kernel of each block, forward and backward, with the FLOP of a causal one."""
    first = replace(core.shape, key=core.shape.query, trailing=False)
    later = first if _is_balanced(core) else replace(first, causal=False)
    operators = [operator for shape in (first, later) for operator in replace(core, shape=shape).flash_operators()]
    forward, backward = zip(*((operator.forward[0], operator.input_gradient[0]) for operator in operators), strict=True)
    return [forward[0]] + [forward[1]] * (blocks - 1), [backward[0]] + [backward[1]] * (blocks - 1)


def _score_shares(core: AttentionCore, blocks: int) -> list[float]:
    """The part of the scores that each block has."""
    sizes = [1] + [1 if _is_balanced(core) else 2] * (blocks - 1)  # in causal squares
    return [size / sum(sizes) for size in sizes]


def _interleave(kernels: list[Kernel], merges: list[tuple[Kernel, ...]]) -> tuple[Kernel, ...]:
    """The kernel of each block before what follows it."""
    return tuple(kernel for block, merge in zip(kernels, merges, strict=True) for kernel in (block, *merge))


def _forward_merges(core: AttentionCore, blocks: int, *, compiled: bool) -> list[tuple[Kernel, ...]]:
    queries, keys = _local_elements(core)
    exchanged = _pass_kernels(core, "concatenation", _CONCATENATION[compiled], keys)
    first = _pass_kernels(core, "conversion", _FIRST, queries)
    merge = _pass_kernels(core, "merge", _MERGE[compiled], queries)
    last = _pass_kernels(core, "conversion", _LAST[compiled], queries)
    middle = [(*merge, *exchanged)] * (blocks - 2)
    return [(*first, *exchanged), *middle, (*merge, *last)]


def _backward_merges(core: AttentionCore, blocks: int, *, compiled: bool) -> list[tuple[Kernel, ...]]:
    queries, keys = _local_elements(core)
    sums = _pass_kernels(core, "query_gradient_sum", _SUM, queries)
    is_balanced = _is_balanced(core)
    sums += _pass_kernels(core, "key_gradient_sum", _SUM, keys // 2 if is_balanced and not compiled else keys)
    concatenation = _SUM_CONCATENATION[is_balanced]
    sums += () if compiled else _pass_kernels(core, "key_gradient_concatenation", concatenation, keys)
    exchanged = _pass_kernels(core, "concatenation", _CONCATENATION[compiled], keys)
    return [(*sums, *exchanged)] * (blocks - 1) + [sums]


def _pass_kernels(core: AttentionCore, name: str, passes: MemoryPasses, elements: int) -> tuple[Kernel, ...]:
    """The kernel of such passes over some elements, if there are any."""
    spec = MemoryBoundSpec(KernelKind.COPY, MemoryBoundOp.MERGE, passes, None, fused=passes.launches == 1)
    shape = spec.shape_for(1, elements)
    kernel = spec.forward_kernel(f"attention.core.{name}", core.dtype, shape)
    return (kernel,) if kernel.bytes else ()


def _local_elements(core: AttentionCore) -> tuple[int, int]:
    """Elements of a rank's own queries (or outputs), and of its keys and values."""
    shape = core.shape
    widths = shape.heads * shape.value_head_dim, shape.kv_heads * (shape.head_dim + shape.value_head_dim)
    queries, keys = (shape.batch * shape.query * width for width in widths)
    return queries, keys


def _buffer_bytes(core: AttentionCore) -> Bytes:
    queries, keys = _local_elements(core)
    sums = queries + 3 * keys + (max(queries, keys) if _is_balanced(core) else 0)
    return float(sums * DType.FP32.bytes + keys * core.dtype.bytes)
