"""When does the host launch the passes that overlap? Its launches, as tasks of a stream of their own.

Where the passes of an `OverlappedPair` are interleaved, the host launches their operations in the order in which they
are issued, ahead of the device as far as it gets: a lead that it gained in one phase hides launches of the next, and
while the device waits for tokens the host goes on. So these launches are tasks of a stream (`LaunchOp`):

    segment k       begins once the host is so far ahead that it is not waited for inside (`LaunchLead`)
    collective k    begins once it has been launched
    the host        launches the rest of k, waits if it must, and begins to launch k + 1

The host waits for the numbers of received tokens: before it launches a collective that they size (`CommOp.host_sync`),
for the computation that the collective's tokens come from (kernels of a dispatcher count them on the stream that sends
them, so behind what is sent there: `notify_dispatch`, deepseek-ai/DeepEP, csrc/deep_ep.cpp), and behind a kernel whose
result it needs (`Kernel.host_sync`), where the segment is split. Before the first of these it launches the next
computation of the other pass, which does not depend on them (`TransformerLayerSchedulePlan.run` calls the dispatch of
forward behind the experts' backward, megatron/core/models/common/model_chunk_schedule_plan.py). It waits, too, for
messages for which the next pass waits (`overlap_p2p_comm` off: `_communicate` synchronizes the device,
megatron/core/pipeline_parallel/p2p_communication.py), and for segments that are not interleaved.

Assumed: the queue of launches is never full; data-parallel collectives and messages between stages are launched in
time.

Example: phases alternate between 1 s of kernels, launched in 2 s, and 4 s, launched in 1 s. Taken apart, two last 6 s;
with the host's lead carried over 5 s, as the long one hides what the short one's launches exceed it by.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import cast

import numpy as np

from clustersim.common.cached_method import cached_method
from clustersim.lowering.task_list import TaskList, with_dependencies
from clustersim.model.kernels import Kernel
from clustersim.parallel.mesh import LAUNCH_GROUP
from clustersim.program.action import ActionKind
from clustersim.program.program import ProcessGroups, Program, RankProgram
from clustersim.program.task import (
    CollectiveTask,
    CollectiveType,
    CommOp,
    ComputeTask,
    HostOpKind,
    LaunchOp,
    Operation,
    Segment,
    SendTask,
    Stream,
    Task,
    WorkType,
)


def add_host_launches(program: Program) -> Program:
    """The program with launches of its interleaved passes as tasks; the same one if it has none."""
    if not any(
        isinstance(body, Segment) and body.interleaved
        for rank_program in program.programs
        for body in rank_program.task_bodies
    ):
        return program
    ranks = np.arange(program.world_size)[:, None]
    groups = {**program.groups, LAUNCH_GROUP.name: ProcessGroups(LAUNCH_GROUP.name, ranks)}
    segments = _SplitSegments()
    programs = tuple(_LaunchedTasks(rank_program, segments).build() for rank_program in program.programs)
    return replace(program, programs=programs, groups=groups)


class _SplitSegments:
    """Segments that ranks and passes share: parts of other segments, and collectives as segments."""

    @cached_method
    def of_collective(self, comm_op: CommOp, work_type: WorkType) -> Segment:
        """A segment of nothing but a collective."""
        return Segment(comm_op.name, (Operation(comm_op, work_type),))

    @cached_method
    def between_syncs(self, segment: Segment) -> tuple[Segment, ...]:
        """The parts of a segment behind which the host waits for a kernel's result."""
        count = len(segment.operations)
        synced = (index + 1 for index, operation in enumerate(segment.operations) if _has_host_sync(operation))
        bounds = (0, *(index for index in synced if index < count), count)
        if len(bounds) == len((0, count)):
            return (segment,)
        return tuple(replace(segment, operations=segment.operations[begin:end]) for begin, end in pairwise(bounds))


def _has_host_sync(operation: Operation) -> bool:
    """Whether the host waits for the result of a kernel."""
    return isinstance(operation.body, Kernel) and operation.body.host_sync


