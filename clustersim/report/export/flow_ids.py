"""Which spans of a trace are joined by a flow? Those of one message, and those of one collective.

A message is identified by the p2p group of its pair, its sender and its tag; a collective by its process
group and its sequence number among the member's collectives of that kind of group, which is the same on all
members. Only events with two ends among the exported ranks have a flow id: a trace viewer draws arrows
between the spans of one id.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.program.program import ProcessGroups, Program
from clustersim.program.task import ComputeTask, ReceiveTask, SendTask, Task
from clustersim.report.export.span_descriptions import SpanDescription
from clustersim.report.export.span_table import SpanTable

NO_FLOW: Final = 0
"""Flow id of spans without a flow."""
_MAX_OPERATIONS: Final = 1 << 14  # upper bound on the operations of a segment
_MAX_EVENTS: Final = 1 << 22  # upper bound on messages, or on tasks of a program


class FlowIds:
    """Flow ids of the messages and collectives among some ranks."""

    def __init__(self, program: Program, ranks: Sequence[int]) -> None:
        is_written = np.zeros(program.world_size, dtype=np.bool_)
        is_written[list(ranks)] = True
        ends_by_group = [_ranks_by_end(groups, is_written) for groups in program.groups.values()]
        self._group_indices = np.array(ends_by_group).reshape(-1, program.world_size)
        self._comm_group_indices = {comm_group: index for index, comm_group in enumerate(program.groups)}
        self._program_index = program.program_index
        tags = (
            task.tag
            for program in program.programs
            for task in program.tasks
            if isinstance(task, SendTask | ReceiveTask)
        )
        self._tag_indices = {tag: index for index, tag in enumerate(dict.fromkeys(tags))}
        self._event_indices = [np.array([*self._task_event_indices(program.tasks)]) for program in program.programs]

    def flow_ids(self, rank: int, spans: SpanTable) -> IntArray:
        """[spans] flow ids of a rank's spans."""
        end = np.array([self._end_row(label) for label in spans.descriptions])[spans.description]
        group = np.where(end >= 0, self._group_indices[end, rank], -1)
        event = np.where(spans.is_task, self._event_indices[int(self._program_index[rank])][spans.task], spans.task)
        flow_id = (
            ((group * len(self._comm_group_indices) + end // 2) * _MAX_EVENTS + event) * _MAX_OPERATIONS
            + spans.operation
            + 1
        )
        return np.where(group >= 0, 1 + flow_id, NO_FLOW)

    def _end_row(self, description: SpanDescription) -> int:
        """Row of `_group_indices` for a comm op: senders and collectives, or receivers; -1 without a comm op."""
        return (
            -1
            if description.comm_op is None
            else 2 * self._comm_group_indices[description.comm_op.comm_group] + (description.kind == "receive")
        )

    def _task_event_indices(self, tasks: Sequence[Task]) -> Iterator[int]:
        """For each task the index of its message's tag, or the number of earlier collectives of its comm group."""
        counts: dict[str, int] = {}
        for task in tasks:
            if isinstance(task, SendTask | ReceiveTask):
                yield self._tag_indices[task.tag]
            elif isinstance(task, ComputeTask):
                yield 0
            else:
                comm_group = task.comm_op.comm_group
                yield counts.setdefault(comm_group, 0)
                counts[comm_group] += 1


def _ranks_by_end(groups: ProcessGroups, is_written: np.ndarray) -> list[IntArray]:
    """For each rank the group that it is in (sends in, receives in), or -1 if fewer than two members are exported."""
    members = np.append(is_written[groups.members].sum(axis=1), 0)
    positions = (0, 1) if groups.ordered else (None, None)
    group_indices = (groups.group_indices(len(is_written), member_index=position) for position in positions)
    return [np.where(members[group_index] > 1, group_index, -1) for group_index in group_indices]
