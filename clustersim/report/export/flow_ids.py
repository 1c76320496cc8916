"""Which spans of a trace belong together? Those of one message, and those of one collective.

A message is named by its pair's role, its sender and its tag; a collective by its group and its place among the
collectives of the role that each member runs, which is the same for all of them. Only what has two ends among the ranks
that are written has a number: a trace viewer draws an arrow from each span of a number to the next one.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.program.program import ProcessGroups, Program
from clustersim.program.task import ComputeTask, ReceiveTask, SendTask, Task
from clustersim.report.export.span_descriptions import Label
from clustersim.report.export.span_table import Spans

NONE: Final = 0
"""The number of what belongs to nothing."""
_PLACES: Final = 1 << 14  # operations of a block
_EVENTS: Final = 1 << 22  # messages, or tasks of a program


class Flows:
    """Numbers of the messages and collectives among some ranks."""

    def __init__(self, program: Program, ranks: Sequence[int]) -> None:
        written = np.zeros(program.world_size, dtype=np.bool_)
        written[list(ranks)] = True
        ends = [_ends(groups, written) for groups in program.groups.values()]
        self._groups = np.array(ends).reshape(-1, program.world_size)
        self._roles = {role: number for number, role in enumerate(program.groups)}
        self._kind = program.program_index
        tags = (
            task.tag
            for rank_program in program.programs
            for task in rank_program.tasks
            if isinstance(task, SendTask | ReceiveTask)
        )
        self._tags = {tag: number for number, tag in enumerate(dict.fromkeys(tags))}
        self._events = [np.array([*self._numbered(item.tasks)]) for item in program.programs]

    def of(self, rank: int, spans: Spans) -> IntArray:
        """[spans] the numbers of a rank's spans."""
        end = np.array([self._end(label) for label in spans.labels])[spans.label]
        group = np.where(end >= 0, self._groups[end, rank], -1)
        event = np.where(spans.alone, self._events[int(self._kind[rank])][spans.task], spans.task)
        number = ((group * len(self._roles) + end // 2) * _EVENTS + event) * _PLACES + spans.operation + 1
        return np.where(group >= 0, 1 + number, NONE)

    def _end(self, label: Label) -> int:
        """The row of `_groups` for an exchange: of those that send or gather, or of those that receive; -1 for none."""
        return -1 if label.exchange is None else 2 * self._roles[label.exchange.comm_group] + (label.kind == "receive")

    def _numbered(self, tasks: Sequence[Task]) -> Iterator[int]:
        """For each task the number of its message, or how many collectives of its role came before."""
        counts: dict[str, int] = {}
        for task in tasks:
            if isinstance(task, SendTask | ReceiveTask):
                yield self._tags[task.tag]
            elif isinstance(task, ComputeTask):
                yield 0
            else:
                role = task.comm_op.comm_group
                yield counts.setdefault(role, 0)
                counts[role] += 1


def _ends(groups: ProcessGroups, written: np.ndarray) -> list[IntArray]:
    """For each rank the group that it is in (sends in, receives in), or -1 where no two members are written."""
    members = np.append(written[groups.members].sum(axis=1), 0)
    places = (0, 1) if groups.ordered else (None, None)
    rows = (groups.group_indices(len(written), member_index=place) for place in places)
    return [np.where(members[row] > 1, row, -1) for row in rows]
