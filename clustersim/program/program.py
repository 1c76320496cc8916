"""What does every rank do, and with whom?

Ranks that run the same tasks share one `RankProgram`; `kind[r]` says which. Groups are arrays of ranks by role: for
the role "tp" an array [groups, members]; each rank is in at most one group of a role. Pairs of pipeline neighbours
are ordered groups (sender, receiver): roles "pp_next" and "pp_previous" have one row (r, neighbour of r) for each
sender r, so a rank sends in at most one pair of a role and receives in at most one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.program.loops import Loop, find_loops
from clustersim.program.task import CommOp, ComputeTask, Segment, Stream, Task


@dataclass(frozen=True)
class RankProgram:
    """The tasks of one rank. A task's number is its place in `tasks`; `streams[i]` is the stream of tasks[i].

    Within a stream tasks run in ascending number; `after` may name only smaller numbers.
    """

    tasks: tuple[Task, ...]
    streams: tuple[Stream, ...]

    @cached_property
    def comm_ops(self) -> tuple[CommOp, ...]:
        """Every collective that the rank takes part in, and every message; each once, in the order of the tasks."""
        return _unique_comm_ops((*self.segment_comm_ops, *self.task_comm_ops))

    @cached_property
    def segment_comm_ops(self) -> tuple[CommOp, ...]:
        """Those of blocks, which the compute stream waits for."""
        segments = dict.fromkeys(task.segment for task in self.tasks if isinstance(task, ComputeTask))
        return _unique_comm_ops(comm_op for segment in segments for comm_op in segment.distinct_comm_ops)

    @cached_property
    def task_comm_ops(self) -> tuple[CommOp, ...]:
        """Those that are tasks of their own, on the other streams."""
        return _unique_comm_ops(comm_op for _, comm_op in self.issued_comm_ops)

    @cached_property
    def issued_comm_ops(self) -> tuple[tuple[Stream, CommOp], ...]:
        """On which streams exchanges are tasks of their own, each once on a stream, as far as tasks share them."""
        stream_tasks = zip(self.streams, self.tasks, strict=True)
        issued = {
            (stream, id(task.comm_op)): (stream, task.comm_op)
            for stream, task in stream_tasks
            if not isinstance(task, ComputeTask)
        }
        return tuple(issued.values())

    @cached_property
    def operation_offsets(self) -> tuple[int, ...]:
        """How many operations of its blocks the rank runs before each task, and at the end: in all."""
        counts = (len(task.segment.operations) if isinstance(task, ComputeTask) else 0 for task in self.tasks)
        return tuple(accumulate(counts, initial=0))

    @cached_property
    def task_signatures(self) -> IntArray:
        """Numbers of tasks, equal where they do the same and wait for tasks that are equally far before them: [tasks].

        Messages are alike whatever their tags are.
        """
        body_ids: dict[int, int] = {}
        unique_bodies: dict[Segment | CommOp, int] = {}
        signature_ids: dict[tuple[Stream, int, int | tuple[int, ...]], int] = {}
        signatures: list[int] = []
        for task_id, (stream, task) in enumerate(zip(self.streams, self.tasks, strict=True)):
            body = task.segment if isinstance(task, ComputeTask) else task.comm_op
            body_id = body_ids.get(id(body))  # by identity first, as to hash each of them takes longer
            if body_id is None:
                body_id = body_ids[id(body)] = unique_bodies.setdefault(body, len(unique_bodies))
            depends_on = task.depends_on
            distances = (
                task_id - depends_on[0]
                if len(depends_on) == 1
                else tuple([task_id - dependency for dependency in depends_on])
            )
            signatures.append(signature_ids.setdefault((stream, body_id, distances), len(signature_ids)))
        return np.array(signatures, dtype=np.int64)

    @cached_property
    def loops(self) -> tuple[tuple[Loop, ...], tuple[Loop, ...]]:
        """Where the rank does the same again and again: microbatches and the like, and layers within them."""
        return find_loops(self.task_signatures)

    def step_indices(self, step_count: int) -> IntArray:
        """The step that each task belongs to where the program is `steps` equal steps in a row: [tasks], from 0."""
        return np.arange(len(self.tasks), dtype=np.int64) // (len(self.tasks) // step_count)


def _unique_comm_ops(comm_ops: Iterable[CommOp]) -> tuple[CommOp, ...]:
    """By identity first: tasks share exchanges, and hashing each of them by value takes longer.

    Not sets: their order, in which exchanges would be costed, changes from process to process.
    """
    return tuple(dict.fromkeys({id(comm_op): comm_op for comm_op in comm_ops}.values()))


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """All process groups of one role. members: [groups, size]; ordered: the first member is the sender or root."""

    comm_group: str
    members: IntArray
    ordered: bool = False

    def group_indices(self, rank_count: int, *, member_index: int | None = None) -> IntArray:
        """For each of `ranks` ranks the group it is in, or -1: [ranks]. place: only as this member (ordered pairs)."""
        group_indices = np.full(rank_count, -1, dtype=np.int64)
        indices = np.arange(len(self.members))
        if member_index is None:
            group_indices[self.members] = indices[:, None]
        else:
            group_indices[self.members[:, member_index]] = indices
        return group_indices


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoads:
    """How many times as many rows as the mean come to each rank's experts: [numbers, ranks], by layer.

    each: numbers that every step has of its own; 0: all steps share them.
    """

    factors: FloatArray
    loads_per_step: int = 0


BALANCED_LOADS: Final = ExpertLoads(np.zeros((0, 0)))
"""No rank has more than another."""


@dataclass(frozen=True)
class Program:
    """kind: [ranks] index into `programs`; groups by role; loads: of ranks' experts, where these differ."""

    programs: tuple[RankProgram, ...]
    program_index: IntArray
    groups: Mapping[str, ProcessGroups]
    expert_loads: ExpertLoads = BALANCED_LOADS

    @property
    def world_size(self) -> int:
        """World size."""
        return len(self.program_index)

    @cached_property
    def comm_ops(self) -> tuple[CommOp, ...]:
        """Every collective and message of any rank, sorted: what costs remember may depend on what is asked first."""
        comm_ops = dict.fromkeys(comm_op for rank_program in self.programs for comm_op in rank_program.comm_ops)
        return tuple(
            sorted(
                comm_ops,
                key=lambda comm_op: (
                    comm_op.comm_group,
                    comm_op.name,
                    comm_op.collective.value,
                    comm_op.payload,
                    comm_op.load_index or 0,
                ),
            )
        )

    @cached_property
    def segment_comm_ops(self) -> frozenset[CommOp]:
        """Those that are in some rank's blocks."""
        return frozenset(comm_op for rank_program in self.programs for comm_op in rank_program.segment_comm_ops)

    @cached_property
    def task_comm_ops(self) -> frozenset[CommOp]:
        """Those that are tasks of some rank."""
        return frozenset(comm_op for rank_program in self.programs for comm_op in rank_program.task_comm_ops)

    def is_segment_internal(self, comm_group: str) -> bool:
        """Whether each group of a role is of ranks that run the same program, which has the role in blocks only."""
        is_task = any(comm_op.comm_group == comm_group for comm_op in self.task_comm_ops)
        return not is_task and self.has_uniform_program(comm_group)

    def has_uniform_program(self, comm_group: str) -> bool:
        """Whether each group of a role is of ranks that run the same program."""
        program_indices = self.program_index[self.groups[comm_group].members]
        return bool((program_indices == program_indices[:, :1]).all())

    @cached_property
    def group_indices(self) -> Mapping[str, IntArray]:
        """For each role the group that each rank is in (sends in, for pairs), or -1: [ranks]."""
        return {
            comm_group: groups.group_indices(self.world_size, member_index=0 if groups.ordered else None)
            for comm_group, groups in self.groups.items()
        }
