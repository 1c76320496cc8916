"""Programs and process groups: what does every rank run, and with whom does it communicate?

Ranks that run the same tasks share one `RankProgram`; `program_index[rank]` selects it. Process groups are
arrays of ranks by kind of group: "tp" has an array [groups, members], and each rank is in at most one group
of a kind. Pairs of pipeline neighbours are ordered groups (sender, receiver): "pp_next" and "pp_previous"
have one pair (r, neighbour of r) for each sender r, so a rank sends in at most one pair of a kind and
receives in at most one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.interning import Interner
from clustersim.program.action import Action, ActionKind
from clustersim.program.loops import Loop, find_loops
from clustersim.program.task import CommOp, ComputeTask, Segment, Stream, Task

TaskBody = Segment | CommOp
"""What a task runs."""
PASS_KINDS: Final = tuple(ActionKind)
"""Kinds of passes, as `RankProgram.pass_kinds` counts them."""


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
        return Interner((*self.segment_comm_ops, *self.task_comm_ops)).values

    @cached_property
    def segment_comm_ops(self) -> tuple[CommOp, ...]:
        """Distinct communication inside compute segments, for which the compute stream waits."""
        segments = (body for body in self.task_bodies if isinstance(body, Segment))
        return Interner(comm_op for segment in segments for comm_op in segment.distinct_comm_ops).values

    @cached_property
    def task_comm_ops(self) -> tuple[CommOp, ...]:
        """Distinct communication that runs as tasks on the other streams."""
        return tuple(body for body in self.task_bodies if isinstance(body, CommOp))

    @cached_property
    def issued_comm_ops(self) -> tuple[tuple[Stream, CommOp], ...]:
        """Distinct (stream, comm op) pairs of communication tasks."""
        bodies, stream_bodies = self.task_bodies, zip(self.streams, self.body_index.tolist(), strict=True)
        issued = ((stream, bodies[body_index]) for stream, body_index in dict.fromkeys(stream_bodies))
        return tuple((stream, body) for stream, body in issued if isinstance(body, CommOp))

    @cached_property
    def task_bodies(self) -> tuple[TaskBody, ...]:
        """Distinct segments and comm ops of tasks, in task order."""
        return self._interned_bodies[0]

    @cached_property
    def body_index(self) -> IntArray:
        """[tasks] index into `task_bodies` of what each task runs."""
        return self._interned_bodies[1]

    @cached_property
    def _interned_bodies(self) -> tuple[tuple[TaskBody, ...], IntArray]:
        """`task_bodies` and `body_index`."""
        bodies = Interner[TaskBody]()
        indices = [
            bodies.index_of(task.segment if isinstance(task, ComputeTask) else task.comm_op) for task in self.tasks
        ]
        return bodies.values, np.array(indices, dtype=np.int64)

    @cached_property
    def operation_offsets(self) -> tuple[int, ...]:
        """[tasks + 1] number of segment operations that the rank runs before each task, and in total."""
        counts = (len(task.segment.operations) if isinstance(task, ComputeTask) else 0 for task in self.tasks)
        return tuple(accumulate(counts, initial=0))

    @property
    def actions(self) -> tuple[Action, ...]:
        """Distinct passes that tasks belong to, in task order."""
        return self._interned_actions[0]

    @property
    def action_index(self) -> IntArray:
        """[tasks] index into `actions` of the pass that each task computes; -1 for other tasks."""
        return self._interned_actions[1]

    @cached_property
    def _interned_actions(self) -> tuple[tuple[Action, ...], IntArray]:
        """`actions` and `action_index`."""
        actions = Interner[Action]()
        indices = [
            actions.index_of(task.action) if isinstance(task, ComputeTask) and task.action is not None else -1
            for task in self.tasks
        ]
        return actions.values, np.array(indices, dtype=np.int64)

    @cached_property
    def pass_kinds(self) -> IntArray:
        """[tasks] index in `PASS_KINDS` of the kind of pass that each task computes; beyond it for other tasks."""
        kinds = [*(PASS_KINDS.index(action.kind) for action in self.actions), len(PASS_KINDS)]
        return np.array(kinds, dtype=np.int64)[self.action_index]

    @cached_property
    def task_signatures(self) -> IntArray:
        """[tasks] ids that are equal for tasks with equal body and equal relative dependencies.

        Relative dependencies are distances in task ids. Message tags do not count.
        """
        signature_ids: dict[tuple[Stream, int, int | tuple[int, ...]], int] = {}
        signatures: list[int] = []
        body_index = self.body_index.tolist()
        for task_id, (stream, task, body) in enumerate(zip(self.streams, self.tasks, body_index, strict=True)):
            depends_on = task.depends_on
            distances = (
                task_id - depends_on[0]
                if len(depends_on) == 1
                else tuple([task_id - dependency for dependency in depends_on])
            )
            signatures.append(signature_ids.setdefault((stream, body, distances), len(signature_ids)))
        return np.array(signatures, dtype=np.int64)

    @cached_property
    def loops(self) -> tuple[tuple[Loop, ...], tuple[Loop, ...]]:
        """Loops of the task list: outer ones (microbatches and the like) and those inside their iterations (layers)."""
        return find_loops(self.task_signatures)

    def step_indices(self, step_count: int) -> IntArray:
        """[tasks] step, from 0, that each task belongs to, where the program is `step_count` equal training steps."""
        return np.arange(len(self.tasks), dtype=np.int64) // (len(self.tasks) // step_count)


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
