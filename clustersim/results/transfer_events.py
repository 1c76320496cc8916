"""Which spans of a trace move bytes, how many, and when?

Exchanges of one role that load links alike, up to their payloads, are one `Kind`. What a class of ranks moves is what
the groups move whose first members (of messages, the senders) are in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.hardware.topology import LINK_KINDS, Fabric
from clustersim.parallel.mesh import COMM_GROUPS
from clustersim.program.task import CommOp, ReceiveTask
from clustersim.results.link_volumes import Carried, Volumes
from clustersim.results.trace_table import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """All exchanges of one role that load links alike, up to their payloads.

    owner: [groups] class of each group; payload: [items] bytes of one run of each block or exchange; weights: [classes]
    bytes of payload in a step.
    """

    axis: str
    carried: Carried
    owner: IntArray
    payload: FloatArray
    weights: FloatArray

    def in_step(self, share: FloatArray) -> FloatArray:
        """Bytes in a step of what each group carries in parts of its payload: [groups, ..] both."""
        weights = self.weights[self.owner]
        return share * (weights if share.ndim == 1 else weights[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Rows of a trace that may move bytes. owner: [rows] class; item: [rows] block, or exchange numbered after them."""

    owner: IntArray
    item: IntArray
    start: FloatArray
    end: FloatArray


def moves_of(rows: Rows) -> Moves:
    """Rows that run blocks with exchanges, collectives and messages; these are the sender's."""
    trace, blocks = rows.trace, [bool(block.comm_ops) for block in rows.blocks]
    received = [isinstance(task, ReceiveTask) for program in rows.program.programs for task in program.tasks]
    inside = np.array([*blocks, False])[rows.tasks.block]
    outside = (rows.tasks.exchange >= 0) & ~np.array(received, dtype=np.bool_)
    row = np.flatnonzero((inside | outside)[rows.entry])
    items = np.where(rows.tasks.block >= 0, rows.tasks.block, len(blocks) + rows.tasks.exchange)
    return Moves(rows.owner[row], items[rows.entry[row]], trace.start[row], trace.end[row])


def kinds_of(rows: Rows, moves: Moves, volumes: Volumes) -> Iterator[Kind]:
    """What moves bytes, by role and by how it loads links."""
    classes, items = len(rows.ranks), len(rows.blocks) + len(rows.exchanges)
    runs = np.bincount(moves.owner * items + moves.item, minlength=classes * items).reshape(classes, items)
    owner = np.searchsorted(rows.ranks, rows.trace.representative)
    found: dict[tuple[str, Carried], FloatArray] = {}
    for item in np.flatnonzero(runs.any(axis=0)).tolist():
        for exchange in _exchanges(rows, item):
            key = exchange.comm_group, volumes.carried(exchange)
            found.setdefault(key, np.zeros(items))[item] += exchange.payload
    for (role, carried), payload in found.items():
        if carried.sent.any():
            first = rows.program.groups[role].members[:, 0]
            yield Kind(COMM_GROUPS[role].report_name, carried, owner[first], payload, runs @ payload / rows.steps)


def _exchanges(rows: Rows, item: int) -> tuple[CommOp, ...]:
    """Those of one run of a block or exchange."""
    blocks = len(rows.blocks)
    return rows.blocks[item].comm_ops if item < blocks else (rows.exchanges[item - blocks],)


def bytes_over_time(rows: Rows, fabric: Fabric, moves: Moves, kinds: list[Kind], bins: int) -> FloatArray:
    """Bytes on links of each kind: [LINK_KINDS, bins]."""
    many, classes = len(LINK_KINDS), len(rows.ranks)
    amount = np.zeros((many, len(moves.item)))
    for kind in kinds:
        carried = kind.carried
        place = kind.owner[carried.group] * many + fabric.links.kind[carried.link]
        loads = np.bincount(place, carried.share, minlength=classes * many).reshape(classes, many)
        mine = np.flatnonzero(kind.payload[moves.item])
        amount[:, mine] += loads[moves.owner[mine]].T * kind.payload[moves.item[mine]]
    width = rows.trace.makespan / bins
    return np.stack([spread_over_time(moves.start, moves.end, array, width, bins) for array in amount])


def spread_over_time(start: FloatArray, end: FloatArray, amount: FloatArray, width: Seconds, bins: int) -> FloatArray:
    """Divide amounts evenly over their spans and add up what falls into each bin: [bins].

    >>> spread_over_time(np.array([0.5]), np.array([2.5]), np.array([8.0]), 1.0, 4)
    array([2., 4., 2., 0.])
    """
    low, high = (np.clip((at / width).astype(np.int64), 0, bins - 1) for at in (start, end))
    rate = np.divide(amount, end - start, out=np.zeros_like(amount), where=high > low)
    total = np.bincount(low, np.where(high > low, rate * ((low + 1) * width - start), amount), minlength=bins)
    total += np.bincount(high, rate * (end - high * width), minlength=bins)
    change = np.bincount(np.minimum(low + 1, high), rate, minlength=bins + 1)
    change -= np.bincount(high, rate, minlength=bins + 1)
    within: FloatArray = total + np.cumsum(change)[:bins] * width
    return np.maximum(within, 0.0)
