"""Programs and process groups: what does every rank run, and with whom does it communicate?

Ranks that run the same tasks share one `RankProgram`; `program_index[rank]` selects it. Process groups are
arrays of ranks by kind of group: "tp" has an array [groups, members], and each rank is in at most one group
of a kind. Pairs of pipeline neighbours are ordered groups (sender, receiver): "pp_next" and "pp_previous"
have one pair (r, neighbour of r) for each sender r, so a rank sends in at most one pair of a kind and
receives in at most one.
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
    """The tasks of one rank. A task id is an index into `tasks`; `streams[i]` is the stream of `tasks[i]`.

    Tasks of a stream run in ascending id; `depends_on` may name smaller ids only.
    """

    tasks: tuple[Task, ...]
    streams: tuple[Stream, ...]

    @cached_property
    def comm_ops(self) -> tuple[CommOp, ...]:
        """All distinct collectives and messages that the rank takes part in, in task order."""
        return _unique_comm_ops((*self.segment_comm_ops, *self.task_comm_ops))

    @cached_property
    def segment_comm_ops(self) -> tuple[CommOp, ...]:
        """Distinct communication inside compute segments, for which the compute stream waits."""
        segments = dict.fromkeys(task.segment for task in self.tasks if isinstance(task, ComputeTask))
        return _unique_comm_ops(comm_op for segment in segments for comm_op in segment.distinct_comm_ops)

    @cached_property
    def task_comm_ops(self) -> tuple[CommOp, ...]:
        """Distinct communication that runs as tasks on the other streams."""
        return _unique_comm_ops(comm_op for _, comm_op in self.issued_comm_ops)

    @cached_property
    def issued_comm_ops(self) -> tuple[tuple[Stream, CommOp], ...]:
        """(stream, comm op) pairs of communication tasks, distinct by object identity, as tasks share comm ops."""
        stream_tasks = zip(self.streams, self.tasks, strict=True)
        issued = {
            (stream, id(task.comm_op)): (stream, task.comm_op)
            for stream, task in stream_tasks
            if not isinstance(task, ComputeTask)
        }
        return tuple(issued.values())

    @cached_property
    def operation_offsets(self) -> tuple[int, ...]:
        """[tasks + 1] number of segment operations that the rank runs before each task, and in total."""
        counts = (len(task.segment.operations) if isinstance(task, ComputeTask) else 0 for task in self.tasks)
        return tuple(accumulate(counts, initial=0))

    @cached_property
    def task_signatures(self) -> IntArray:
        """[tasks] ids that are equal for tasks with equal body and equal relative dependencies.

        Relative dependencies are distances in task ids. Message tags do not count.
        """
        body_ids: dict[int, int] = {}
        unique_bodies: dict[Segment | CommOp, int] = {}
        signature_ids: dict[tuple[Stream, int, int | tuple[int, ...]], int] = {}
        signatures: list[int] = []
        for task_id, (stream, task) in enumerate(zip(self.streams, self.tasks, strict=True)):
            body = task.segment if isinstance(task, ComputeTask) else task.comm_op
            body_id = body_ids.get(id(body))  # by identity first: hashing them by value is slower
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
        """Loops of the task list: outer ones (microbatches and the like) and those inside their iterations (layers)."""
        return find_loops(self.task_signatures)

    def step_indices(self, step_count: int) -> IntArray:
        """[tasks] step, from 0, that each task belongs to, where the program is `step_count` equal training steps."""
        return np.arange(len(self.tasks), dtype=np.int64) // (len(self.tasks) // step_count)


def _unique_comm_ops(comm_ops: Iterable[CommOp]) -> tuple[CommOp, ...]:
    """Distinct comm ops in order, by identity first: tasks share them, and hashing all of them by value is slower.

    Not a set: its order, in which comm ops would be costed, changes from process to process.
    """
    return tuple(dict.fromkeys({id(comm_op): comm_op for comm_op in comm_ops}.values()))


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """All process groups of one kind. members: [groups, size] ranks; ordered: member 0 is the sender or the root."""

    comm_group: str
    members: IntArray
    ordered: bool = False

    def group_indices(self, rank_count: int, *, member_index: int | None = None) -> IntArray:
        """[rank_count] index of the group of each rank, or -1. member_index: only as this member of it (pairs)."""
        group_indices = np.full(rank_count, -1, dtype=np.int64)
        indices = np.arange(len(self.members))
        if member_index is None:
            group_indices[self.members] = indices[:, None]
        else:
            group_indices[self.members[:, member_index]] = indices
        return group_indices


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoads:
    """Expert token load of every rank relative to the mean; factors: [load indices, ranks], one per layer.

    loads_per_step: load indices that every step has for itself; 0: all steps share them.
    """

    factors: FloatArray
    loads_per_step: int = 0


BALANCED_LOADS: Final = ExpertLoads(np.zeros((0, 0)))
"""Perfectly balanced experts."""


@dataclass(frozen=True)
class Program:
    """program_index: [ranks] index into `programs`; groups by kind; expert_loads: token imbalance, if there is any."""

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
        """Distinct collectives and messages of all ranks, sorted: cost caches are filled in a reproducible order."""
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
        """Communication inside the compute segments of any rank."""
        return frozenset(comm_op for rank_program in self.programs for comm_op in rank_program.segment_comm_ops)

    @cached_property
    def task_comm_ops(self) -> frozenset[CommOp]:
        """Communication that is a task of any rank."""
        return frozenset(comm_op for rank_program in self.programs for comm_op in rank_program.task_comm_ops)

    def is_segment_internal(self, comm_group: str) -> bool:
        """Whether groups of this kind are used inside segments only, and all members of each run the same program."""
        is_task = any(comm_op.comm_group == comm_group for comm_op in self.task_comm_ops)
        return not is_task and self.has_uniform_program(comm_group)

    def has_uniform_program(self, comm_group: str) -> bool:
        """Whether all members of each group of this kind run the same program."""
        program_indices = self.program_index[self.groups[comm_group].members]
        return bool((program_indices == program_indices[:, :1]).all())

    @cached_property
    def group_indices(self) -> Mapping[str, IntArray]:
        """For each kind of group, [ranks] index of the group that each rank is in (sends in, for pairs), or -1."""
        return {
            comm_group: groups.group_indices(self.world_size, member_index=0 if groups.ordered else None)
            for comm_group, groups in self.groups.items()
        }
