"""How does a scenario become a program? One training step, for every kind of rank.

Ranks of one pipeline rank run the same tasks, whatever their coordinates on the other axes. A pipeline rank works
through its schedule: it waits for the activations (or gradients) of a pass, runs it, and sends on what comes out. After
the last backward come the reductions that are still to be done, the norm of all gradients, and the optimizer. A pair
runs side by side where tokens travel beside computation (`layout.overlap_expert_communication`), else in turn; what
both passes wait for is received first, and their outputs are sent when each of them is done.

All ranks wait for the norm, but not with a zero-bubble schedule, whose pipeline ranks begin and end one after the
other: there the optimizer waits for the norm so far, of the stages up to its own, handed on along the pipeline.
Whether the whole norm would have changed the update is found out beside the next step's warm-up (Qi et al. 2023,
arXiv:2401.10241, section 4); here it never does, and finding out costs nothing.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from clustersim.lowering.data_parallel import data_lowering
from clustersim.lowering.overheads import cast_weights, report_loss, report_step, sum_norms, take_batch, zero_gradients
from clustersim.lowering.program_builder import DataLowering, Lowering, Pass
from clustersim.lowering.task_list import Blocks
from clustersim.lowering.torch_data_parallel import lower_naive
from clustersim.lowering.units import Units
from clustersim.model.gradient_kernels import unscale_kernels, unscales_gradients, upcast_kernels, with_upcast_gradients
from clustersim.model.kernels import Kernel
from clustersim.model.layers import gradient_norm_kernels, optimizer_step_kernels
from clustersim.model.operators import DENSE, EXPERTS
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.training import Training
from clustersim.parallel.data_parallel_strategy import NaiveDataParallel
from clustersim.parallel.expert_load_factors import build_load_factors
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import EMBEDDING_GROUP, ETP_EP_GROUP, PIPELINE, PP_NEXT_GROUP, TP_GROUP
from clustersim.parallel.parameter_groups import single_copy_groups
from clustersim.parallel.plan import Plan
from clustersim.parallel.process_groups import process_groups
from clustersim.program.action import (
    BACKWARD,
    FORWARD,
    Action,
    ActionKind,
    OverlappedPair,
    PipelineOrder,
    ScheduleEntry,
    flatten_entries,
    flatten_entry,
)
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import (
    CollectiveTask,
    CollectiveType,
    CommOp,
    ComputeTask,
    HostOpKind,
    Operation,
    ReceiveTask,
    SendTask,
    Stream,
    WorkType,
)
from clustersim.schedules.validation import runs_with_paired_sends

NORM_BYTES = 4.0  # one fp32 sum of squares
_NORM: Final = "gradient norm"
_PAIR: Final = (FORWARD, BACKWARD)
_RECEIVE: Final = Stream.RECEIVE
_SEND: Final = {True: Stream.SEND_NEXT, False: Stream.SEND_PREVIOUS}


def lower(plan: Plan, order: PipelineOrder, steps: int = 1) -> Program:
    """The program of one training step; `order` says in which order each pipeline rank works.

    steps: for how many there are to be loads of experts.
    """
    groups = process_groups(plan.layout, plan.placement, plan.embedding_ranks)
    if isinstance(plan.layout.data, NaiveDataParallel):
        return lower_naive(plan, groups)
    blocks, units, backwards, together = Blocks(), Units(plan), _backwards(order), _sends_together(plan, order)
    programs = tuple(
        _rank(Lowering(plan, units, blocks, _last_backwards(steps), backwards, together), rank, steps)
        for rank, steps in enumerate(order)
    )
    used = {exchange.comm_group for program in programs for exchange in program.comm_ops}
    return Program(
        programs=programs,
        program_index=plan.layout.mesh.rank_coordinates(PIPELINE),
        groups={role: group for role, group in groups.items() if role in used},
        expert_loads=build_load_factors(plan, steps),
    )


def _backwards(order: PipelineOrder) -> dict[tuple[int, int], ActionKind]:
    """By stage and microbatch, as what a gradient from the next stage is received."""
    receiving = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
    every = (action for steps in order for action in flatten_entries(steps) if action.kind in receiving)
    return {(action.stage, action.microbatch): action.kind for action in every}


def _last_backwards(steps: tuple[ScheduleEntry, ...]) -> frozenset[Action]:
    """The last action that completes gradients, of each stage."""
    completing = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
    return frozenset({action.stage: action for action in flatten_entries(steps) if action.kind in completing}.values())


def _rank(low: Lowering, rank: int, steps: tuple[ScheduleEntry, ...]) -> RankProgram:
    """The tasks of every rank with this pipeline coordinate."""
    data = data_lowering(low.plan)
    stages = low.plan.stages_on_rank(rank)
    data.begin(low, stages)
    zero_gradients(low, stages)
    cast_weights(low, stages)
    _run(low, data, _parted(low.plan, steps))
    last = low.computed or 0
    data.reduce(low, stages, last)
    _tie_embeddings(low, stages, last)
    sum_norms(low, stages)
    halves = ActionKind.INPUT_GRADIENT in low.backwards.values()
    updated = _optimize(low, stages, rank if halves and low.plan.layout.pp > 1 else None)
    data.end(low, stages, updated)
    report_step(low, stages, updated)
    return low.tasks.program()


def _parted(plan: Plan, steps: tuple[ScheduleEntry, ...]) -> list[ScheduleEntry]:
    """Steps, with the passes of pairs one after the other where they do not run side by side."""
    beside = plan.layout.overlap_expert_communication
    return [item for step in steps for item in ((step,) if beside and _apart(step) else flatten_entry(step))]


def _apart(step: ScheduleEntry) -> bool:
    """Whether no pass of a step reads what another of it makes."""
    return isinstance(step, Action) or step.forward[::2] != step.backward[::2]


def _run(low: Lowering, data: DataLowering, steps: list[ScheduleEntry]) -> None:
    """Issue all passes of a rank, and their messages."""
    sent: tuple[int, ...] = ()
    held: Action | None = None
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        if isinstance(step, OverlappedPair):
            sent = _side_by_side(low, data, step, sent)
            continue
        done, loss = _pass(low, data, step, sent)
        if low.together and isinstance(following, Action) and (step.kind, following.kind) == _PAIR:
            held, sent = step, loss
            continue
        sent = () if held is None else _send(low, held, done)
        sent, held = (*sent, *_send(low, step, done), *loss), None


def _pass(low: Lowering, data: DataLowering, action: Action, after: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Issue a pass; return the task after which its output is there, and what the next pass waits for by its loss."""
    run = take_batch(low, _receive(low, Pass(low.plan.stages[action.stage], action, after)))
    done = data.run(low, run)
    return done, report_loss(low, run, done)


