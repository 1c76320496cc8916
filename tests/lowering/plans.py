"""Small plans to lower, and text forms of their programs for comparison."""

from collections.abc import Iterator
from functools import partial

from clustersim.lowering.training_step import lower_step
from clustersim.model.layer_stack import MlpType
from clustersim.model.training import Training
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel, uniform_model
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.placement import looped_placement
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import CollectiveTask, CommOp, ComputeTask, Operation, ReceiveTask, SendTask
from clustersim.schedules.schedule import Schedule
from tests.parallel.operation_listing import comparable_operations
from tests.strategies import default_schedule

SMALL = uniform_model(
    name="small", layers=4, hidden=64, ffn=128, heads=4, kv_heads=4, head_dim=16,
    vocab=256, max_positions=64, mlp=MlpType.GELU, norm=Norm.LAYERNORM, positions=PositionEncoding.LEARNED,
    tied_embeddings=False, linear_bias=True, qkv_bias=True,
)  # fmt: skip
TRAINING = Training(sequence=64, global_batch=8)


def make_plan(layout: Layout, training: Training = TRAINING, model: TransformerModel = SMALL, chunks: int = 1) -> Plan:
    return Plan(model, training, layout, partial(looped_placement, chunks_per_rank=chunks))


def lower_plan(plan: Plan, order: Schedule | None = None) -> Program:
    schedule = order or default_schedule(plan.placement.max_chunks)
    return lower_step(plan, schedule.order(plan.layout.pp, plan.microbatches))


def task_names(program: RankProgram) -> list[str]:
    """Names of all tasks in issue order: F0 and B0 are microbatch 0's passes."""
    return [_task_name(task) for task in program.tasks]


def data_parallel_task_names(program: RankProgram) -> list[str]:
    """Names of passes and data-parallel collectives only."""
    return [word for word in task_names(program) if not word.startswith(("send", "receive"))]


def collectives(program: RankProgram) -> list[CommOp]:
    return [task.comm_op for task in program.tasks if isinstance(task, CollectiveTask)]


def operations(program: RankProgram, kind: ActionKind, microbatch: int = 0) -> Iterator[Operation]:
    """All operations of one microbatch's passes of a kind, through all stages of the rank."""
    for task in program.tasks:
        if isinstance(task, ComputeTask) and task.action and task.action[1:] == (kind, microbatch):
            yield from task.segment.operations


def comparable_tasks(program: Program) -> list[list[tuple[object, ...]]]:
    """All that ranks do: equal for programs that differ only in the identity of their segments and operations."""
    return [
        [_comparable_task(*item) for item in zip(rank.tasks, rank.streams, strict=True)] for rank in program.programs
    ]


def _comparable_task(task: object, stream: object) -> tuple[object, ...]:
    if isinstance(task, ComputeTask):
        return stream, task.segment.name, comparable_operations(task.segment.operations), task.depends_on, task.action
    return stream, task


def _task_name(task: object) -> str:
    match task:
        case ComputeTask(action=None, segment=segment):
            return segment.name
        case ComputeTask(action=action):
            return f"{action.kind.value}{action.microbatch}"
        case SendTask(tag=tag):
            return f"send {tag}"
        case ReceiveTask(tag=tag):
            return f"receive {tag}"
        case CollectiveTask(comm_op=comm_op):
            return comm_op.name
    raise TypeError(task)
