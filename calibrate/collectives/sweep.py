"""How long do collectives of many sizes and groups take, one after the other?

All groups of one call's shape run it at the same time, as those of a layout do; ranks of no group only meet the others.
Each collective's result is checked once for each shape of group before it is timed. What does not fit the processes,
their memory or the time left is passed over on all ranks alike, with the reason.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, TypeVar

import torch

from calibrate.collectives.operations import COPIES, ITEM, Member, Prepared, prepared
from calibrate.collectives.process_groups import World, formed, joined_world, least
from calibrate.collectives.timing import Clock, DeviceClock, HostClock, Lap, timed
from calibrate.devices.device import TorchDevice
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, Seconds, format_bytes
from clustersim.cost.calibration_record import CollectiveCall, CollectiveSample
from clustersim.program.task import CollectiveType

T = TypeVar("T")

_CHECKED: Final = 1000 * ITEM  # bytes of each member's part in a check
_USABLE: Final = 0.8  # of the memory that is free


@dataclass(frozen=True, slots=True)
class Skipped:
    """A call that was not measured, and why."""

    call: CollectiveCall
    why: str


def sweep(
    calls: Sequence[CollectiveCall], device: TorchDevice, *, budget: Seconds | None, patience: Seconds
) -> Iterator[CollectiveSample | Skipped]:
    """Measure calls, in the order of their groups; every rank gets the same.

    device: where this rank's data lie; budget: seconds for all of them; patience: for each. Raise InputError where a
    collective gives a wrong result.
    """
    world = joined_world()
    end = None if budget is None else perf_counter() + budget
    left = len(calls)
    for (ranks, nodes), alike in _by_group(calls).items():
        groups = world.groups(ranks, nodes)
        if not groups:
            yield from (Skipped(call, _unfit(call, world)) for call in alike)
            left -= len(alike)
            continue
        with formed(groups) as handle:
            bench = _Bench(world, device, _member(handle, groups, world, device))
            for call in alike:
                share = patience if end is None else min(patience, least((end - perf_counter()) / left, device.torch))
                yield bench.measured(call, share)
                left -= 1


def laps(calls: Sequence[CollectiveCall], device: TorchDevice) -> Iterator[tuple[CollectiveCall, Lap | Skipped]]:
    """Calls ready to be run as often as their turn lasts, in the order of their groups, or why they are not."""
    world = joined_world()
    for (ranks, nodes), alike in _by_group(calls).items():
        groups = world.groups(ranks, nodes)
        if not groups:
            yield from ((call, Skipped(call, _unfit(call, world))) for call in alike)
            continue
        with formed(groups) as handle:
            bench = _Bench(world, device, _member(handle, groups, world, device))
            for call in alike:
                yield call, bench.ready(call)


def _by_group(calls: Sequence[CollectiveCall]) -> dict[tuple[int, int], list[CollectiveCall]]:
    alike: dict[tuple[int, int], list[CollectiveCall]] = {}
    for call in calls:
        alike.setdefault((call.ranks, call.nodes), []).append(call)
    return alike


def _unfit(call: CollectiveCall, world: World) -> str:
    return f"{_group(call)} do not fit the {world.ranks} processes on {_nodes(world.nodes)}"


def _words(call: CollectiveCall) -> str:
    return call.collective.value if call.format is DType.FP32 else f"{call.collective.value} in {call.format.value}"


def _group(call: CollectiveCall) -> str:
    return f"{call.ranks} ranks on {_nodes(call.nodes)}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _member(handle: Any, groups: Sequence[tuple[int, ...]], world: World, device: TorchDevice) -> Member | None:
    """The place of this rank in the group that it belongs to."""
    mine = next((ranks for ranks in groups if world.rank in ranks), None)
    return None if mine is None else Member(handle, mine, mine.index(world.rank), device.torch)


@dataclass(slots=True)
class _Bench:
    """Calls of one shape of group, on one rank; member: None where it belongs to no group."""

    world: World
    device: TorchDevice
    member: Member | None
    checked: set[tuple[CollectiveType, DType, tuple[float, ...]]] = field(default_factory=set)

    def measured(self, call: CollectiveCall, patience: Seconds) -> CollectiveSample | Skipped:
        """One call, or why not."""
        if patience <= 0.0:
            return Skipped(call, "the time was over; started again with the same record it goes on")
        lap = self.ready(call)
        if isinstance(lap, Skipped):
            return lap
        return CollectiveSample(call, timed(lap, self._clock(), self.device.torch, patience))

    def ready(self, call: CollectiveCall) -> Lap | Skipped:
        """One call with its buffers, whose result is right, or why not."""
        if call.collective is CollectiveType.SEND_RECV and call.ranks != 2:
            return Skipped(call, f"send_recv has 2 ranks, not {call.ranks}")
        need, free = COPIES * call.payload * call.max_share, self._free()
        if need > _USABLE * free:
            return Skipped(call, f"{format_bytes(need)} of memory a process; {format_bytes(free)} are free")
        lap = self._lap(call) if self._checked(call) else None
        if lap is None:
            return Skipped(call, f"{format_bytes(need)} of memory for each process could not be had")
        return lap

    def _free(self) -> Bytes:
        """Memory that each process may use; processes on one CPU share it."""
        sharing = 1 if self.device.torch.type == "cuda" else self.world.per_node
        return least((self.device.free_bytes() or math.inf) / sharing, self.device.torch)

    def _lap(self, call: CollectiveCall) -> Lap | None:
        """The call with its buffers; None where a rank could not have them."""
        found = self._agreed(lambda: self._prepared(call, call.payload))
        return None if found is None else found.lap

    def _checked(self, call: CollectiveCall) -> bool:
        """Refuse a collective whose result is wrong, in whichever group; whether there was memory to look."""
        known = call.collective, call.format, call.shares
        if known in self.checked:
            return True
        ready = self._agreed(lambda: self._prepared(call, _CHECKED * call.ranks))
        right = None if ready is None else self._agreed(lambda: _right(ready))
        if right is None:
            return False
        if least(float(right), self.device.torch) < 1.0:
            raise InputError(f"{_words(call)} of {_group(call)} gave a wrong result")
        self.checked.add(known)
        return True

    def _prepared(self, call: CollectiveCall, payload: Bytes) -> Prepared:
        return (
            _IDLE
            if self.member is None
            else prepared(call.collective, self.member.of(call.format, call.shares), payload)
        )

    def _agreed(self, make: Callable[[], T]) -> T | None:
        """What each rank makes by itself; None on all of them where one has no memory for it.

        So no rank waits in a collective for one that never comes to it.
        """
        made: T | None = None
        try:
            made = make()
        except (RuntimeError, MemoryError) as error:
            if not self.device.out_of_memory(error):
                raise
        return None if least(float(made is not None), self.device.torch) < 1.0 else made

    def _clock(self) -> Clock:
        if self.device.torch.type == "cuda":
            return DeviceClock(self.device.torch)
        return HostClock(shared=self.world.nodes == 1)


_IDLE: Final = Prepared(Lap(lambda: None, lambda: None), None, lambda: torch.empty(0))


def _right(call: Prepared) -> bool:
    call.lap.prepare()
    call.lap.run()
    return call.right
