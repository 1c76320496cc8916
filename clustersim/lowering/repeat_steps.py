"""Repetition of a step: turns the program of one step into that of several consecutive steps.

The tasks of every rank follow each other step by step on their streams, so most dependencies between steps
are implied by stream order: a forward follows the optimizer that wrote its weights. Two dependencies cross
streams, and both are derived from the program, whatever strategy it was lowered from:

- A collective without dependencies in its own step moves data that the previous step produced (the
  parameters that ZeRO-1, ZeRO-2 and FSDP gather first): it waits for the last compute task of the previous
  step, the optimizer.
- Collectives issued after a step's last compute task complete what it wrote (the gathers of ZeRO without
  overlap): the first compute task of the next step waits for the last of them, and so for all, as they
  share a stream.

Nothing else waits, so ranks do not synchronize between steps: a rank that is done continues, as training
loops do. Messages need nothing more, since receive buffers are pre-posted, and a rank's last message of a
step is among the dependencies of its first message of the next one: the gradient that a stage sends is used
by the first stage before that stage's optimizer, and so before its next forward. Messages are distinguished
by their tags: microbatches are numbered through all steps. Assumed: the host runs far enough ahead to
launch a step while the previous one runs; nothing is done between steps (no data loading, no checkpoints).

References: Megatron-LM, distributed optimizer with `overlap_param_gather` (parameters are gathered in the
next step's forward); Zhao et al. 2023, "PyTorch FSDP", section 3.3 (the first gather of a step follows the
optimizer).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from clustersim.common.cached_method import cached_method
from clustersim.common.errors import ClusterSimError
from clustersim.program.action import Action
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import (
    CollectiveTask,
    CommOp,
    CommOverlap,
    ComputeTask,
    Operation,
    ReceiveTask,
    Segment,
    SendTask,
    Task,
)


def repeat_steps(program: Program, step_count: int) -> Program:
    """The program of `step_count` (at least one) consecutive steps.

    Segments, comm ops and groups are those of the one step, unless expert loads change from step to step.
    """
    if step_count < 1:
        raise ClusterSimError(f"{step_count} steps cannot be run: the least is 1")
    if step_count == 1:
        return program
    shift = _StepShift(_microbatch_count(program), program.expert_loads.loads_per_step)
    programs = tuple(_repeat_program(rank_program, step_count, shift) for rank_program in program.programs)
    return replace(program, programs=programs)


@dataclass(frozen=True)
class _StepShift:
    """Step-dependent identifiers. microbatch_count, loads_per_step: how many each step has."""

    microbatch_count: int
    loads_per_step: int

    def shift_action(self, action: Action, step: int) -> Action:
        """An action with its microbatch index in a later step."""
        return Action(action.stage, action.kind, action.microbatch + step * self.microbatch_count)

    @cached_method
    def shift_segment(self, segment: Segment, step: int) -> Segment:
        """A segment in a later step: the same one, unless expert loads differ from step to step."""
        if not self.loads_per_step or all(load_carrier.load_index is None for load_carrier in _load_carriers(segment)):
            return segment
        operations = tuple(self._shift_operation(operation, step) for operation in segment.operations)
        return Segment(segment.name, operations, segment.interleaved)

    def _shift_operation(self, operation: Operation, step: int) -> Operation:
        body = operation.body
        match body:
            case CommOp():
                body = self.shift_comm_op(body, step)
            case CommOverlap(comm_op=comm_op):
                body = replace(body, comm_op=self.shift_comm_op(comm_op, step))
        return replace(operation, body=body, load_index=self._shift_load_index(operation.load_index, step))

    def shift_comm_op(self, comm_op: CommOp, step: int) -> CommOp:
        """A comm op with its load index in a later step."""
        return (
            comm_op
            if comm_op.load_index is None
            else replace(comm_op, load_index=self._shift_load_index(comm_op.load_index, step))
        )

    def _shift_load_index(self, load_index: int | None, step: int) -> int | None:
        return None if load_index is None else load_index + step * self.loads_per_step


def _load_carriers(segment: Segment) -> Iterator[Operation | CommOp]:
    """Everything in a segment that may have a load index."""
    yield from segment.operations
    yield from segment.comm_ops


@dataclass(frozen=True, slots=True)
class _StepBoundary:
    """Where a step of one rank begins and ends.

    first_compute: its first compute task (-1: none); last_compute: its last one, if any; trailing_collective:
    the last collective issued after it.
    """

    first_compute: int
    last_compute: tuple[int, ...]
    trailing_collective: tuple[int, ...]


def _step_boundary(program: RankProgram) -> _StepBoundary:
    compute_ids = [task_id for task_id, task in enumerate(program.tasks) if isinstance(task, ComputeTask)]
    if not compute_ids:
        return _StepBoundary(-1, (), ())
    remaining = range(compute_ids[-1] + 1, len(program.tasks))
    trailing = [task_id for task_id in remaining if isinstance(program.tasks[task_id], CollectiveTask)]
    return _StepBoundary(compute_ids[0], (compute_ids[-1],), tuple(trailing[-1:]))


def _repeat_program(program: RankProgram, step_count: int, shift: _StepShift) -> RankProgram:
    boundary, task_count = _step_boundary(program), len(program.tasks)
    tasks = list(program.tasks)
    for step in range(1, step_count):
        for task_id, task in enumerate(program.tasks):
            previous_ids = _previous_step_dependencies(boundary, task_id, task)
            depends_on = (
                *(dependency + (step - 1) * task_count for dependency in previous_ids),
                *(dependency + step * task_count for dependency in task.depends_on),
            )
            tasks.append(_shift_task(task, depends_on, step, shift))
    return RankProgram(tuple(tasks), program.streams * step_count)


def _previous_step_dependencies(boundary: _StepBoundary, task_id: int, task: Task) -> tuple[int, ...]:
    """The tasks of the previous step that a task waits for."""
    if isinstance(task, CollectiveTask) and not task.depends_on:
        return boundary.last_compute
    return boundary.trailing_collective if task_id == boundary.first_compute else ()


def _shift_task(task: Task, depends_on: tuple[int, ...], step: int, shift: _StepShift) -> Task:
    """The same task in a later step, with other dependencies."""
    match task:
        case ComputeTask(segment=segment, action=action):
            return ComputeTask(
                shift.shift_segment(segment, step),
                depends_on,
                None if action is None else shift.shift_action(action, step),
            )
        case CollectiveTask(comm_op=comm_op):
            return CollectiveTask(shift.shift_comm_op(comm_op, step), depends_on)
        case SendTask(comm_op=comm_op, tag=tag):
            return SendTask(comm_op, shift.shift_action(tag, step), depends_on)
        case ReceiveTask(comm_op=comm_op, tag=tag):
            return ReceiveTask(comm_op, shift.shift_action(tag, step), depends_on)


def _microbatch_count(program: Program) -> int:
    """Number of microbatches of a step: the highest index in any rank's actions and tags, plus one."""
    microbatches = (_task_microbatch(task) for rank_program in program.programs for task in rank_program.tasks)
    return 1 + max(microbatches, default=-1)


def _task_microbatch(task: Task) -> int:
    match task:
        case ComputeTask(action=Action() as action) | SendTask(tag=action) | ReceiveTask(tag=action):
            return action.microbatch
    return -1
