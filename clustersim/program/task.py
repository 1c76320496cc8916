"""What does a program consist of? Tasks, operations and collectives, as pure data without durations.

Terms, from the outside in:

    Stream      in-order queue of tasks of one rank, like a CUDA stream; a rank has a few, and they overlap
    Task        compute, collective, send or receive; `depends_on`: ids of tasks on the rank's other streams
    Segment     operations back to back on the compute stream; what a `ComputeTask` runs
    Operation   one kernel, one collective for which the compute stream waits (such as those of tensor
                parallelism; "blocking" for short), or both overlapped
    CommOp      one collective or p2p call: its type, its process group and its payload

Segments are shared: every layer, stage and microbatch that does the same work refers to one segment object.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.dtypes import DType
from clustersim.common.enums import IdentityEnum
from clustersim.common.interning import Interner
from clustersim.common.pickling import FieldPickling
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel
from clustersim.model.operators import DENSE
from clustersim.program.action import Action


class Stream(IntEnum):
    """Streams of one rank. Each runs its tasks in order; the streams run concurrently."""

    COMPUTE = 0
    DP = 1  # collectives of data parallelism (gathers, gradient buckets)
    SEND_NEXT = 2  # activations to the next stage
    SEND_PREVIOUS = 3  # gradients to the previous stage
    RECEIVE = 4  # receive buffers are pre-posted: receives do not queue behind each other
    D2H = 5  # device-to-host copies
    HOST = 6  # host computation for the rank, such as an offloaded optimizer
    H2D = 7  # host-to-device copies
    EP = 8  # MoE dispatch and combine of a forward that overlaps a backward
    LAUNCH = 9  # launches of passes that overlap, by the host
    IMAGES = 10  # what an encoder on ranks of its own makes of images, to the language model


OVERLAPPING_STREAMS: Final = (Stream.DP, Stream.EP)
"""Streams whose collectives slow kernels of the compute stream while they overlap; other streams do not slow any."""
HOST_STREAMS: Final = (Stream.D2H, Stream.HOST, Stream.H2D, Stream.LAUNCH)
"""Streams of host copies, host computation and launches."""


class WorkType(IdentityEnum):
    """Purpose of an operation: the first level of the time breakdown."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"


