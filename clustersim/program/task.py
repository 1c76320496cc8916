"""What is to be done? The vocabulary of programs: pure data, no durations.

A rank runs a few streams; a stream runs its tasks in order; a task may also wait for tasks of the rank's other
streams (`after`). A `ComputeTask` task runs a block: operations back to back, most of them kernels, some of them
collectives that the compute stream waits for (those of tensor parallelism). Blocks are shared: every layer, stage and
microbatch that does the same work refers to one block object.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.dtypes import DType
from clustersim.common.enums import IdentityEnum
from clustersim.common.pickling import FieldPickling
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel
from clustersim.model.operators import DENSE
from clustersim.program.action import Action


class Stream(IntEnum):
    """Streams of one rank. Each runs its tasks in order, all run side by side."""

    COMPUTE = 0
    DP = 1  # collectives of data parallelism
    SEND_NEXT = 2  # activations to the next stage
    SEND_PREVIOUS = 3  # gradients to the previous stage
    RECEIVE = 4  # buffers are posted ahead: receives do not queue behind each other
    D2H = 5  # copies from the device
    HOST = 6  # what the host computes for the rank
    H2D = 7  # copies to the device
    EP = 8  # tokens to experts and back, of a forward beside a backward


OVERLAPPING_STREAMS: Final = (Stream.DP, Stream.EP)
"""Streams of collectives beside what the rank computes."""
HOST_STREAMS: Final = (Stream.D2H, Stream.HOST, Stream.H2D)
"""What a rank does with its host."""


class WorkType(IdentityEnum):
    """Why an operation is done; the breakdown's first question."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"


class CollectiveType(IdentityEnum):
    """Collective operations. `payload` is nccl-tests' size: the whole (gathered, unreduced) buffer of one rank."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SCATTER = "scatter"
    GATHER = "gather"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"
    DISPATCH = "dispatch"  # rows of tokens go to the ranks of their experts, as a dispatcher has it
    COMBINE = "combine"  # what experts made of them comes back, and is summed for each token
    SHIFT = "shift"  # each member's part goes round the ring, from neighbour to neighbour, until all have seen it

    @property
    def is_reduction(self) -> bool:
        """Whether numbers are summed on the way; all others move bytes, whatever these mean."""
        return self in (CollectiveType.ALL_REDUCE, CollectiveType.REDUCE_SCATTER, CollectiveType.REDUCE)

    @property
    def is_token_routing(self) -> bool:
        """Whether a dispatcher's own kernels do it, by the routing of tokens."""
        return self in (CollectiveType.DISPATCH, CollectiveType.COMBINE)


class TokenDispatcher(IdentityEnum):
    """How tokens travel to the ranks of their experts, and back.

    ALL_GATHER: every rank of the group gets all tokens, and takes those of its experts; ALL_TO_ALL: a row for each of a
    token's experts is sent to its rank by the library; DEEPEP, DEEPEP_V2, HYBRIDEP: kernels that send a token once to
    each node and pass it on there.
    """

    ALL_GATHER = "allgather"
    ALL_TO_ALL = "alltoall"
    DEEPEP = "deepep"
    DEEPEP_V2 = "deepep_v2"
    HYBRIDEP = "hybridep"

    @property
    def has_custom_kernels(self) -> bool:
        """Whether its kernels are its own, not the library's collectives."""
        return self not in (TokenDispatcher.ALL_GATHER, TokenDispatcher.ALL_TO_ALL)


