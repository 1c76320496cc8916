"""Which part of a trace do some of its classes of ranks have? What is analysed class by class fits in memory so."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.results.trace_table import BLOCK_EVENTS, TraceTable
from clustersim.trace.trace import ContentionDelays, Trace


def class_blocks(table: TraceTable) -> Iterator[TraceTable]:
    """The table, some consecutive classes at a time, with about `BLOCK_EVENTS` events."""
    if len(table.trace) <= BLOCK_EVENTS:
        yield table
        return
    task_counts = np.array([len(program.tasks) for program in table.program.programs])
    event_counts = np.cumsum(task_counts[table.program.program_index[table.ranks]])
    block = event_counts // BLOCK_EVENTS
    for index in np.unique(block).tolist():
        yield select_classes(table, block == index)


def select_classes(table: TraceTable, is_selected: BoolArray) -> TraceTable:
    """The table restricted to some classes. is_selected: [classes]."""
    ranks = table.ranks[is_selected]
    events = _events_of_ranks(table.trace, ranks)
    class_of_rank = np.full(len(table.class_of_rank), -1)
    class_of_rank[ranks] = np.arange(len(ranks))
    return replace(
        table,
        trace=_select_events(table.trace, events),
        ranks=ranks,
        weights=table.weights[is_selected],
        class_of_rank=class_of_rank,
    )


def _events_of_ranks(trace: Trace, ranks: IntArray) -> IntArray:
    """Events of some simulated ranks: columns of all events are compared, never converted."""
    near = np.flatnonzero((trace.rank >= ranks.min()) & (trace.rank <= ranks.max()))
    events: IntArray = near[np.isin(trace.rank[near], ranks)]
    return events


def _select_events(trace: Trace, events: IntArray) -> Trace:
    """The trace restricted to all events of some ranks; events of dropped ranks are no longer predecessors."""
    event_position, entry = trace.contention.lookup(events)
    contention = ContentionDelays(
        event_position,
        trace.contention.operation[entry],
        trace.contention.exposed_delay[entry],
        trace.contention.transfer_delay[entry],
    )
    blocking_event = _positions(events, trace.blocking_event[events])
    return Trace(
        rank=trace.rank[events],
        task=trace.task[events],
        stream=trace.stream[events],
        ready=trace.ready[events],
        start=trace.start[events],
        end=trace.end[events],
        waited=trace.waited[events],
        slowed=trace.slowed[events],
        contention=contention,
        critical_predecessor=_positions(events, trace.critical_predecessor[events]),
        blocking_event=np.where(blocking_event >= 0, blocking_event, np.arange(len(events))),
        representative=trace.representative,
    )


def _positions(events: IntArray, searched: IntArray) -> IntArray:
    """Positions of the searched events among ascending ones; -1 where they are not among them."""
    position = np.minimum(np.searchsorted(events, searched), len(events) - 1)
    return np.where(events[position] == searched, position, -1)