class CollectiveType(IdentityEnum):
    """Collective operations. `payload` follows nccl-tests: the full (gathered, unreduced) buffer size of one rank."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SCATTER = "scatter"
    GATHER = "gather"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"
    DISPATCH = "dispatch"  # MoE dispatch: tokens go to the ranks of their experts, by kernels of a token dispatcher
    COMBINE = "combine"  # MoE combine: expert outputs come back and are summed for each token
    SHIFT = "shift"  # each member's shard reaches all others in n-1 hops from neighbour to neighbour (ring attention)

    @property
    def is_reduction(self) -> bool:
        """Whether values are summed on the way; all other types only move bytes."""
        return self in (CollectiveType.ALL_REDUCE, CollectiveType.REDUCE_SCATTER, CollectiveType.REDUCE)

    @property
    def is_token_routing(self) -> bool:
        """Whether it follows the router's token assignment: MoE dispatch or combine by the dispatcher's kernels."""
        return self in (CollectiveType.DISPATCH, CollectiveType.COMBINE)


class TokenDispatcher(IdentityEnum):
    """MoE token dispatcher: how tokens are sent to the ranks of their experts and back.

    ALL_GATHER: every rank of the group receives all tokens and selects those of its experts; ALL_TO_ALL: the
    communication library sends one copy of a token for each of its experts; DEEPEP, DEEPEP_V2, DEEPEP_UCCL, HYBRIDEP,
    MORI: kernels that send a token once to each node and forward it there.
    """

    ALL_GATHER = "allgather"
    ALL_TO_ALL = "alltoall"
    DEEPEP = "deepep"
    DEEPEP_V2 = "deepep_v2"
    DEEPEP_UCCL = "deepep_uccl"
    HYBRIDEP = "hybridep"
    MORI = "mori"

    @property
    def sends_indices(self) -> bool:
        """Whether tokens arrive with the indices of their experts, not with a mask."""
        return self in (
            TokenDispatcher.DEEPEP,
            TokenDispatcher.DEEPEP_V2,
            TokenDispatcher.DEEPEP_UCCL,
            TokenDispatcher.MORI,
        )

    @property
    def has_custom_kernels(self) -> bool:
        """Whether it communicates with kernels of its own rather than with library collectives."""
        return self not in (TokenDispatcher.ALL_GATHER, TokenDispatcher.ALL_TO_ALL)


@dataclass(frozen=True, slots=True)
class TokenRouting:
    """Destinations of dispatched tokens: `top_k` of `expert_count` experts for each token, uniform over the group.

    expert_group_count, max_groups_per_token: group-limited routing, None: no limit; token_bytes: bytes of one
    dispatched token; expert_shard_size: neighbouring ranks that shard the same experts (expert tensor
    parallelism); sm_count: SMs that the dispatcher's kernels occupy, None: its default.
    """

    dispatcher: TokenDispatcher
    expert_count: int
    top_k: int
    expert_group_count: int = 1
    max_groups_per_token: int | None = None
    token_bytes: Bytes = field(default=0.0, kw_only=True)
    expert_shard_size: int = field(default=1, kw_only=True)
    sm_count: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class CommOp:
    """One collective or p2p call: comm_group is a kind of process group ("tp", "dp"), not one group; payload in bytes.

    reduce_dtype: format of the reduction, if it reduces and that is known; routing: of MoE tokens, which
    `payload` counts once for each expert; host_sync: the host waits for all earlier work before the launch,
    because that determines the message sizes; load_index: index into the program's expert loads, by which members
    receive (or return) uneven shares of the payload; senders: of send/recv, the first members, each of which sends an
    equal part of the payload to each of the others.
    """

    name: str
    collective: CollectiveType
    comm_group: str
    payload: Bytes
    reduce_dtype: DType | None = field(default=None, kw_only=True)
    routing: TokenRouting | None = field(default=None, kw_only=True)
    host_sync: bool = field(default=False, kw_only=True)
    load_index: int | None = field(default=None, kw_only=True)
    senders: int = field(default=1, kw_only=True)


class HostOpKind(Enum):
    """Copies between a rank and its host, computation of the host, and launches by it."""

    D2H = "to host"
    H2D = "from host"
    ON_HOST = "on host"
    LAUNCH = "launch"


@dataclass(frozen=True, slots=True)
class HostOp(CommOp):
    """A copy between a rank and its host, or host computation in host memory.

    payload: bytes that are copied, or that the host reads and writes.
    """

    kind: HostOpKind


@dataclass(frozen=True, slots=True)
class CommOverlap:
    """A collective and a kernel split into chunks and pipelined (tensor- and context-parallel overlap).

    Model: the kernel runs in chunk_count chunks, and the longer of the two hides the shorter except for one
    chunk: max + min / chunk_count. If neither depends on the other, nothing is split and `chunk_count` is
    infinite. is_ring: the first chunk of the kernel is local and nothing is sent behind the last one (a ring of
    neighbours), so the duration is at least that of the kernel, and that of the collective plus one chunk.
    """

    comm_op: CommOp
    kernel: Kernel
    chunk_count: float
    is_ring: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation of a segment: kernel, blocking collective, or both overlapped. Compared by identity, as shared.

    gradient_count: parameters of this rank, all of parameter_group, whose gradients are complete after it;
    h2d_bytes: offloaded activations that must be back on the device before it; is_last_use: it reads those for
    the last time; d2h_bytes: activations that are offloaded after it; gradient_d2h_bytes: gradients likewise;
    load_index: index into the program's expert loads, by which a kernel has more tokens than the mean rank's;
    deferred_wgrad: a delayed weight gradient, which does not wait for the collective before it; on_expert_rank:
    it works on dispatched tokens.
    """

    body: Kernel | CommOp | CommOverlap
    work_type: WorkType
    gradient_count: int = 0
    parameter_group: str = DENSE
    h2d_bytes: Bytes = 0.0
    is_last_use: bool = False
    d2h_bytes: Bytes = 0.0
    gradient_d2h_bytes: Bytes = 0.0
    load_index: int | None = None
    deferred_wgrad: bool = False
    on_expert_rank: bool = False

    @property
    def comm_op(self) -> CommOp | None:
        """The collective that the operation runs, with or without an overlapped kernel."""
        body = self.body
        return body if isinstance(body, CommOp) else body.comm_op if isinstance(body, CommOverlap) else None

    @property
    def kernel(self) -> Kernel | None:
        """The kernel that the operation runs, with or without an overlapped collective."""
        body = self.body
        return body if isinstance(body, Kernel) else body.kernel if isinstance(body, CommOverlap) else None

    @property
    def moe_comm(self) -> CommOp | None:
        """The comm op, if the operation is nothing but an MoE dispatch or combine."""
        body = self.body
        return body if isinstance(body, CommOp) and body.routing is not None else None


