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

from calibrate.collectives.timing import Lap
from calibrate.kernels.pytorch_ops.random_tensors import TORCH
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.program.task import CollectiveType

ITEM: Final = 4  # bytes of an FP32 number
_EXACT: Final = {torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8}  # integers that are held exactly
COPIES: Final = 2.0  # buffers of a whole payload that a rank needs, at most
_PERIOD: Final = 251  # of the pattern in the buffers; a prime, so that no part looks like another

# named anew in torch 2.13, which warns of the older names
gather_parts = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_parts = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Member:
    """The place of this rank in a group. group: the process group's handle; ranks: numbers in the world.

    dtype: of the numbers that are moved; shares: what each member of an all-to-all gets over an even part; none: that.
    """

    group: Any
    ranks: tuple[int, ...]
    place: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    shares: tuple[float, ...] = ()

    def of(self, form: DType, shares: tuple[float, ...] = ()) -> "Member":
        """The same with numbers of another format, or uneven parts."""
        return replace(self, dtype=TORCH[form], shares=shares)

    @property
    def first(self) -> bool:
        """Whether it is the root of what has one."""
        return self.place == 0

    def part(self, payload: Bytes) -> int:
        """Numbers in each member's part of a payload."""
        return max(1, round(-(-payload // (self.dtype.itemsize * len(self.ranks)))))

    def parts(self, payload: Bytes) -> list[int]:
        """Numbers in the part that each member gets of a payload."""
        even = self.part(payload)
        return [round(share * even) for share in self.shares] or [even] * len(self.ranks)

    def whole(self, payload: Bytes) -> int:
        """Numbers in a payload."""
        return max(1, round(-(-payload // self.dtype.itemsize)))

    def numbers(self, place: int, count: int) -> Tensor:
        """[count] numbers that tell whose they are and where they stand, as far as the sum of all has room for that."""
        exact, size = _EXACT[self.dtype], len(self.ranks)
        below = max(2, exact // size) if place < exact else 1  # of more members than that the others give zeros
        pattern = (torch.arange(_PERIOD, device=self.device) + (place + 1)) % below
        return pattern.to(self.dtype).repeat(-(-count // _PERIOD))[:count]

    def sums(self, count: int) -> Tensor:
        """The sum of all members' numbers."""
        total = self.numbers(0, count)
        for place in range(1, len(self.ranks)):
            total = total + self.numbers(place, count)
        return total

    def room(self, count: int) -> Tensor:
        """[count] numbers that are yet to come."""
        return torch.zeros(count, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A collective ready to be called. result: where it is left; expected: what it then holds; None: nothing here."""

    lap: Lap
    result: Tensor | None
    expected: Callable[[], Tensor]

    @property
    def right(self) -> bool:
        """Whether the result is what it must be; after one call."""
        return self.result is None or torch.equal(self.result, self.expected())


def _part(member: Member, place: int, count: int) -> Tensor:
    """What is meant for this member in the whole buffer of another."""
    size = len(member.ranks)
    return member.numbers(place, count * size).view(size, count)[member.place]


def _split(member: Member, place: int, parts: list[int]) -> Tensor:
    """The same where parts are of different sizes."""
    return torch.split(member.numbers(place, sum(parts)), parts)[member.place]


def _nothing() -> None:
    """No preparation: the call leaves what it reads as it was."""


def _all_reduce(member: Member, payload: Bytes) -> Prepared:
    source = member.numbers(member.place, member.whole(payload))
    buffer = torch.empty_like(source)
    lap = Lap(lambda: buffer.copy_(source), lambda: dist.all_reduce(buffer, group=member.group))
    return Prepared(lap, buffer, lambda: member.sums(len(buffer)))


def _reduce(member: Member, payload: Bytes) -> Prepared:
    source = member.numbers(member.place, member.whole(payload))
    buffer, root = torch.empty_like(source), member.ranks[0]
    lap = Lap(lambda: buffer.copy_(source), lambda: dist.reduce(buffer, root, group=member.group))
    return Prepared(lap, buffer if member.first else None, lambda: member.sums(len(buffer)))


def _broadcast(member: Member, payload: Bytes) -> Prepared:
    buffer, root = member.numbers(member.place, member.whole(payload)), member.ranks[0]
    lap = Lap(_nothing, lambda: dist.broadcast(buffer, root, group=member.group))
    return Prepared(lap, buffer, lambda: member.numbers(0, len(buffer)))


def _all_gather(member: Member, payload: Bytes) -> Prepared:
    count = member.part(payload)
    part, whole = member.numbers(member.place, count), member.room(count * len(member.ranks))
    lap = Lap(_nothing, lambda: gather_parts(whole, part, group=member.group))
    return Prepared(lap, whole, lambda: torch.cat([member.numbers(place, count) for place in range(len(member.ranks))]))


def _reduce_scatter(member: Member, payload: Bytes) -> Prepared:
    count, size = member.part(payload), len(member.ranks)
    whole, part = member.numbers(member.place, count * size), member.room(count)
    lap = Lap(_nothing, lambda: _reduce_parts(part, whole, group=member.group))
    return Prepared(lap, part, lambda: member.sums(count * size).view(size, count)[member.place])


def _all_to_all(member: Member, payload: Bytes) -> Prepared:
    """With the sizes of parts, as dispatchers of tokens call it, where these are uneven."""
    parts, size = member.parts(payload), len(member.ranks)
    given, taken = member.numbers(member.place, sum(parts)), member.room(parts[member.place] * size)
    comes, goes = ([parts[member.place]] * size, parts) if member.shares else (None, None)
    lap = Lap(_nothing, lambda: dist.all_to_all_single(taken, given, comes, goes, member.group))
    return Prepared(lap, taken, lambda: torch.cat([_split(member, place, parts) for place in range(size)]))


def _scatter(member: Member, payload: Bytes) -> Prepared:
    count, size = member.part(payload), len(member.ranks)
    part, root = member.room(count), member.ranks[0]
    parts = list(member.numbers(0, count * size).view(size, count)) if member.first else None
    lap = Lap(_nothing, lambda: dist.scatter(part, parts, root, group=member.group))
    return Prepared(lap, part, lambda: _part(member, 0, count))


def _gather(member: Member, payload: Bytes) -> Prepared:
    count, size = member.part(payload), len(member.ranks)
    part, root = member.numbers(member.place, count), member.ranks[0]
    whole = member.room(count * size) if member.first else None
    parts = None if whole is None else list(whole.view(size, count))
    lap = Lap(_nothing, lambda: dist.gather(part, parts, root, group=member.group))
    return Prepared(lap, whole, lambda: torch.cat([member.numbers(place, count) for place in range(size)]))


def _send_recv(member: Member, payload: Bytes) -> Prepared:
    sent, received = member.numbers(member.place, member.whole(payload)), member.room(member.whole(payload))
    other = member.ranks[1 - member.place]

    def there_and_back() -> None:
        if member.first:
            dist.send(sent, other, group=member.group)
        dist.recv(received, other, group=member.group)
        if not member.first:
            dist.send(sent, other, group=member.group)

    lap = Lap(_nothing, there_and_back, trips=2)
    return Prepared(lap, received, lambda: member.numbers(1 - member.place, len(sent)))


def _shift(member: Member, payload: Bytes) -> Prepared:
    count, size = member.part(payload), len(member.ranks)
    parts = [member.numbers(member.place, count), member.room(count), member.room(count)]
    after, before = (member.ranks[(member.place + step) % size] for step in (1, -1))

    def around() -> None:
        for sent, received in _rounds(parts, size):
            give = dist.P2POp(dist.isend, sent, after, member.group)
            take = dist.P2POp(dist.irecv, received, before, member.group)
            for work in dist.batch_isend_irecv([give, take]):
                work.wait()

    *_, (_, last) = _rounds(parts, size)
    return Prepared(Lap(_nothing, around), last, lambda: member.numbers((member.place + 1) % size, count))


def _rounds(parts: list[Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    """What is sent and what is received in each round: one's own part, then what came in, the other two in turn."""
    held = [parts[0], *(parts[1 + turn % 2] for turn in range(size - 1))]
    return list(pairwise(held))


_CALLS: Final[Mapping[CollectiveType, Callable[[Member, Bytes], Prepared]]] = {
    CollectiveType.ALL_REDUCE: _all_reduce,
    CollectiveType.ALL_GATHER: _all_gather,
    CollectiveType.REDUCE_SCATTER: _reduce_scatter,
    CollectiveType.BROADCAST: _broadcast,
    CollectiveType.REDUCE: _reduce,
    CollectiveType.SCATTER: _scatter,
    CollectiveType.GATHER: _gather,
    CollectiveType.ALL_TO_ALL: _all_to_all,
    CollectiveType.SEND_RECV: _send_recv,
    CollectiveType.SHIFT: _shift,
}


def prepared(collective: CollectiveType, member: Member, payload: Bytes) -> Prepared:
    """A collective with buffers for a payload."""
    return _CALLS[collective](member, payload)
