"""How many bytes does each link carry, and when?

As in `network`, for single links, with exchanges inside blocks at the times of their own operations: the bytes of a
collective or message are spread evenly over its span, over all groups, also of ranks that were not simulated. A byte
counts once for every link that it passes. What a link carries over all bins is what flows put on it, to rounding.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.hardware.topology import Fabric, LinkInfo
from clustersim.program.task import CommOp, ComputeTask, HostOp, ReceiveTask
from clustersim.results.link_volumes import Volumes
from clustersim.results.trace_table import Rows
from clustersim.results.transfer_events import spread_over_time
from clustersim.trace.trace import OperationSpans

MOST: Final = 50_000_000
"""Numbers of a table: 400 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class LinkLoads:
    """Bytes on links over time. links: [links] as people know them; edges: [bins + 1] s; moved: [links, bins] bytes."""

    links: tuple[LinkInfo, ...]
    edges: FloatArray
    moved: FloatArray

    @property
    def rate(self) -> FloatArray:
        """Bytes per second of each link in each bin: [links, bins]."""
        rate: FloatArray = self.moved / np.diff(self.edges)
        return rate

    @property
    def carried(self) -> FloatArray:
        """Bytes that each link carries in all: [links]."""
        total: FloatArray = self.moved.sum(axis=1)
        return total

    def columns(self) -> dict[str, Any]:
        """A table with a row for each link and bin, as a data frame takes it: seconds, names, bytes per second."""
        bins = len(self.edges) - 1
        named = {
            "source": [link.source for link in self.links],
            "target": [link.target for link in self.links],
            "kind": [link.kind.value for link in self.links],
            "bandwidth": [link.bandwidth for link in self.links],
        }
        return {
            **{name: np.repeat(np.array(values), bins) for name, values in named.items()},
            "start": np.tile(self.edges[:-1], len(self.links)),
            "end": np.tile(self.edges[1:], len(self.links)),
            "bytes_per_second": self.rate.reshape(-1),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Sender:
    """A run that puts bytes on links. volumes: knows how many and where; operations: those inside blocks of a rank."""

    rows: Rows
    volumes: Volumes
    operations: Callable[[int], OperationSpans]

    def moved(self) -> "Iterator[_Moved]":
        """All that it moves."""
        for rank in self.rows.ranks.tolist():
            yield from _of_rank(self, rank, self.operations(rank))


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """Runs of an exchange by a simulated rank: when."""

    sender: Sender
    rank: int
    exchange: CommOp
    start: FloatArray
    end: FloatArray


def link_loads(senders: Sequence[Sender], fabric: Fabric, *, links: Sequence[tuple[str, str]], bins: int) -> LinkLoads:
    """Bytes on some links, named by their ends (none: all that carry any), in bins of equal length of the first run.

    Raises InputError for links that are not there, and for more than `MOST` numbers.
    """
    if bins < 1:
        raise InputError(f"bins: {bins}; 1 is the fewest")
    named = [fabric.find_link(*ends) for ends in links]
    moved = [item for sender in senders for item in sender.moved()]
    chosen = np.array(named, np.int64) if named else _loaded(moved, len(fabric.links.kind))
    if len(chosen) * bins > MOST:
        raise InputError(f"{len(chosen):,} links in {bins:,} bins are too many; name some links, or ask for fewer bins")
    place = np.full(len(fabric.links.kind), -1)
    place[chosen] = np.arange(len(chosen))
    whole, total = senders[0].rows.trace.makespan, np.zeros((len(chosen), bins))
    width = whole / bins
    for element in moved:
        link, amount = _entries(element)
        mine = place[link] >= 0
        if mine.any():
            loads = np.bincount(place[link[mine]], amount[mine], minlength=len(chosen))
            over_time = spread_over_time(*_within(element, whole), width, bins)
            total[loads > 0.0] += loads[loads > 0.0, None] * over_time
    return LinkLoads(
        tuple(map(fabric.link_info, chosen.tolist())), width * np.arange(bins + 1, dtype=np.float64), total
    )


def _within(moved: _Moved, whole: Seconds) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Starts and ends of runs as far as they are within so many seconds, and the part of each that is."""
    start, end = np.clip(moved.start, 0.0, whole), np.clip(moved.end, 0.0, whole)
    at_once = (moved.start >= 0.0) & (moved.end <= whole)
    lasts = moved.end > moved.start
    part = np.divide(end - start, moved.end - moved.start, out=at_once.astype(np.float64), where=lasts)
    return start, end, part


def _of_rank(sender: Sender, rank: int, inside: OperationSpans) -> Iterator[_Moved]:
    """Exchanges of a simulated rank, on streams of their own and inside blocks."""
    rows = sender.rows
    trace, tasks = rows.trace, rows.program.programs[int(rows.program.program_index[rank])].tasks
    own = trace.rank_events(rank)
    outside: dict[CommOp, list[int]] = {}
    for row, task in ((row, tasks[number]) for row, number in zip(own.tolist(), trace.task[own].tolist(), strict=True)):
        if not isinstance(task, ComputeTask | ReceiveTask) and not isinstance(task.comm_op, HostOp):
            outside.setdefault(task.comm_op, []).append(row)
    for exchange, found in outside.items():
        yield _Moved(sender, rank, exchange, trace.start[found], trace.end[found])
    between: dict[CommOp, list[int]] = {}
    for span, (task, operation) in enumerate(zip(inside.task.tolist(), inside.operation.tolist(), strict=True)):
        block = tasks[task]
        does = block.segment.operations[operation].comm_op if isinstance(block, ComputeTask) else None
        if does is not None and not isinstance(does, HostOp):
            between.setdefault(does, []).append(span)
    for exchange, found in between.items():
        yield _Moved(sender, rank, exchange, inside.start[found], inside.end[found])


def _entries(moved: _Moved) -> tuple[IntArray, FloatArray]:
    """What one run puts on links, in the groups whose first members the rank stands for: links, a few twice, bytes."""
    rows, carried = moved.sender.rows, moved.sender.volumes.carried(moved.exchange)
    first = rows.program.groups[moved.exchange.comm_group].members[:, 0]
    mine = rows.trace.representative[first][carried.group] == moved.rank
    return carried.link[mine], carried.share[mine] * moved.exchange.payload


def _loaded(moved: Iterable[_Moved], links: int) -> IntArray:
    """Links that carry anything."""
    loaded = np.zeros(links, np.bool_)
    for item in moved:
        loaded[_entries(item)[0]] = True
    return np.flatnonzero(loaded)