def _side_by_side(low: Lowering, data: DataLowering, pair: OverlappedPair, after: tuple[int, ...]) -> tuple[int, ...]:
    """Issue a forward and a backward that take turns; return what the next pass waits for because of them."""
    low.paired, first = True, len(low.tasks)
    forward, loss = _pass(low, data, pair.forward, after)
    second = len(low.tasks)
    backward, _ = _pass(low, data, pair.backward, after)
    low.tasks.weave(first, second)
    low.paired = False
    return (*_send(low, pair.forward, forward), *_send(low, pair.backward, backward), *loss)


def _receive(low: Lowering, run: Pass) -> Pass:
    """Wait for what another pipeline rank sends; without sequence parallelism its parts are gathered on arrival."""
    stage, action, after, _ = run
    key = action.stage, action.kind
    if key not in low.arrivals:
        low.arrivals[key] = _arrival(low, *key)
    message, arriving = low.arrivals[key]
    if message is None:
        return run
    task = low.tasks.add(_RECEIVE, ReceiveTask(message, action))
    return Pass(stage, action, (*after, task), arriving)


def _arrival(low: Lowering, stage: int, kind: ActionKind) -> tuple[CommOp | None, tuple[Operation, ...]]:
    """What the passes of a stage receive, None: nothing; and what is done to it before they run."""
    layout, forward = low.plan.layout, kind is FORWARD
    source = stage + (-1 if forward else 1)
    message = _message(low, kind, source, stage)
    if message is None or layout.tp == 1 or layout.sequence_parallel:
        return message, ()
    size = low.plan.sent_activation_count(min(source, stage)) * low.plan.activation_bytes
    gather = CommOp("gather stage input", CollectiveType.ALL_GATHER, TP_GROUP.name, size)
    return message, (Operation(gather, WorkType.FORWARD if forward else WorkType.BACKWARD),)


def _message(low: Lowering, kind: ActionKind, source: int, target: int) -> CommOp | None:
    """What a pass's output is sent as from stage to stage; None where nothing is sent."""
    return None if kind is ActionKind.WEIGHT_GRADIENT else low.message(source, target)


def _sends_together(plan: Plan, order: PipelineOrder) -> bool:
    """Whether a forward's output waits for that of a backward right behind it, with which it is sent.

    So does Megatron-LM's interleaved schedule where sends are not overlapped: after each forward and backward of its
    steady phase it sends both ways at once (`send_forward_backward_recv_forward_backward`). It wants microbatches in
    multiples of the pipeline's ranks, and runs all forwards first where there are only as many. An order that could not
    go on so is none of Megatron's: there each output is sent by itself.
    """
    if plan.layout.pipeline_overlap or plan.placement.max_chunks == 1:
        return False
    whole = plan.microbatches > plan.layout.pp and plan.microbatches % plan.layout.pp == 0
    return whole and runs_with_paired_sends(order)


