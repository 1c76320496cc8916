"""What do context-parallel ranks exchange for attention, and when?

Each of P ranks has S / P tokens of every sequence, and its queries attend to the keys of all. By kind:

- RING (Liu et al. 2023, arXiv:2310.01889; Transformer Engine's `p2p`): keys and values go round, block by block,
  while attention runs; in backward with the gradients of both.
- ALL_GATHER (Llama 3, arXiv:2407.21783, section 3.3.2; Transformer Engine's `all_gather`): they are gathered before
  attention, in backward again, and their gradients reduce-scattered after it. Nothing overlaps (Megatron-LM's
  description of `--cp-comm-type`).
- ULYSSES (Jacobs et al. 2023, arXiv:2309.14509; `a2a`): all-to-alls before attention exchange tokens for heads, so
  that each rank has whole sequences of H / P heads, and back after it; in backward likewise. With fewer key and value
  heads than ranks these are copied first.
- TWO_DIMENSIONAL (Fang and Zhao 2024, arXiv:2405.07719; `a2a+p2p`): Ulysses within groups of `inner` ranks, the ring
  across them.
- HIERARCHICAL (Gu et al. 2024, arXiv:2406.18485, double ring): rings within groups of `inner` ranks, and across them,
  which carries each block once to every group. The two overlap attention one after the other here.

Where each block of a ring is a kernel of its own (`model.ring_attention`, PyTorch's `context_parallel`), that of one
block overlaps the message that the next one needs (`_AllToAllRotater`), or the first one's a gather of all
(`_AllGatherRotater`); in backward the sums of gradients, in FP32, go round in either case, behind the kernel that adds
to them, the last hop alone. The latency of each hop is that of a whole ring here.

Every rank moves, of the keys and values of the full sequence (KV), (P - 1) / P forward and twice that backward by
ring, all-gather and double ring; by Ulysses (P - 1) / P of its own queries, keys, values and outputs, each way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes
from clustersim.parallel.mesh import CP_GROUP, CP_INNER_GROUP, CP_OUTER_GROUP, CommGroup
from clustersim.program.task import CollectiveType, CommOp


class ContextParallelKind(IdentityEnum):
    """How context-parallel ranks exchange keys and values, or heads."""

    RING = "ring"
    ALL_GATHER = "all_gather"
    ULYSSES = "ulysses"
    TWO_DIMENSIONAL = "two_dimensional"
    HIERARCHICAL = "hierarchical"

    @property
    def has_groups(self) -> bool:
        """Whether ranks form inner groups."""
        return self in (ContextParallelKind.TWO_DIMENSIONAL, ContextParallelKind.HIERARCHICAL)


BLOCK_RING_KINDS: Final = frozenset({ContextParallelKind.RING, ContextParallelKind.ALL_GATHER})
"""Kinds that libraries run block by block (PyTorch's `_RotateMethod`)."""


@dataclass(frozen=True, slots=True)
class KvRing:
    """A ring of keys and values that attention overlaps block by block."""

    comm_op: CommOp
    block_count: int


@dataclass(frozen=True, slots=True)
class ContextExchange:
    """Collectives of attention in one pass: before it, with its kernel (or those of its blocks), and after it."""

    before: tuple[CommOp, ...] = ()
    rings: tuple[KvRing, ...] = ()
    after: tuple[CommOp, ...] = ()
    with_blocks: tuple[CommOp | None, ...] = ()


NO_EXCHANGE: Final = ContextExchange()


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """Context parallelism of a layer's attention.

    degree: number of ranks; inner: ranks of an inner group; format: of activations; kv_bytes: of the keys and values
    of the full sequence for the heads of one rank, after tokens are exchanged for heads; head_bytes: of the queries,
    keys and values that a rank sends for its tokens, copies of heads included; output_bytes: of attention's output;
    by_blocks: each block of a ring is a kernel of its own.
    """

    kind: ContextParallelKind
    degree: int
    inner: int
    format: DType
    kv_bytes: Bytes
    head_bytes: Bytes
    output_bytes: Bytes
    by_blocks: bool = False

    def exchange(self, *, backward: bool) -> ContextExchange:
        """What a pass exchanges."""
        if self.degree == 1:
            return NO_EXCHANGE
        return _block_ring(self, backward) if self.by_blocks else _EXCHANGES[self.kind](self, backward)

    def ring(self, comm_group: CommGroup, kv_bytes: Bytes, ranks: int, *, backward: bool) -> KvRing:
        """A ring of `ranks` ranks over which `kv_bytes` of keys and values are spread, with gradients in backward."""
        payload = (2.0 if backward else 1.0) * kv_bytes
        return KvRing(CommOp("ring of keys and values", CollectiveType.SHIFT, comm_group.name, payload), ranks)

    def hop(self, byte_count: Bytes) -> CommOp:
        """A message of every rank to its neighbour, of `byte_count` bytes."""
        payload = byte_count * self.degree / (self.degree - 1)
        return CommOp("hop of keys and values", CollectiveType.SHIFT, CP_GROUP.name, payload)

    def swap(self, comm_group: CommGroup, *, heads: bool) -> CommOp:
        """An all-to-all that exchanges tokens for heads: of queries, keys and values, or of the output."""
        name = "exchange heads" if heads else "exchange outputs"
        size = self.head_bytes if heads else self.output_bytes
        return CommOp(name, CollectiveType.ALL_TO_ALL, comm_group.name, size)


def _ring(context: ContextParallel, backward: bool) -> ContextExchange:
    ring = context.ring(CP_GROUP, context.kv_bytes, context.degree, backward=backward)
    return ContextExchange(rings=(ring,))


def _block_ring(context: ContextParallel, backward: bool) -> ContextExchange:
    """Keys and values before each block but the first, or all at once; sums of gradients behind each block."""
    local_bytes, later_blocks = context.kv_bytes / context.degree, context.degree - 1
    gathers = context.kind is ContextParallelKind.ALL_GATHER
    keys = [local_bytes if not gathers else 0.0] * later_blocks + [0.0]
    sums = local_bytes * DType.FP32.bytes / context.format.bytes if backward else 0.0
    hops = [context.hop(size) if size else None for size in (keys[0], *(size + sums for size in keys[1:]))]
    first = CommOp("gather keys and values", CollectiveType.ALL_GATHER, CP_GROUP.name, context.kv_bytes)
    with_blocks = (first if gathers else hops[0], *hops[1:])
    return ContextExchange(with_blocks=with_blocks, after=(context.hop(sums),) if backward else ())


def _all_gather(context: ContextParallel, backward: bool) -> ContextExchange:
    gather = CommOp("gather keys and values", CollectiveType.ALL_GATHER, CP_GROUP.name, context.kv_bytes)
    name, collective = "reduce gradients of keys", CollectiveType.REDUCE_SCATTER
    scatter = CommOp(name, collective, CP_GROUP.name, context.kv_bytes, reduce_dtype=context.format)
    return ContextExchange((gather,), after=(scatter,) if backward else ())


def _ulysses(context: ContextParallel, backward: bool) -> ContextExchange:
    return _between_swaps(context, CP_GROUP, backward)


def _two_dimensional(context: ContextParallel, backward: bool) -> ContextExchange:
    rings = context.degree // context.inner
    ring = context.ring(CP_OUTER_GROUP, context.kv_bytes, rings, backward=backward)
    return _between_swaps(context, CP_INNER_GROUP, backward, (ring,))


def _between_swaps(
    context: ContextParallel, comm_group: CommGroup, backward: bool, rings: tuple[KvRing, ...] = ()
) -> ContextExchange:
    """Heads come before attention and outputs go after it; in backward their gradients the other way."""
    before, after = (context.swap(comm_group, heads=heads) for heads in ((False, True) if backward else (True, False)))
    return ContextExchange((before,), rings, (after,))


def _hierarchical(context: ContextParallel, backward: bool) -> ContextExchange:
    groups = context.degree // context.inner
    outer = context.ring(CP_OUTER_GROUP, context.kv_bytes / context.inner, groups, backward=backward)
    inner = context.ring(CP_INNER_GROUP, context.kv_bytes, context.inner, backward=backward)
    return ContextExchange(rings=(outer, inner))


_EXCHANGES: Final[Mapping[ContextParallelKind, Callable[[ContextParallel, bool], ContextExchange]]] = MappingProxyType(
    {
        ContextParallelKind.RING: _ring,
        ContextParallelKind.ALL_GATHER: _all_gather,
        ContextParallelKind.ULYSSES: _ulysses,
        ContextParallelKind.TWO_DIMENSIONAL: _two_dimensional,
        ContextParallelKind.HIERARCHICAL: _hierarchical,
    }
)