@dataclass(frozen=True, slots=True)
class TokenRouting:
    """Where the rows of a dispatch go: `top_k` of `experts`, spread evenly over the group, for each token.

    groups, limit: experts are in so many groups, of which a token's are in at most `limit` (None: in any); row: bytes
    of one; cut: ranks next to each other in the group that have a part of the same experts; sms: multiprocessors that
    the dispatcher's kernels take, None: as many as usual.
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
    """A collective of one process group: `group` is a role such as "tp" or "dp", `payload` bytes.

    format: that it sums in, where it does and that is known; routing: of tokens to experts, which `payload` counts once
    for each expert; awaits: before the host launches it, it waits for all that comes before, which says what is sent;
    load: number of the program's loads by which members get (or send back) more of the payload than others.
    """

    name: str
    collective: CollectiveType
    comm_group: str
    payload: Bytes
    reduce_dtype: DType | None = field(default=None, kw_only=True)
    routing: TokenRouting | None = field(default=None, kw_only=True)
    host_sync: bool = field(default=False, kw_only=True)
    load_index: int | None = field(default=None, kw_only=True)


class HostOpKind(Enum):
    """What a rank does with its host: copies to it and from it, and what the host computes for it."""

    D2H = "to host"
    H2D = "from host"
    ON_HOST = "on host"


@dataclass(frozen=True, slots=True)
class HostOp(CommOp):
    """A message between one rank and its host, or the host's work in its own memory.

    payload: bytes that are copied, or that the host reads and writes.
    """

    kind: HostOpKind


@dataclass(frozen=True, slots=True)
class CommOverlap:
    """An exchange and a kernel cut into equal chunks and pipelined (tensor- and context-parallel overlap).

    Model: the kernel is run in as many pieces, and the longer of the two hides the shorter but for one chunk, so it
    lasts max + min / chunks. Where neither needs the other nothing is cut, and `chunks` is infinite.
    local: the kernel's first piece needs nothing of the exchange, and nothing is exchanged behind its last one (a ring
    of neighbours), so it lasts at least as long as the kernel, and as the exchange and one piece.
    """

    comm_op: CommOp
    kernel: Kernel
    chunk_count: float
    is_ring: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a block. gradients: how many parameters of this rank, all of one group, have theirs after it.

    fetches: bytes of activations that must be back from the host before it; frees: whether what was fetched is read for
    the last time; saves: bytes that go there after it; leaves: of gradients that go there after it; load: number of the
    program's loads by which a rank's kernel has more rows than the mean one's; late: a weight's gradient that was put
    off, and so does not wait for the exchange before it; routed: it works on rows on the ranks of their experts.
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
        """The collective that the operation runs, alone or beside a kernel."""
        body = self.body
        return body if isinstance(body, CommOp) else body.comm_op if isinstance(body, CommOverlap) else None

    @property
    def kernel(self) -> Kernel | None:
        """The kernel that the operation runs, alone or beside a collective."""
        body = self.body
        return body if isinstance(body, Kernel) else body.kernel if isinstance(body, CommOverlap) else None

    @property
    def moe_comm(self) -> CommOp | None:
        """The exchange, if all that it does is to bring tokens to experts or back."""
        body = self.body
        return body if isinstance(body, CommOp) and body.routing is not None else None


@dataclass(frozen=True, eq=False)
class Segment(FieldPickling):
    """Operations that run back to back on the compute stream. Compared by identity: blocks are shared.

    takes_turns: another pass's operations are run, and launched, right before.
    """

    name: str
    operations: tuple[Operation, ...]
    interleaved: bool = False

    @cached_property
    def distinct_operations(self) -> tuple[Operation, ...]:
        """The different operations, told by their identity, as layers share them."""
        return tuple({id(operation): operation for operation in self.operations}.values())

    @cached_property
    def operation_index(self) -> IntArray:
        """[operations] the place of each in `distinct`."""
        index_by_id = {id(operation): index for index, operation in enumerate(self.distinct_operations)}
        return np.array([index_by_id[operation] for operation in map(id, self.operations)], dtype=np.int64)

    @cached_property
    def comm_ops(self) -> tuple[CommOp, ...]:
        """The collectives inside, in order."""
        return tuple(comm_op for operation in self.operations if (comm_op := operation.comm_op) is not None)

    @cached_property
    def distinct_comm_ops(self) -> tuple[CommOp, ...]:
        """The different ones of them, in order; by identity first, as to hash each of them takes longer."""
        comm_ops = (comm_op for operation in self.distinct_operations if (comm_op := operation.comm_op) is not None)
        return tuple(dict.fromkeys({id(comm_op): comm_op for comm_op in comm_ops}.values()))


@dataclass(frozen=True, slots=True)
class ComputeTask:
    """Run a block."""

    segment: Segment
    depends_on: tuple[int, ...] = ()
    action: Action | None = None


@dataclass(frozen=True, slots=True)
class CollectiveTask:
    """Run a collective with the members of a group; it starts when all of them have come."""

    comm_op: CommOp
    depends_on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendTask:
    """Send `exchange.payload` to the other member of the pair; `tag` names the message within the pair."""

    comm_op: CommOp
    tag: Action
    depends_on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceiveTask:
    """Be done when the message `tag` of the pair `exchange.group` has come in."""

    comm_op: CommOp
    tag: Action
    depends_on: tuple[int, ...] = ()


Task = ComputeTask | CollectiveTask | SendTask | ReceiveTask
