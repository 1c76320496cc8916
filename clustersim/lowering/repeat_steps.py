"""How does the program of one step become that of several in a row?

The tasks of every rank follow each other step by step on their streams, so most of what a step needs of the one before
it is in the order of the streams already: a forward follows the optimizer that wrote its weights. Two things are not,
because they cross streams, and both are read off the program, whatever strategy it was lowered from:

- A collective that waits for nothing in its own step moves what the last step left behind (the parameters that ZeRO-1,
  ZeRO-2 and FSDP gather first): it waits for the last compute task of the step before, which is the optimizer.
- Collectives issued behind a step's last compute task complete what it wrote (the gathers of ZeRO without overlap):
  the first compute task of the next step waits for the last of them, and so for all, as they share a stream.

Nothing else waits, so no rank waits for another between steps: a rank that is done goes on, as training loops do.
Messages need nothing more, since receive buffers are posted ahead, and a rank's last message of a step is part of what
its first message of the next one depends on: the gradient that a stage sends is used by the first stage before that
stage's optimizer, and so before its next forward. Messages are told apart by their tags: microbatches are numbered
through all steps. Assumed: the host runs far enough ahead to launch a step while the one before it runs; nothing is
done between steps (no data loading, no checkpoints).

References: Megatron-LM, distributed optimizer with `overlap_param_gather` (parameters are gathered in the next step's
forward); Zhao et al. 2023, "PyTorch FSDP", section 3.3 (the first gather of a step follows the optimizer).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

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


def repeat(program: Program, steps: int) -> Program:
    """The program of `steps` successive steps, at least one; blocks, exchanges and groups are those of the one step."""
    if steps < 1:
        raise ClusterSimError(f"{steps} steps cannot be run: the least is 1")
    if steps == 1:
        return program
    later = _Later(_microbatches(program), program.expert_loads.loads_per_step)
    programs = tuple(_repeated(rank_program, steps, later) for rank_program in program.programs)
    return replace(program, programs=programs)


@dataclass(frozen=True, slots=True)
class _Later:
    """What changes from step to step. microbatches, loads: numbers that each step has of its own."""

    microbatches: int
    loads: int
    _blocks: dict[tuple[Segment, int], Segment] = field(default_factory=dict)

    def action(self, action: Action, step: int) -> Action:
        """An action in a later step."""
        return Action(action.stage, action.kind, action.microbatch + step * self.microbatches)

    def block(self, block: Segment, step: int) -> Segment:
        """A block in a later step: the same one, unless the step has loads of its own."""
        if not self.loads or all(item.load_index is None for item in _loaded(block)):
            return block
        if (block, step) not in self._blocks:
            operations = tuple(self._operation(operation, step) for operation in block.operations)
            self._blocks[block, step] = Segment(block.name, operations, block.interleaved)
        return self._blocks[block, step]

    def _operation(self, operation: Operation, step: int) -> Operation:
        does = operation.body
        match does:
            case CommOp():
                does = self.exchange(does, step)
            case CommOverlap(comm_op=exchange):
                does = replace(does, comm_op=self.exchange(exchange, step))
        return replace(operation, body=does, load_index=self._load(operation.load_index, step))

    def exchange(self, exchange: CommOp, step: int) -> CommOp:
        """An exchange in a later step."""
        return (
            exchange
            if exchange.load_index is None
            else replace(exchange, load_index=self._load(exchange.load_index, step))
        )

    def _load(self, load: int | None, step: int) -> int | None:
        return None if load is None else load + step * self.loads


def _loaded(block: Segment) -> Iterator[Operation | CommOp]:
    """All of a block that may have a load."""
    yield from block.operations
    yield from block.comm_ops


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where a step of one rank begins and ends.

    first: its first compute task (-1: none); last: its last one, if any; trailing: the last collective behind it.
    """

    first: int
    last: tuple[int, ...]
    trailing: tuple[int, ...]


def _ends(program: RankProgram) -> _Ends:
    computes = [number for number, task in enumerate(program.tasks) if isinstance(task, ComputeTask)]
    if not computes:
        return _Ends(-1, (), ())
    behind = range(computes[-1] + 1, len(program.tasks))
    trailing = [number for number in behind if isinstance(program.tasks[number], CollectiveTask)]
    return _Ends(computes[0], (computes[-1],), tuple(trailing[-1:]))


def _repeated(program: RankProgram, steps: int, later: _Later) -> RankProgram:
    ends, size = _ends(program), len(program.tasks)
    tasks = list(program.tasks)
    for step in range(1, steps):
        for number, task in enumerate(program.tasks):
            before = _needed(ends, number, task)
            after = (
                *(place + (step - 1) * size for place in before),
                *(place + step * size for place in task.depends_on),
            )
            tasks.append(_moved(task, after, step, later))
    return RankProgram(tuple(tasks), program.streams * steps)


def _needed(ends: _Ends, number: int, task: Task) -> tuple[int, ...]:
    """The tasks of the step before that a task waits for."""
    if isinstance(task, CollectiveTask) and not task.depends_on:
        return ends.last
    return ends.trailing if number == ends.first else ()


def _moved(task: Task, after: tuple[int, ...], step: int, later: _Later) -> Task:
    """The same task, waiting for others, in a later step."""
    match task:
        case ComputeTask(segment=block, action=action):
            return ComputeTask(later.block(block, step), after, None if action is None else later.action(action, step))
        case CollectiveTask(comm_op=exchange):
            return CollectiveTask(later.exchange(exchange, step), after)
        case SendTask(comm_op=exchange, tag=tag):
            return SendTask(exchange, later.action(tag, step), after)
        case ReceiveTask(comm_op=exchange, tag=tag):
            return ReceiveTask(exchange, later.action(tag, step), after)


def _microbatches(program: Program) -> int:
    """How many microbatches a step has: one more than the highest number in any rank's actions and tags."""
    numbers = (_microbatch(task) for rank_program in program.programs for task in rank_program.tasks)
    return 1 + max(numbers, default=-1)


def _microbatch(task: Task) -> int:
    match task:
        case ComputeTask(action=Action() as action) | SendTask(tag=action) | ReceiveTask(tag=action):
            return action.microbatch
    return -1
