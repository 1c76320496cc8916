"""How long do collectives of many sizes and groups take?

All groups of one call's shape run it at the same time, as those of a layout do; ranks in no group only take
part in synchronization. Each collective's result is verified once per group shape before it is timed. Calls
that do not fit the processes, their memory or the remaining time are skipped on all ranks, with the reason.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, TypeVar

import torch

from calibrate.collectives.operations import (
    FP32_BYTES,
    MAX_BUFFERS,
    GroupMember,
    PreparedCollective,
    prepare_collective,
)
from calibrate.collectives.process_groups import World, current_world, min_over_ranks, temporary_group
from calibrate.collectives.timing import (
    CollectiveIteration,
    DeviceIterationTimer,
    HostIterationTimer,
    IterationTimer,
    time_collective,
)
from calibrate.devices.device import TorchDevice
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, Seconds, format_bytes
from clustersim.cost.calibration_record import CollectiveCall, CollectiveSample
from clustersim.program.task import CollectiveType

T = TypeVar("T")

_CHECK_SHARD_BYTES: Final = 1000 * FP32_BYTES  # bytes of each member's shard in a verification
_USABLE_MEMORY_FRACTION: Final = 0.8  # fraction of the free memory


@dataclass(frozen=True, slots=True)
class SkippedCall:
    """A call that was not measured, and why."""

    call: CollectiveCall
    reason: str


def sweep_collectives(
    calls: Sequence[CollectiveCall], device: TorchDevice, *, budget: Seconds | None, max_seconds_per_call: Seconds
) -> Iterator[CollectiveSample | SkippedCall]:
    """Measure calls, in the order of their groups; every rank gets the same results.

    device: of this rank's data; budget: seconds for all calls; max_seconds_per_call: for each. Raises InputError
    where a collective gives a wrong result.
    """
    world = current_world()
    deadline = None if budget is None else perf_counter() + budget
    remaining_count = len(calls)
    for (ranks, nodes), group_calls in _calls_by_group_shape(calls).items():
        groups = world.disjoint_groups(ranks, nodes)
        if not groups:
            yield from (SkippedCall(call, _does_not_fit_reason(call, world)) for call in group_calls)
            remaining_count -= len(group_calls)
            continue
        with temporary_group(groups) as handle:
            bench = _CollectiveBench(world, device, _group_member(handle, groups, world, device))
            for call in group_calls:
                max_seconds = (
                    max_seconds_per_call
                    if deadline is None
                    else min(
                        max_seconds_per_call,
                        min_over_ranks((deadline - perf_counter()) / remaining_count, device.torch),
                    )
                )
                yield bench.measure(call, max_seconds)
                remaining_count -= 1


def prepared_iterations(
    calls: Sequence[CollectiveCall], device: TorchDevice
) -> Iterator[tuple[CollectiveCall, CollectiveIteration | SkippedCall]]:
    """Prepared iterations of calls, in the order of their groups, each valid until the next; or why there is none."""
    world = current_world()
    for (ranks, nodes), group_calls in _calls_by_group_shape(calls).items():
        groups = world.disjoint_groups(ranks, nodes)
        if not groups:
            yield from ((call, SkippedCall(call, _does_not_fit_reason(call, world))) for call in group_calls)
            continue
        with temporary_group(groups) as handle:
            bench = _CollectiveBench(world, device, _group_member(handle, groups, world, device))
            for call in group_calls:
                yield call, bench.prepare_checked(call)


def _calls_by_group_shape(calls: Sequence[CollectiveCall]) -> dict[tuple[int, int], list[CollectiveCall]]:
    calls_by_shape: dict[tuple[int, int], list[CollectiveCall]] = {}
    for call in calls:
        calls_by_shape.setdefault((call.ranks, call.nodes), []).append(call)
    return calls_by_shape


def _does_not_fit_reason(call: CollectiveCall, world: World) -> str:
    return f"{_group_label(call)} do not fit the {world.world_size} processes on {_format_nodes(world.node_count)}"


def _collective_label(call: CollectiveCall) -> str:
    return call.collective.value if call.dtype is DType.FP32 else f"{call.collective.value} in {call.dtype.value}"


def _group_label(call: CollectiveCall) -> str:
    return f"{call.ranks} ranks on {_format_nodes(call.nodes)}"


def _format_nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _group_member(
    handle: Any, groups: Sequence[tuple[int, ...]], world: World, device: TorchDevice
) -> GroupMember | None:
    """Membership of the calling rank in the group that it belongs to."""
    group_ranks = next((ranks for ranks in groups if world.rank in ranks), None)
    return (
        None if group_ranks is None else GroupMember(handle, group_ranks, group_ranks.index(world.rank), device.torch)
    )


@dataclass(slots=True)
class _CollectiveBench:
    """Calls of one group shape on one rank; member: None where the rank belongs to no group."""

    world: World
    device: TorchDevice
    member: GroupMember | None
    checked: set[tuple[CollectiveType, DType, tuple[float, ...]]] = field(default_factory=set)

    def measure(self, call: CollectiveCall, max_seconds: Seconds) -> CollectiveSample | SkippedCall:
        """The sample of a call, or why it is skipped."""
        if max_seconds <= 0.0:
            return SkippedCall(call, "the time budget was spent; the same command with the same record continues")
        iteration = self.prepare_checked(call)
        if isinstance(iteration, SkippedCall):
            return iteration
        return CollectiveSample(call, time_collective(iteration, self._timer(), self.device.torch, max_seconds))

    def prepare_checked(self, call: CollectiveCall) -> CollectiveIteration | SkippedCall:
        """A call with its buffers and a verified result, or why it is skipped."""
        if call.collective is CollectiveType.SEND_RECV and call.ranks != 2:
            return SkippedCall(call, f"send_recv has 2 ranks, not {call.ranks}")
        required_bytes, free_bytes = MAX_BUFFERS * call.payload * call.max_share, self._free_bytes()
        if required_bytes > _USABLE_MEMORY_FRACTION * free_bytes:
            return SkippedCall(
                call, f"{format_bytes(required_bytes)} of memory a process; {format_bytes(free_bytes)} are free"
            )
        iteration = self._iteration(call) if self._verify_result(call) else None
        if iteration is None:
            return SkippedCall(call, f"{format_bytes(required_bytes)} of memory for each process could not be had")
        return iteration

    def _free_bytes(self) -> Bytes:
        """Memory that each process may use; processes on one CPU share it."""
        process_count = 1 if self.device.torch.type == "cuda" else self.world.ranks_per_node
        return min_over_ranks((self.device.free_bytes() or math.inf) / process_count, self.device.torch)

    def _iteration(self, call: CollectiveCall) -> CollectiveIteration | None:
        """The call with its buffers; None where some rank has no memory for them."""
        collective = self._on_all_ranks(lambda: self._prepare_local(call, call.payload))
        return None if collective is None else collective.iteration

    def _verify_result(self, call: CollectiveCall) -> bool:
        """Raise InputError where a result is wrong in any group; returns whether there was memory to verify it."""
        key = call.collective, call.dtype, call.shares
        if key in self.checked:
            return True
        collective = self._on_all_ranks(lambda: self._prepare_local(call, _CHECK_SHARD_BYTES * call.ranks))
        is_correct = None if collective is None else self._on_all_ranks(lambda: _run_and_verify(collective))
        if is_correct is None:
            return False
        if min_over_ranks(float(is_correct), self.device.torch) < 1.0:
            raise InputError(f"{_collective_label(call)} of {_group_label(call)} gave a wrong result")
        self.checked.add(key)
        return True

    def _prepare_local(self, call: CollectiveCall, payload: Bytes) -> PreparedCollective:
        return (
            _NO_OP_COLLECTIVE
            if self.member is None
            else prepare_collective(call.collective, self.member.with_format(call.dtype, call.shares), payload)
        )

    def _on_all_ranks(self, build: Callable[[], T]) -> T | None:
        """What each rank builds; None on all ranks where any of them runs out of memory.

        So no rank waits in a collective for one that never enters it.
        """
        result: T | None = None
        try:
            result = build()
        except (RuntimeError, MemoryError) as error:
            if not self.device.is_out_of_memory(error):
                raise
        return None if min_over_ranks(float(result is not None), self.device.torch) < 1.0 else result

    def _timer(self) -> IterationTimer:
        if self.device.torch.type == "cuda":
            return DeviceIterationTimer(self.device.torch)
        return HostIterationTimer(has_shared_clock=self.world.node_count == 1)


_NO_OP_COLLECTIVE: Final = PreparedCollective(
    CollectiveIteration(lambda: None, lambda: None), None, lambda: torch.empty(0)
)


def _run_and_verify(collective: PreparedCollective) -> bool:
    collective.iteration.prepare()
    collective.iteration.run()
    return collective.is_correct