@dataclass(slots=True)
class _LaunchedTasks:
    """The tasks of a rank with launches between them.

    new_ids: of the program's tasks that have been issued, by their old ids; launch: the latest launch task, None: the
    host is no further than the device; begun: the segment that is launched in part; compute, last_comm: the latest
    compute task and the latest collective; held: old ids of collectives for which the host will wait, once it has
    launched the next computation.
    """

    program: RankProgram
    segments: _SplitSegments
    tasks: TaskList = field(default_factory=TaskList)
    new_ids: dict[int, int] = field(default_factory=dict)
    launch: tuple[int, ...] = ()
    begun: Segment | None = None
    compute: tuple[int, ...] = ()
    last_comm: tuple[int, ...] = ()
    held: list[int] = field(default_factory=list)

    def build(self) -> RankProgram:
        """The program with launches."""
        for task_id, task in enumerate(self.program.tasks):
            if not set(self.held).isdisjoint(task.depends_on):
                self._issue_held()
            self._issue(task_id, task)
        self._issue_held()
        return self.tasks.build()

    def _issue(self, task_id: int, task: Task) -> None:
        """Issue a task, and its launch if it belongs to an interleaved pass."""
        stream = self.program.streams[task_id]
        match task:
            case ComputeTask(segment=segment) if segment.interleaved:
                self._issue_segment(task_id, task)
                self._issue_held()
            case ComputeTask():
                self._issue_held()
                self._launch_until(None, ())
                self._add(task_id, Stream.COMPUTE, self.launch)
                self.launch, self.compute = (), (self.new_ids[task_id],)
            case CollectiveTask(comm_op=comm_op) if stream is Stream.EP:
                if comm_op.host_sync or self.held:
                    self.held.append(task_id)
                else:
                    self._issue_collective(task_id, ())
            case _:
                self._add(task_id, stream, ())

    def _issue_segment(self, task_id: int, task: ComputeTask) -> None:
        """Issue a segment of an interleaved pass in parts, behind each of which the host waits."""
        depends_on, tasks = self._new_depends_on(task_id), self.program.tasks
        awaited = tuple(self.new_ids[old_id] for old_id in task.depends_on if isinstance(tasks[old_id], SendTask))
        for segment in self.segments.between_syncs(task.segment):
            self._launch_until(segment, awaited or (() if self.launch else self.compute))
            compute_task = ComputeTask(segment, (*depends_on, *self.launch), task.action)
            self.new_ids[task_id] = self.tasks.add(Stream.COMPUTE, compute_task)
            awaited = self.compute = (self.new_ids[task_id],)
            depends_on = ()

    def _issue_held(self) -> None:
        """Launch the collectives for which the host waits."""
        for task_id in self.held:
            self._issue_collective(task_id, self._awaited_by_host(task_id))
        self.held.clear()

    def _awaited_by_host(self, task_id: int) -> tuple[int, ...]:
        """What the host waits for before it launches a collective."""
        comm_op = self._comm_op(task_id)
        if not comm_op.host_sync:
            return ()
        counts_on_its_stream = comm_op.routing is not None and comm_op.routing.dispatcher.has_custom_kernels
        return (*self._new_depends_on(task_id), *(self.last_comm if counts_on_its_stream else ()))

    def _issue_collective(self, task_id: int, awaited: tuple[int, ...]) -> None:
        """Issue a collective of an interleaved pass behind its launch, before which the host waits for tasks."""
        self._launch_until(self.segments.of_collective(self._comm_op(task_id), self._work_type(task_id)), awaited)
        self._add(task_id, Stream.EP, self.launch)
        self.last_comm = (self.new_ids[task_id],)

    def _comm_op(self, task_id: int) -> CommOp:
        """The collective of a task on the EP stream."""
        return cast(CollectiveTask, self.program.tasks[task_id]).comm_op

    def _work_type(self, task_id: int) -> WorkType:
        """Whether a collective belongs to a backward: if computation that it depends on does."""
        sources = (self.program.tasks[old_id] for old_id in self.program.tasks[task_id].depends_on)
        actions = (source.action for source in sources if isinstance(source, ComputeTask))
        is_forward = all(action is None or action.kind is ActionKind.FORWARD for action in actions)
        return WorkType.FORWARD if is_forward else WorkType.BACKWARD

    def _launch_until(self, segment: Segment | None, awaited: tuple[int, ...]) -> None:
        """Launch the rest of the segment that is launched in part, wait for tasks, and begin to launch the next."""
        if awaited and self.begun is not None:
            self._add_launch(self.begun, None, ())
            self.begun = None
        if segment is not None or self.begun is not None:
            self._add_launch(self.begun, segment, awaited)
        self.begun = segment

    def _add_launch(self, continued: Segment | None, begun: Segment | None, depends_on: tuple[int, ...]) -> None:
        group, kind = LAUNCH_GROUP.name, HostOpKind.LAUNCH
        launch_op = LaunchOp("launch", CollectiveType.SEND_RECV, group, 0.0, kind, continued, begun)
        self.launch = (self.tasks.add(Stream.LAUNCH, CollectiveTask(launch_op, depends_on)),)

    def _add(self, task_id: int, stream: Stream, launched: tuple[int, ...]) -> None:
        """Add a task with its new dependencies, behind its launch."""
        depends_on = (*self._new_depends_on(task_id), *launched)
        self.new_ids[task_id] = self.tasks.add(stream, with_dependencies(self.program.tasks[task_id], depends_on))

    def _new_depends_on(self, task_id: int) -> tuple[int, ...]:
        return tuple([self.new_ids[old_id] for old_id in self.program.tasks[task_id].depends_on])
