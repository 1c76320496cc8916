"""What does each collective do in torch.distributed, and did it do so?

One function for each collective prepares buffers of a payload for this rank of a group and returns the call, repeatable
with the same buffers, and what must be in them afterwards. Payload: `program.task.Collective`'s, nccl-tests' size, in
numbers of a format, rounded up to whole ones for each part. They are small integers, whose sum over all members the
format holds exactly, so results are compared bit by bit. Reductions work in place, so their buffer is filled anew
before each call. Send/recv goes there and back (the classic ping-pong), so that no rank's clock is compared with
another's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from calibrate.collectives.timing import CollectiveIteration
from calibrate.kernels.pytorch_ops.random_tensors import TORCH_DTYPES
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.program.task import CollectiveType

FP32_BYTES: Final = 4  # bytes of an FP32 number
_MAX_EXACT_INTEGER: Final = {
    torch.float32: 2**24,
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
}  # integers that are held exactly
MAX_BUFFERS: Final = 2.0  # buffers of a whole payload that a rank needs, at most
_PATTERN_PERIOD: Final = 251  # of the pattern in the buffers; a prime, so that no part looks like another

# named anew in torch 2.13, which warns of the older names
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class GroupMember:
    """The place of this rank in a group. group: the process group's handle; ranks: numbers in the world.

    dtype: of the numbers that are moved; shares: what each member of an all-to-all gets over an even part; none: that.
    """

    group: Any
    ranks: tuple[int, ...]
    index: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    shares: tuple[float, ...] = ()

    def with_format(self, dtype: DType, shares: tuple[float, ...] = ()) -> "GroupMember":
        """The same with numbers of another format, or uneven parts."""
        return replace(self, dtype=TORCH_DTYPES[dtype], shares=shares)

    @property
    def is_root(self) -> bool:
        """Whether it is the root of what has one."""
        return self.index == 0

    def shard_numel(self, payload: Bytes) -> int:
        """Numbers in each member's part of a payload."""
        return max(1, round(-(-payload // (self.dtype.itemsize * len(self.ranks)))))

    def shard_numels(self, payload: Bytes) -> list[int]:
        """Numbers in the part that each member gets of a payload."""
        balanced = self.shard_numel(payload)
        return [round(share * balanced) for share in self.shares] or [balanced] * len(self.ranks)

    def payload_numel(self, payload: Bytes) -> int:
        """Numbers in a payload."""
        return max(1, round(-(-payload // self.dtype.itemsize)))

    def test_pattern(self, index: int, count: int) -> Tensor:
        """[count] numbers that tell whose they are and where they stand, as far as the sum of all has room for that."""
        max_exact, size = _MAX_EXACT_INTEGER[self.dtype], len(self.ranks)
        modulus = (
            max(2, max_exact // size) if index < max_exact else 1
        )  # of more members than that the others give zeros
        pattern = (torch.arange(_PATTERN_PERIOD, device=self.device) + (index + 1)) % modulus
        return pattern.to(self.dtype).repeat(-(-count // _PATTERN_PERIOD))[:count]

    def expected_sum(self, count: int) -> Tensor:
        """The sum of all members' numbers."""
        total = self.test_pattern(0, count)
        for index in range(1, len(self.ranks)):
            total = total + self.test_pattern(index, count)
        return total

    def zero_buffer(self, count: int) -> Tensor:
        """[count] numbers that are yet to come."""
        return torch.zeros(count, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class PreparedCollective:
    """A collective ready to be called. result: where it is left; expected: what it then holds; None: nothing here."""

    iteration: CollectiveIteration
    result: Tensor | None
    expected: Callable[[], Tensor]

    @property
    def is_correct(self) -> bool:
        """Whether the result is what it must be; after one call."""
        return self.result is None or torch.equal(self.result, self.expected())


def _expected_shard(member: GroupMember, source: int, count: int) -> Tensor:
    """What is meant for this member in the whole buffer of another."""
    size = len(member.ranks)
    return member.test_pattern(source, count * size).view(size, count)[member.index]


def _expected_uneven_shard(member: GroupMember, source: int, numels: list[int]) -> Tensor:
    """The same where parts are of different sizes."""
    return torch.split(member.test_pattern(source, sum(numels)), numels)[member.index]


def _no_op() -> None:
    """No preparation: the call leaves what it reads as it was."""


def _prepare_all_reduce(member: GroupMember, payload: Bytes) -> PreparedCollective:
    source = member.test_pattern(member.index, member.payload_numel(payload))
    buffer = torch.empty_like(source)
    iteration = CollectiveIteration(lambda: buffer.copy_(source), lambda: dist.all_reduce(buffer, group=member.group))
    return PreparedCollective(iteration, buffer, lambda: member.expected_sum(len(buffer)))


def _prepare_reduce(member: GroupMember, payload: Bytes) -> PreparedCollective:
    source = member.test_pattern(member.index, member.payload_numel(payload))
    buffer, root = torch.empty_like(source), member.ranks[0]
    iteration = CollectiveIteration(lambda: buffer.copy_(source), lambda: dist.reduce(buffer, root, group=member.group))
    return PreparedCollective(iteration, buffer if member.is_root else None, lambda: member.expected_sum(len(buffer)))


def _prepare_broadcast(member: GroupMember, payload: Bytes) -> PreparedCollective:
    buffer, root = member.test_pattern(member.index, member.payload_numel(payload)), member.ranks[0]
    iteration = CollectiveIteration(_no_op, lambda: dist.broadcast(buffer, root, group=member.group))
    return PreparedCollective(iteration, buffer, lambda: member.test_pattern(0, len(buffer)))


def _prepare_all_gather(member: GroupMember, payload: Bytes) -> PreparedCollective:
    count = member.shard_numel(payload)
    shard, gathered = member.test_pattern(member.index, count), member.zero_buffer(count * len(member.ranks))
    iteration = CollectiveIteration(_no_op, lambda: all_gather_tensor(gathered, shard, group=member.group))
    return PreparedCollective(
        iteration,
        gathered,
        lambda: torch.cat([member.test_pattern(index, count) for index in range(len(member.ranks))]),
    )


def _prepare_reduce_scatter(member: GroupMember, payload: Bytes) -> PreparedCollective:
    count, size = member.shard_numel(payload), len(member.ranks)
    full, shard = member.test_pattern(member.index, count * size), member.zero_buffer(count)
    iteration = CollectiveIteration(_no_op, lambda: _reduce_scatter_tensor(shard, full, group=member.group))
    return PreparedCollective(
        iteration, shard, lambda: member.expected_sum(count * size).view(size, count)[member.index]
    )


def _prepare_all_to_all(member: GroupMember, payload: Bytes) -> PreparedCollective:
    """With the sizes of parts, as dispatchers of tokens call it, where these are uneven."""
    numels, size = member.shard_numels(payload), len(member.ranks)
    sent, received = member.test_pattern(member.index, sum(numels)), member.zero_buffer(numels[member.index] * size)
    output_splits, input_splits = ([numels[member.index]] * size, numels) if member.shares else (None, None)
    iteration = CollectiveIteration(
        _no_op, lambda: dist.all_to_all_single(received, sent, output_splits, input_splits, member.group)
    )
    return PreparedCollective(
        iteration, received, lambda: torch.cat([_expected_uneven_shard(member, index, numels) for index in range(size)])
    )


def _prepare_scatter(member: GroupMember, payload: Bytes) -> PreparedCollective:
    count, size = member.shard_numel(payload), len(member.ranks)
    shard, root = member.zero_buffer(count), member.ranks[0]
    shards = list(member.test_pattern(0, count * size).view(size, count)) if member.is_root else None
    iteration = CollectiveIteration(_no_op, lambda: dist.scatter(shard, shards, root, group=member.group))
    return PreparedCollective(iteration, shard, lambda: _expected_shard(member, 0, count))


def _prepare_gather(member: GroupMember, payload: Bytes) -> PreparedCollective:
    count, size = member.shard_numel(payload), len(member.ranks)
    shard, root = member.test_pattern(member.index, count), member.ranks[0]
    gathered = member.zero_buffer(count * size) if member.is_root else None
    shards = None if gathered is None else list(gathered.view(size, count))
    iteration = CollectiveIteration(_no_op, lambda: dist.gather(shard, shards, root, group=member.group))
    return PreparedCollective(
        iteration, gathered, lambda: torch.cat([member.test_pattern(index, count) for index in range(size)])
    )


def _prepare_send_recv(member: GroupMember, payload: Bytes) -> PreparedCollective:
    sent, received = (
        member.test_pattern(member.index, member.payload_numel(payload)),
        member.zero_buffer(member.payload_numel(payload)),
    )
    peer = member.ranks[1 - member.index]

    def ping_pong() -> None:
        if member.is_root:
            dist.send(sent, peer, group=member.group)
        dist.recv(received, peer, group=member.group)
        if not member.is_root:
            dist.send(sent, peer, group=member.group)

    iteration = CollectiveIteration(_no_op, ping_pong, transfer_count=2)
    return PreparedCollective(iteration, received, lambda: member.test_pattern(1 - member.index, len(sent)))


def _prepare_shift(member: GroupMember, payload: Bytes) -> PreparedCollective:
    count, size = member.shard_numel(payload), len(member.ranks)
    buffers = [member.test_pattern(member.index, count), member.zero_buffer(count), member.zero_buffer(count)]
    next_rank, previous_rank = (member.ranks[(member.index + step) % size] for step in (1, -1))

    def rotate_once() -> None:
        for sent, received in _shift_steps(buffers, size):
            send_op = dist.P2POp(dist.isend, sent, next_rank, member.group)
            receive_op = dist.P2POp(dist.irecv, received, previous_rank, member.group)
            for work in dist.batch_isend_irecv([send_op, receive_op]):
                work.wait()

    *_, (_, final_buffer) = _shift_steps(buffers, size)
    return PreparedCollective(
        CollectiveIteration(_no_op, rotate_once),
        final_buffer,
        lambda: member.test_pattern((member.index + 1) % size, count),
    )


def _shift_steps(buffers: list[Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    """What is sent and what is received in each round: one's own part, then what came in, the other two in turn."""
    buffer_order = [buffers[0], *(buffers[1 + step % 2] for step in range(size - 1))]
    return list(pairwise(buffer_order))


_PREPARERS: Final[Mapping[CollectiveType, Callable[[GroupMember, Bytes], PreparedCollective]]] = {
    CollectiveType.ALL_REDUCE: _prepare_all_reduce,
    CollectiveType.ALL_GATHER: _prepare_all_gather,
    CollectiveType.REDUCE_SCATTER: _prepare_reduce_scatter,
    CollectiveType.BROADCAST: _prepare_broadcast,
    CollectiveType.REDUCE: _prepare_reduce,
    CollectiveType.SCATTER: _prepare_scatter,
    CollectiveType.GATHER: _prepare_gather,
    CollectiveType.ALL_TO_ALL: _prepare_all_to_all,
    CollectiveType.SEND_RECV: _prepare_send_recv,
    CollectiveType.SHIFT: _prepare_shift,
}


def prepare_collective(collective: CollectiveType, member: GroupMember, payload: Bytes) -> PreparedCollective:
    """A collective with buffers for a payload."""
    return _PREPARERS[collective](member, payload)
