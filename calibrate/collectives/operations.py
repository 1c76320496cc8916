"""How is each collective called in torch.distributed, and is its result correct?

One function per collective prepares the buffers of a payload for this rank of a group and returns the call,
repeatable with the same buffers, and the expected result. Payload: as `program.task.CollectiveType` defines
it (nccl-tests' size), rounded up to whole elements of a format in each shard. The elements are small
integers, whose sum over all members the format represents exactly, so results are compared bit by bit.
Reductions work in place, so their buffer is refilled before each call. Send/recv is a ping-pong, so that
clocks of different ranks are never compared.
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

FP32_BYTES: Final = 4  # bytes of an FP32 element
_MAX_EXACT_INTEGER: Final = {
    torch.float32: 2**24,
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
}  # largest exactly representable integers
MAX_BUFFERS: Final = 2.0  # maximum number of full-payload buffers of a rank
_PATTERN_PERIOD: Final = 251  # period of the test pattern; a prime, so that shards differ

# renamed in torch 2.13, which deprecates the older names
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class GroupMember:
    """The calling rank as a member of a group.

    group: process group handle; ranks: global ranks of the members; index: rank within the group; dtype: of the
    elements; shares: of each member of an all-to-all relative to a balanced shard; empty: balanced.
    """

    group: Any
    ranks: tuple[int, ...]
    index: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    shares: tuple[float, ...] = ()

    def with_format(self, dtype: DType, shares: tuple[float, ...] = ()) -> "GroupMember":
        """The same member with elements of another format, or imbalanced shards."""
        return replace(self, dtype=TORCH_DTYPES[dtype], shares=shares)

    @property
    def is_root(self) -> bool:
        """Whether it is the root of a rooted collective."""
        return self.index == 0

    def shard_numel(self, payload: Bytes) -> int:
        """Elements in each member's shard of a payload."""
        return max(1, round(-(-payload // (self.dtype.itemsize * len(self.ranks)))))

    def shard_numels(self, payload: Bytes) -> list[int]:
        """[members] elements in the shard that each member gets of a payload."""
        balanced = self.shard_numel(payload)
        return [round(share * balanced) for share in self.shares] or [balanced] * len(self.ranks)

    def payload_numel(self, payload: Bytes) -> int:
        """Elements in a payload."""
        return max(1, round(-(-payload // self.dtype.itemsize)))

    def test_pattern(self, index: int, count: int) -> Tensor:
        """[count] elements that depend on member and position, as far as the exactly representable sum allows."""
        max_exact, size = _MAX_EXACT_INTEGER[self.dtype], len(self.ranks)
        modulus = (
            max(2, max_exact // size) if index < max_exact else 1
        )  # members beyond the largest exact integer contribute zeros
        pattern = (torch.arange(_PATTERN_PERIOD, device=self.device) + (index + 1)) % modulus
        return pattern.to(self.dtype).repeat(-(-count // _PATTERN_PERIOD))[:count]

    def expected_sum(self, count: int) -> Tensor:
        """[count] sum of all members' patterns."""
        total = self.test_pattern(0, count)
        for index in range(1, len(self.ranks)):
            total = total + self.test_pattern(index, count)
        return total

    def zero_buffer(self, count: int) -> Tensor:
        """[count] zeros to receive into."""
        return torch.zeros(count, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class PreparedCollective:
    """A collective ready to be called.

    result: the output buffer, None where this rank gets no result; expected: its expected content.
    """

    iteration: CollectiveIteration
    result: Tensor | None
    expected: Callable[[], Tensor]

    @property
    def is_correct(self) -> bool:
        """Whether the result is correct, after one call."""
        return self.result is None or torch.equal(self.result, self.expected())


def _expected_shard(member: GroupMember, source: int, count: int) -> Tensor:
    """[count] elements that the `source` member's buffer holds for this member."""
    size = len(member.ranks)
    return member.test_pattern(source, count * size).view(size, count)[member.index]


def _expected_uneven_shard(member: GroupMember, source: int, numels: list[int]) -> Tensor:
    """The same with shards of different sizes."""
    return torch.split(member.test_pattern(source, sum(numels)), numels)[member.index]


def _no_op() -> None:
    """No preparation: the call does not modify its input."""


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
    """With explicit split sizes where shards are imbalanced, as token dispatchers call it."""
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
    """(sent, received) buffers of each step: first the own shard, then what was received, double-buffered."""
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