def _send(low: Lowering, action: Action, done: int) -> tuple[int, ...]:
    """Send a pass's output on; return what the next pass must wait for because of it."""
    stage, kind, microbatch = action
    forward = kind is FORWARD
    target = stage + (1 if forward else -1)
    key = stage, kind
    if key not in low.departures:
        low.departures[key] = _message(low, kind, stage, target)
    message = low.departures[key]
    if message is None:
        return ()
    tag = Action(target, kind if forward else low.backwards[target, microbatch], microbatch)
    task = low.tasks.add(_SEND[forward], SendTask(message, tag, (done,)))
    return () if low.plan.layout.pipeline_overlap else (task,)


def _tie_embeddings(low: Lowering, stages: tuple[PipelineStage, ...], after: int) -> None:
    """Add up the gradients of an embedding that several pipeline ranks hold."""
    tables = low.plan.embedding_ranks
    holds = any(low.plan.placement.stage_ranks[stage.index] in tables for stage in stages)
    (dense,) = (group for group in low.plan.parameter_groups if group.name == DENSE)
    if not (len(tables) > 1 and holds and dense.is_trained):
        return
    rows = low.plan.layer_shard.vocab_rows(low.plan.model.vocab)
    shards = (
        dense.shard_count if low.plan.layout.data.zero_stage > 1 else 1
    )  # ZeRO-2 and -3 hold a part of the gradient
    form = dense.formats.gradients
    payload = float(rows * low.plan.model.hidden * form.bytes / shards)
    exchange = CommOp(
        "reduce tied embedding", CollectiveType.ALL_REDUCE, EMBEDDING_GROUP.name, payload, reduce_dtype=form
    )
    low.reducing.append(low.tasks.add(Stream.DP, CollectiveTask(exchange, (after, *low.reducing[-1:]))))


def _optimize(low: Lowering, stages: tuple[PipelineStage, ...], place: int | None) -> int:
    """Clip and apply the gradients that this rank updates; return the optimizer's task.

    place: on which pipeline rank, where the norm is handed on along the pipeline; None: it is summed at once.
    """
    plan = low.plan
    updated = list(_updated(plan, stages))
    ready = _ready(low, updated, at_once=place is None)
    updated = [(with_upcast_gradients(training), count) for training, count in updated]
    after = tuple(low.reducing)
    if plan.training.gradient_clipping:
        kernels = [
            *ready,
            *(step for training, count in updated for step in _steps(gradient_norm_kernels(training, count))),
        ]
        after, ready = _norm(low, kernels) if place is None else _norm_so_far(low, place, kernels), []
    share = plan.training.offload.share
    here = [(training, (1.0 - share) * count) for training, count in updated if share < 1.0]
    steps = [
        *ready,
        *(operation for training, count in here for operation in _steps(optimizer_step_kernels(training, count))),
    ]
    back = list(_update_on_host(low, sum(len(low.units.of(stage)) for stage in stages), updated, after))
    if not back:
        return _update_here(low, steps, after)
    if steps:
        _update_here(low, steps, after)
    return _update_here(low, [], (back[-1],))  # the step is done when the weights are back


def _ready(low: Lowering, updated: list[tuple[Training, float]], *, at_once: bool) -> list[Operation]:
    """What makes gradients as the optimizer reads them, where they are here: run first, or else to be run.

    Whether the gradients of an FP16 run are finite all ranks of a model hear before anything else is done with them;
    where the norm is handed on along the pipeline (not `at_once`) they hear it with that.
    """
    if low.plan.training.offload.offloads_gradients:
        return []
    made = [step for training, count in updated for step in _steps(upcast_kernels(training, count))]
    made += [
        operation
        for training, count in updated
        for operation in _steps(unscale_kernels(with_upcast_gradients(training), count))
    ]
    if not (at_once and unscales_gradients(low.plan.training)):
        return made
    task = low.beside("unscale gradients", made, low.reducing)
    low.reducing = [*_over_copies(low, "found infinite", task)]
    return []


def _update_here(low: Lowering, steps: list[Operation], after: tuple[int, ...]) -> int:
    block = low.blocks.block(("optimizer", tuple(steps)), "optimizer", steps)
    return low.tasks.add(Stream.COMPUTE, ComputeTask(block, after))