@dataclass(frozen=True, eq=False)
class Segment(FieldPickling):
    """Operations that run back to back on the compute stream. Compared by identity, as segments are shared.

    interleaved: its pass alternates with another one on the compute stream (1F1B with EP overlap), so its launches are
    tasks of their own (`LaunchOp`).
    """

    name: str
    operations: tuple[Operation, ...]
    interleaved: bool = False

    @cached_property
    def distinct_operations(self) -> tuple[Operation, ...]:
        """Distinct operations, as layers share them."""
        return tuple(dict.fromkeys(self.operations))

    @cached_property
    def operation_index(self) -> IntArray:
        """[operations] index of each operation in `distinct_operations`."""
        index_of = {operation: index for index, operation in enumerate(self.distinct_operations)}
        return np.array([index_of[operation] for operation in self.operations], dtype=np.int64)

    @cached_property
    def comm_ops(self) -> tuple[CommOp, ...]:
        """The collectives inside, in order."""
        return tuple(comm_op for operation in self.operations if (comm_op := operation.comm_op) is not None)

    @cached_property
    def distinct_comm_ops(self) -> tuple[CommOp, ...]:
        """The distinct collectives inside, in order."""
        operations = self.distinct_operations
        return Interner(comm_op for operation in operations if (comm_op := operation.comm_op) is not None).values


@dataclass(frozen=True, slots=True)
class LaunchOp(HostOp):
    """What the host does to launch segments of interleaved passes, and collectives, as segments of one operation.

    continued: the rest of the segment that the device may begin already, None: of none; begun: the next one, as far as
    the device needs to run it without waiting, None: it is not launched yet.
    """

    continued: Segment | None
    begun: Segment | None


@dataclass(frozen=True, slots=True)
class ComputeTask:
    """Run a segment. action: the pipeline action that it belongs to."""

    segment: Segment
    depends_on: tuple[int, ...] = ()
    action: Action | None = None


@dataclass(frozen=True, slots=True)
class CollectiveTask:
    """Run a collective with the members of a group; it starts when the last member has arrived.

    Host copies, host computation and launches (`HostOp`) are such tasks, too, in a group of one rank.
    """

    comm_op: CommOp
    depends_on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendTask:
    """Send `comm_op.payload` to the other member of the pair; `tag` identifies the message within the pair."""

    comm_op: CommOp
    tag: Action
    depends_on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceiveTask:
    """Completes when the message `tag` of the pair `comm_op.comm_group` has arrived."""

    comm_op: CommOp
    tag: Action
    depends_on: tuple[int, ...] = ()


Task = ComputeTask | CollectiveTask | SendTask | ReceiveTask
