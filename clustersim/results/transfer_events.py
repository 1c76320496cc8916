"""Data-moving trace events: which events transfer how many bytes, and when?

Comm ops of one process-group kind with the same link loads up to their payload form one `CommVolume`. The
traffic of a symmetry class of ranks is that of the groups whose first members (for messages, the senders)
are in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.hardware.topology import LINK_KINDS, Fabric
from clustersim.parallel.mesh import COMM_GROUPS
from clustersim.program.task import CommOp, ReceiveTask
from clustersim.results.link_volumes import LinkVolumes, VolumeModel
from clustersim.results.trace_table import TraceTable


@dataclass(frozen=True, slots=True, eq=False)
class CommVolume:
    """All comm ops of one process-group kind with the same link loads, up to their payloads.

    class_of_group: [groups] symmetry class of each group; item_payload: [items] payload bytes of one run of
    each segment or comm op; class_bytes: [classes] payload bytes per step.
    """

    axis: str
    link_volumes: LinkVolumes
    class_of_group: IntArray
    item_payload: FloatArray
    class_bytes: FloatArray

    def bytes_per_step(self, fractions: FloatArray) -> FloatArray:
        """Bytes per step of what each group carries, given as fractions of its payload: [groups, ..] both."""
        bytes_by_group = self.class_bytes[self.class_of_group]
        return fractions * (bytes_by_group if fractions.ndim == 1 else bytes_by_group[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class TransferEvents:
    """Trace events that may move data.

    rank_class: [events] symmetry class; item: [events] segment index, or comm-op index offset by the number of
    segments.
    """

    rank_class: IntArray
    item: IntArray
    start: FloatArray
    end: FloatArray


def find_transfers(table: TraceTable) -> TransferEvents:
    """Events of segments with comm ops, of collectives and of messages (counted at the sender)."""
    trace, has_comm = table.trace, [bool(segment.comm_ops) for segment in table.segments]
    is_receive = [isinstance(task, ReceiveTask) for program in table.program.programs for task in program.tasks]
    in_segment = np.array([*has_comm, False])[table.tasks.segment]
    is_comm_task = (table.tasks.comm_op >= 0) & ~np.array(is_receive, dtype=np.bool_)
    events = np.flatnonzero((in_segment | is_comm_task)[table.entries_of(slice(None))])
    items = np.where(table.tasks.segment >= 0, table.tasks.segment, len(has_comm) + table.tasks.comm_op)
    item = items[table.entries_of(events)]
    return TransferEvents(table.classes_of(events), item, trace.start[events], trace.end[events])


def collect_comm_volumes(table: TraceTable, transfers: TransferEvents, volumes: VolumeModel) -> Iterator[CommVolume]:
    """Traffic by process-group kind and by link-load pattern."""
    class_count, item_count = len(table.ranks), len(table.segments) + len(table.comm_ops)
    run_counts = np.bincount(
        transfers.rank_class * item_count + transfers.item, minlength=class_count * item_count
    ).reshape(class_count, item_count)
    class_of_rank = np.searchsorted(table.ranks, table.trace.representative)
    payloads: dict[tuple[str, LinkVolumes], FloatArray] = {}
    for item in np.flatnonzero(run_counts.any(axis=0)).tolist():
        for comm_op in _item_comm_ops(table, item):
            key = comm_op.comm_group, volumes.link_volumes(comm_op)
            payloads.setdefault(key, np.zeros(item_count))[item] += comm_op.payload
    for (comm_group, link_volumes), payload in payloads.items():
        if link_volumes.sent_fraction.any():
            first_members = table.program.groups[comm_group].members[:, 0]
            yield CommVolume(
                COMM_GROUPS[comm_group].report_name,
                link_volumes,
                class_of_rank[first_members],
                payload,
                run_counts @ payload / table.step_count,
            )


def _item_comm_ops(table: TraceTable, item: int) -> tuple[CommOp, ...]:
    """The comm ops of one run of a segment, or the single comm op."""
    segment_count = len(table.segments)
    return table.segments[item].comm_ops if item < segment_count else (table.comm_ops[item - segment_count],)


def bytes_by_link_kind(
    table: TraceTable, fabric: Fabric, transfers: TransferEvents, comm_volumes: list[CommVolume], bin_count: int
) -> FloatArray:
    """Bytes on links of each kind over time: [LINK_KINDS, bins]."""
    kind_count, class_count = len(LINK_KINDS), len(table.ranks)
    amount = np.zeros((kind_count, len(transfers.item)))
    for comm_volume in comm_volumes:
        link_volumes = comm_volume.link_volumes
        cell = (
            comm_volume.class_of_group[link_volumes.group_index] * kind_count + fabric.links.kind[link_volumes.link_id]
        )
        loads = np.bincount(cell, link_volumes.fraction, minlength=class_count * kind_count).reshape(
            class_count, kind_count
        )
        selected = np.flatnonzero(comm_volume.item_payload[transfers.item])
        amount[:, selected] += (
            loads[transfers.rank_class[selected]].T * comm_volume.item_payload[transfers.item[selected]]
        )
    bin_width = table.trace.makespan / bin_count
    return np.stack(
        [spread_over_time(transfers.start, transfers.end, amounts, bin_width, bin_count) for amounts in amount]
    )


def spread_over_time(
    start: FloatArray, end: FloatArray, amount: FloatArray, bin_width: Seconds, bin_count: int
) -> FloatArray:
    """Distribute amounts uniformly over their spans and sum what falls into each bin: [bins].

    >>> spread_over_time(np.array([0.5]), np.array([2.5]), np.array([8.0]), 1.0, 4)
    array([2., 4., 2., 0.])
    """
    first_bin, last_bin = (np.clip((time / bin_width).astype(np.int64), 0, bin_count - 1) for time in (start, end))
    rate = np.divide(amount, end - start, out=np.zeros_like(amount), where=last_bin > first_bin)
    total = np.bincount(
        first_bin,
        np.where(last_bin > first_bin, rate * ((first_bin + 1) * bin_width - start), amount),
        minlength=bin_count,
    )
    total += np.bincount(last_bin, rate * (end - last_bin * bin_width), minlength=bin_count)
    change = np.bincount(np.minimum(first_bin + 1, last_bin), rate, minlength=bin_count + 1)
    change -= np.bincount(last_bin, rate, minlength=bin_count + 1)
    binned: FloatArray = total + np.cumsum(change)[:bin_count] * bin_width
    return np.maximum(binned, 0.0)
