"""What does each row of a trace stand for?

Rows name a rank and a task; here they are joined with the program, column by column, so that later folds are sums over
arrays. The ranks of one class share the rows of the rank that was simulated for them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clustersim.analysis.parts import PART_OF_ROLE, PIPELINE_ROLES, STAGE_CROSSING_ROLES
from clustersim.cost.block import BlockTiming
from clustersim.program.action import Action, ActionKind
from clustersim.program.program import Program
from clustersim.program.task import Block, Compute, Exchange, Task
from clustersim.trace.store import Trace

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
TimingOf = Callable[[int, Block], BlockTiming]
"""Timing of a block on a rank."""

_FORWARDS = frozenset({ActionKind.FORWARD})
_BACKWARDS = frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT})


@dataclass(frozen=True, slots=True)
class Rows:
    """A trace with the program that it ran, and columns over its rows beside its own.

    ranks: [classes] the simulated ranks; weights: [classes] how many ranks each stands for; owner: [rows] class;
    block, exchange: [rows] index into `blocks`, `exchanges`, -1 where it is the other; part: [rows] place of the
    exchange's exposed part, -1 for blocks; crosses: [rows] its group spans pipeline stages; forward, backward: [rows]
    computes such an action.
    """

    trace: Trace
    program: Program
    ranks: IntArray
    weights: IntArray
    owner: IntArray
    block: IntArray
    exchange: IntArray
    part: IntArray
    crosses: BoolArray
    forward: BoolArray
    backward: BoolArray
    blocks: tuple[Block, ...]
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """All runs of one block on one class. seconds: [pairs] together; runs: [pairs] how many."""

    owner: IntArray
    block: IntArray
    seconds: FloatArray
    runs: IntArray


def staged(program: Program) -> bool:
    """Whether the program has a pipeline."""
    return any(role in program.groups for role in PIPELINE_ROLES)


def read_rows(trace: Trace, program: Program) -> Rows:
    """Join a trace with the program that it ran."""
    ranks, weights = np.unique(trace.representative, return_counts=True)
    kinds = program.kind[trace.rank]
    numbers = _Numbers({}, {})
    columns = np.empty((len(trace), 4), dtype=np.int64)
    for kind in np.unique(kinds):
        chosen = kinds == kind
        table = np.array([numbers.columns(task) for task in program.programs[kind].tasks], dtype=np.int64)
        columns[chosen] = table[trace.task[chosen]]
    block, exchange, forward, backward = columns.T
    exchanges = tuple(numbers.exchanges)
    crossing = STAGE_CROSSING_ROLES if staged(program) else frozenset()
    return Rows(
        trace=trace, program=program,
        ranks=ranks, weights=weights, owner=np.searchsorted(ranks, trace.rank),
        block=block, exchange=exchange, forward=forward > 0, backward=backward > 0,
        part=_of_exchange(exchange, [PART_OF_ROLE[each.group].place for each in exchanges], -1),
        crosses=_of_exchange(exchange, [int(each.group in crossing) for each in exchanges], 0) > 0,
        blocks=tuple(numbers.blocks), exchanges=exchanges,
    )  # fmt: skip


def block_runs(rows: Rows, row: IntArray, seconds: FloatArray) -> BlockRuns:
    """Group those of some trace rows that run blocks by class and block. seconds: how long each of them counts."""
    blocks = rows.block[row] >= 0
    many = max(1, len(rows.blocks))
    pairs, inverse = np.unique((rows.owner[row] * many + rows.block[row])[blocks], return_inverse=True)
    together = np.zeros(len(pairs))
    np.add.at(together, inverse, seconds[blocks])
    return BlockRuns(pairs // many, pairs % many, together, np.bincount(inverse, minlength=len(pairs)))


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers given to blocks and exchanges as they are met."""

    blocks: dict[Block, int]
    exchanges: dict[Exchange, int]

    def columns(self, task: Task) -> tuple[int, int, bool, bool]:
        """A task's block and exchange numbers, and whether it computes forward or backward."""
        if isinstance(task, Compute):
            number = self.blocks.setdefault(task.block, len(self.blocks))
            return number, -1, _is(task.action, _FORWARDS), _is(task.action, _BACKWARDS)
        return -1, self.exchanges.setdefault(task.exchange, len(self.exchanges)), False, False


def _is(action: Action | None, kinds: frozenset[ActionKind]) -> bool:
    return action is not None and action.kind in kinds


def _of_exchange(exchange: IntArray, values: list[int], otherwise: int) -> IntArray:
    """Look values up by exchange number; the last one of the table serves -1."""
    return np.array([*values, otherwise], dtype=np.int64)[exchange]
