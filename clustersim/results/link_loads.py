"""Link loads over time: how many bytes does each link carry, and when?

As in `network_utilization`, for single links, with comm ops inside segments at the times of their own
operations: the bytes of a collective or message are spread uniformly over its span, over all groups,
including those of ranks that were not simulated. A byte counts once for every link that it passes. What a
link carries over all bins equals the bytes of the flows on it, to rounding.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.table import Column, ColumnType, Schema, Table
from clustersim.common.units import Seconds
from clustersim.hardware.topology import Fabric, LinkInfo
from clustersim.program.task import CommOp, ComputeTask, HostOp, ReceiveTask
from clustersim.results.link_volumes import VolumeModel
from clustersim.results.trace_table import TraceTable
from clustersim.results.transfer_events import spread_over_time
from clustersim.trace.trace import OperationSpans

_LINK_ATTRIBUTES: Final = ("source", "target", "tier", "bandwidth")
MAX_ENTRIES: Final = 50_000_000
"""Maximum number of table entries: 400 MB."""

LINK_COLUMNS: Final[Schema] = {
    "source": Column(ColumnType.TEXT, "where the link begins"),
    "target": Column(ColumnType.TEXT, "where it ends"),
    "tier": Column(ColumnType.TEXT, "kind of link"),
    "bandwidth": Column(ColumnType.NUMBER, "bytes per second that it can carry, in this direction"),
    "start": Column(ColumnType.NUMBER, "seconds at which the bin begins"),
    "end": Column(ColumnType.NUMBER, "seconds at which it ends"),
    "bytes": Column(ColumnType.NUMBER, "bytes on the link in the bin"),
}


@dataclass(frozen=True, slots=True, eq=False)
class LinkLoads:
    """Bytes on links over time.

    links: [links] with names; bin_edges: [bins + 1] seconds; bytes_by_bin: [links, bins] bytes.
    """

    links: tuple[LinkInfo, ...]
    bin_edges: FloatArray
    bytes_by_bin: FloatArray

    @property
    def byte_rates(self) -> FloatArray:
        """Bytes per second of each link in each bin: [links, bins]."""
        rate: FloatArray = self.bytes_by_bin / np.diff(self.bin_edges)
        return rate

    @property
    def total_bytes(self) -> FloatArray:
        """Total bytes on each link: [links]."""
        total: FloatArray = self.bytes_by_bin.sum(axis=1)
        return total

    @property
    def table(self) -> Table:
        """A row for every link and bin, link by link. Columns: `LINK_COLUMNS`."""
        ends = [(link.source, link.target, link.kind.value, link.bandwidth) for link in self.links]
        links = Table.from_rows({name: LINK_COLUMNS[name] for name in _LINK_ATTRIBUTES}, ends)
        link_count, bin_count = self.bytes_by_bin.shape
        return Table(
            LINK_COLUMNS,
            {
                **{name: np.repeat(column, bin_count) for name, column in links.items()},
                "start": np.tile(self.bin_edges[:-1], link_count),
                "end": np.tile(self.bin_edges[1:], link_count),
                "bytes": self.bytes_by_bin.ravel(),
            },
        )


@dataclass(frozen=True, slots=True, eq=False)
class TrafficSource:
    """A run that puts bytes on links.

    volumes: link volumes of its comm ops; operation_spans: spans of single operations inside segments of a rank.
    """

    trace_table: TraceTable
    volumes: VolumeModel
    operation_spans: Callable[[int], OperationSpans]

    def transfers(self) -> "Iterator[_CommOpRuns]":
        """All its transfers."""
        for rank in self.trace_table.ranks.tolist():
            yield from _rank_transfers(self, rank, self.operation_spans(rank))


@dataclass(frozen=True, slots=True, eq=False)
class _CommOpRuns:
    """Runs of a comm op by a simulated rank, with their times."""

    source: TrafficSource
    rank: int
    comm_op: CommOp
    start: FloatArray
    end: FloatArray


def compute_link_loads(
    sources: Sequence[TrafficSource], fabric: Fabric, *, links: Sequence[tuple[str, str]], bin_count: int
) -> LinkLoads:
    """Bytes on some links, named by their ends (none: all that carry any), in equal bins of the first run.

    Raises InputError for links that do not exist, and for more than `MAX_ENTRIES` table entries.
    """
    if bin_count < 1:
        raise InputError(f"bins: {bin_count}; 1 is the fewest")
    link_ids = [fabric.find_link(*ends) for ends in links]
    op_runs = [runs for source in sources for runs in source.transfers()]
    selected = np.array(link_ids, np.int64) if link_ids else _loaded_links(op_runs, len(fabric.links.kind))
    if len(selected) * bin_count > MAX_ENTRIES:
        raise InputError(
            f"{len(selected):,} links in {bin_count:,} bins are too many; name some links, or ask for fewer bins"
        )
    position = np.full(len(fabric.links.kind), -1)
    position[selected] = np.arange(len(selected))
    makespan, total = sources[0].trace_table.trace.makespan, np.zeros((len(selected), bin_count))
    bin_width = makespan / bin_count
    for runs in op_runs:
        link, amount = _link_entries(runs)
        is_selected = position[link] >= 0
        if is_selected.any():
            loads = np.bincount(position[link[is_selected]], amount[is_selected], minlength=len(selected))
            over_time = spread_over_time(*_clip_runs(runs, makespan), bin_width, bin_count)
            total[loads > 0.0] += loads[loads > 0.0, None] * over_time
    return LinkLoads(
        tuple(map(fabric.link_info, selected.tolist())), bin_width * np.arange(bin_count + 1, dtype=np.float64), total
    )


def _clip_runs(op_runs: _CommOpRuns, duration: Seconds) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Starts and ends of runs clipped to [0, duration], and the fraction of each that lies inside."""
    start, end = np.clip(op_runs.start, 0.0, duration), np.clip(op_runs.end, 0.0, duration)
    is_inside = (op_runs.start >= 0.0) & (op_runs.end <= duration)
    has_duration = op_runs.end > op_runs.start
    fraction = np.divide(end - start, op_runs.end - op_runs.start, out=is_inside.astype(np.float64), where=has_duration)
    return start, end, fraction