def _update_on_host(
    low: Lowering, pieces: int, updated: list[tuple[Training, float]], after: tuple[int, ...]
) -> Iterator[int]:
    """Update the host's part of the parameters, in so many pieces; yield the tasks after which weights are there."""
    offload = low.plan.training.offload
    for training, count in (item for item in updated if item[1] and offload.states is not None):
        part, formats = offload.share * count / pieces, training.recipe.weight_formats
        (kernel,) = optimizer_step_kernels(replace(training, fused=True), part)
        for _ in range(pieces):
            ready = after
            if not offload.offloads_gradients:
                ready = (low.host.run(HostOpKind.D2H, "offload gradients", part * formats.gradients.bytes, after),)
            task = low.host.run(HostOpKind.ON_HOST, "optimizer on the host", kernel.bytes, ready)
            if not offload.offloads_shards:
                task = low.host.run(HostOpKind.H2D, "fetch weights", part * formats.stored.bytes, (task,))
            yield task


def _updated(plan: Plan, stages: tuple[PipelineStage, ...]) -> Iterator[tuple[Training, float]]:
    """How many parameters a rank updates, those in the same formats together, as a training in these formats."""
    counts: dict[WeightFormats, float] = {}
    for group in plan.trained_groups:
        held = sum(plan.parameter_count(stage, group.name) for stage in stages)
        counts[group.formats] = counts.get(group.formats, 0.0) + held / group.shard_count
    for formats, count in counts.items():
        yield plan.with_weight_formats(formats), count


def _norm(low: Lowering, kernels: list[Operation]) -> tuple[int, ...]:
    """Sum the squares of all gradients; return the task after which the sum is there."""
    task = _squares(low, kernels)
    return _over_copies(low, _NORM, task)


def _over_copies(low: Lowering, name: str, after: int) -> tuple[int, ...]:
    """Sum a number over all that hold one copy of the gradients together, of each group of weights."""
    roles = single_copy_groups(low.plan.layout, low.plan.trained_groups)
    exchanges = (CommOp(name, CollectiveType.ALL_REDUCE, role.name, NORM_BYTES) for role in roles)
    return tuple(low.communicate(exchange, (after,)) for exchange in exchanges)


def _norm_so_far(low: Lowering, rank: int, kernels: list[Operation]) -> tuple[int, ...]:
    """Sum the squares of gradients up to this pipeline rank, hand them on; return the tasks after which they are there.

    Messages are tagged as the last weight gradient of a stage of the rank's number, which itself sends nothing.
    """
    inside = [TP_GROUP.name] if low.plan.layout.tp > 1 else []
    if low.plan.layout.has_expert_mesh and any(group.name == EXPERTS for group in low.plan.trained_groups):
        inside.append(ETP_EP_GROUP.name)
    sums = (CommOp(_NORM, CollectiveType.ALL_REDUCE, role, NORM_BYTES) for role in inside)
    kernels = [*kernels, *(Operation(comm_op, WorkType.OPTIMIZER) for comm_op in sums)]
    there: tuple[int, ...] = (_squares(low, kernels),)
    for role in dict.fromkeys(group.shard_group for group in low.plan.trained_groups if group.shard_count > 1):
        if role is not None:
            there = (low.communicate(CommOp(_NORM, CollectiveType.ALL_REDUCE, role.name, NORM_BYTES), there),)
    message = CommOp(_NORM, CollectiveType.SEND_RECV, PP_NEXT_GROUP.name, NORM_BYTES)
    tag = Action(rank, ActionKind.WEIGHT_GRADIENT, low.plan.microbatches - 1)
    if rank > 0:
        there = (*there, low.tasks.add(Stream.RECEIVE, ReceiveTask(message, tag)))
    if rank + 1 < low.plan.layout.pp:
        low.tasks.add(Stream.SEND_NEXT, SendTask(message, tag._replace(stage=rank + 1), there))
    return there


def _squares(low: Lowering, operations: list[Operation]) -> int:
    """Sum the squares of this rank's gradients once they are reduced, where they are; return the task."""
    after = tuple(low.reducing)
    if low.plan.training.offload.offloads_gradients:
        read = sum(operation.kernel.bytes for operation in operations if operation.kernel is not None)
        after = (low.host.run(HostOpKind.ON_HOST, f"{_NORM} on the host", read, after),)
        operations = [operation for operation in operations if operation.kernel is None]
    block = low.blocks.block(("norm", tuple(operations)), "gradient norm", operations)
    return low.tasks.add(Stream.COMPUTE, ComputeTask(block, after))


def _steps(kernels: tuple[Kernel, ...]) -> list[Operation]:
    return [Operation(kernel, WorkType.OPTIMIZER) for kernel in kernels]