def _rank_transfers(source: TrafficSource, rank: int, spans: OperationSpans) -> Iterator[_CommOpRuns]:
    """Comm ops of a simulated rank, as tasks and inside segments."""
    rows = source.trace_table
    trace, tasks = rows.trace, rows.program.programs[int(rows.program.program_index[rank])].tasks
    events = trace.rank_events(rank)
    task_ops: dict[CommOp, list[int]] = {}
    for event, task in (
        (event, tasks[task_id]) for event, task_id in zip(events.tolist(), trace.task[events].tolist(), strict=True)
    ):
        if not isinstance(task, ComputeTask | ReceiveTask) and not isinstance(task.comm_op, HostOp):
            task_ops.setdefault(task.comm_op, []).append(event)
    for comm_op, indices in task_ops.items():
        yield _CommOpRuns(source, rank, comm_op, trace.start[indices], trace.end[indices])
    segment_ops: dict[CommOp, list[int]] = {}
    for span, (task, operation) in enumerate(zip(spans.task.tolist(), spans.operation.tolist(), strict=True)):
        compute_task = tasks[task]
        operation_comm = (
            compute_task.segment.operations[operation].comm_op if isinstance(compute_task, ComputeTask) else None
        )
        if operation_comm is not None and not isinstance(operation_comm, HostOp):
            segment_ops.setdefault(operation_comm, []).append(span)
    for comm_op, indices in segment_ops.items():
        yield _CommOpRuns(source, rank, comm_op, spans.start[indices], spans.end[indices])


def _link_entries(op_runs: _CommOpRuns) -> tuple[IntArray, FloatArray]:
    """Link ids (possibly repeated) and bytes of one run, in the groups whose first members the rank represents."""
    rows, link_volumes = op_runs.source.trace_table, op_runs.source.volumes.link_volumes(op_runs.comm_op)
    first_members = rows.program.groups[op_runs.comm_op.comm_group].members[:, 0]
    is_represented = rows.trace.representative[first_members][link_volumes.group_index] == op_runs.rank
    return link_volumes.link_id[is_represented], link_volumes.fraction[is_represented] * op_runs.comm_op.payload


def _loaded_links(op_runs: Iterable[_CommOpRuns], link_count: int) -> IntArray:
    """Links that carry anything."""
    is_loaded = np.zeros(link_count, np.bool_)
    for runs in op_runs:
        is_loaded[_link_entries(runs)[0]] = True
    return np.flatnonzero(is_loaded)
