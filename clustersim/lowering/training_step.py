"""Lowering: which program does each kind of rank run in one training step?

Ranks of one pipeline rank run the same tasks, whatever their coordinates on the other axes. A pipeline rank
works through its schedule: it waits for the activations (or gradients) of a pass, runs it, and sends its
output. After the last backward come the remaining gradient reductions, the global gradient norm, and the
optimizer. The two passes of an `OverlappedPair` are interleaved if MoE communication overlaps computation
(`layout.overlap_moe_expert_parallel_comm`), otherwise they run one after the other; in an interleaved pair the
inputs of both passes are received first, and each output is sent when its pass is done.

All ranks wait for the gradient norm, except with a zero-bubble schedule, whose pipeline ranks start and
finish in a staggered way: there the optimizer waits for the partial norm of the stages up to its own,
passed along the pipeline. Whether the full norm would have changed the update is validated during the next
step's warm-up (Qi et al. 2023, arXiv:2401.10241, section 4); here it never does, and the validation costs
nothing.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from clustersim.lowering.data_parallel import select_data_lowering
from clustersim.lowering.overheads import (
    add_batch_fetch,
    add_gradient_zeroing,
    add_microbatch_loss,
    add_norm_gradient_sync,
    add_pass_overhead,
    add_step_loss,
    add_step_overhead,
    add_weight_casts,
    optimizer_operations,
)
from clustersim.lowering.program_builder import DataParallelLowering, RankProgramBuilder, StagePass
from clustersim.lowering.task_list import SegmentCache
from clustersim.lowering.units import UnitBuilder
from clustersim.model.gradient_kernels import unscale_kernels, unscales_gradients, upcast_kernels, with_upcast_gradients
from clustersim.model.layers import gradient_norm_kernels, optimizer_step_kernels
from clustersim.model.offload import HostUpdate
from clustersim.model.operators import DENSE, EXPERTS
from clustersim.model.optimizer_kernels import separate_pass_bytes
from clustersim.model.optimizers import AnyOptimizer, MatrixOptimizer
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.training import ALL_FUSED, Training
from clustersim.model.unattributed import NO_UNATTRIBUTED_WORK, UnattributedWork
from clustersim.parallel.expert_load_factors import build_load_factors
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import (
    EMBEDDING_GROUP,
    ETP_EP_GROUP,
    FROM_ENCODER_GROUP,
    PIPELINE,
    PP_NEXT_GROUP,
    TO_ENCODER_GROUP,
    TP_GROUP,
)
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
    HostOpKind,
    Operation,
    ReceiveTask,
    SendTask,
    Stream,
    WorkType,
)
from clustersim.schedules.validation import runs_with_paired_sends

NORM_BYTES = 4.0  # one fp32 sum of squares
_NORM_NAME: Final = "gradient norm"
_PAIRED_KINDS: Final = (FORWARD, BACKWARD)
_RECEIVE_STREAM: Final = Stream.RECEIVE
_SEND_STREAM: Final = {True: Stream.SEND_NEXT, False: Stream.SEND_PREVIOUS}
_ENCODER_STREAMS: Final = {FROM_ENCODER_GROUP.name: Stream.IMAGES, TO_ENCODER_GROUP.name: Stream.SEND_PREVIOUS}
"""Streams of what goes between the model and an encoder on ranks of its own.

Nothing else is on them there, so that those who receive have posted their buffers when a sender is ready.
"""


def lower_step(
    plan: Plan,
    order: PipelineOrder,
    step_count: int = 1,
    unattributed: UnattributedWork = NO_UNATTRIBUTED_WORK,
) -> Program:
    """The program of one training step.

    order: the schedule entries of every pipeline rank; step_count: number of steps to draw expert loads for;
    unattributed: work of no operator, of which a record has the times.
    """
    groups = process_groups(plan.layout, plan.placement, plan.embedding_ranks)
    if plan.layout.data.is_single_process:
        from clustersim.lowering.torch_data_parallel import lower_torch_data_parallel

        return lower_torch_data_parallel(plan, groups)
    segments, units, backward_kinds, paired_sends = (
        SegmentCache(),
        UnitBuilder(plan),
        _backward_kinds(order),
        _has_paired_sends(plan, order),
    )
    programs = tuple(
        _lower_rank(
            RankProgramBuilder(
                plan, units, segments, _final_backwards(entries), backward_kinds, paired_sends, unattributed
            ),
            rank,
            entries,
        )
        for rank, entries in enumerate(order)
    )
    used_groups = {comm_op.comm_group for program in programs for comm_op in program.comm_ops}
    return Program(
        programs=programs,
        program_index=plan.layout.rank_coordinates(PIPELINE),
        groups={comm_group: group for comm_group, group in groups.items() if comm_group in used_groups},
        expert_loads=build_load_factors(plan, step_count),
    )


def _backward_kinds(order: PipelineOrder) -> dict[tuple[int, int], ActionKind]:
    """Kind under which the gradient of (stage, microbatch) is received: full backward or input gradient."""
    receiving_kinds = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
    actions = (action for steps in order for action in flatten_entries(steps) if action.kind in receiving_kinds)
    return {(action.stage, action.microbatch): action.kind for action in actions}


def _final_backwards(entries: tuple[ScheduleEntry, ...]) -> frozenset[Action]:
    """The last action of each stage that completes weight gradients."""
    completing_kinds = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
    return frozenset(
        {action.stage: action for action in flatten_entries(entries) if action.kind in completing_kinds}.values()
    )


def _lower_rank(builder: RankProgramBuilder, rank: int, entries: tuple[ScheduleEntry, ...]) -> RankProgram:
    """The tasks of every rank with this pipeline coordinate."""
    data_lowering = select_data_lowering(builder.plan)
    stages = builder.plan.stages_on_rank(rank)
    data_lowering.begin_step(builder, stages)
    add_gradient_zeroing(builder, stages)
    add_weight_casts(builder, stages)
    _lower_passes(builder, data_lowering, _flatten_dependent_pairs(builder.plan, entries))
    last_task = builder.last_compute or 0
    data_lowering.reduce_gradients(builder, stages, last_task)
    _reduce_tied_embeddings(builder, stages, last_task)
    add_norm_gradient_sync(builder, stages)
    splits_backward, layout = ActionKind.INPUT_GRADIENT in builder.backward_kinds.values(), builder.plan.layout
    passes_norm = splits_backward and layout.pp > 1 and not layout.encoder_ranks
    optimizer_task = _add_optimizer(builder, stages, rank if passes_norm else None)
    data_lowering.end_step(builder, stages, optimizer_task)
    add_step_loss(builder, stages, optimizer_task)
    add_step_overhead(builder, optimizer_task)
    return builder.tasks.build()


def _flatten_dependent_pairs(plan: Plan, entries: tuple[ScheduleEntry, ...]) -> list[ScheduleEntry]:
    """Schedule entries; pairs whose passes are not interleaved become two separate actions."""
    overlaps_moe = plan.layout.overlap_moe_expert_parallel_comm
    return [
        kept_entry
        for entry in entries
        for kept_entry in ((entry,) if overlaps_moe and _is_independent(entry) else flatten_entry(entry))
    ]


def _is_independent(entry: ScheduleEntry) -> bool:
    """Whether no pass of an entry reads the output of another pass of it."""
    return isinstance(entry, Action) or entry.forward[::2] != entry.backward[::2]


def _lower_passes(
    builder: RankProgramBuilder, data_lowering: DataParallelLowering, entries: list[ScheduleEntry]
) -> None:
    """Issue all passes of a rank, and their p2p messages."""
    awaited: tuple[int, ...] = ()
    held_forward: Action | None = None
    for entry, next_entry in zip(entries, (*entries[1:], None), strict=True):
        if isinstance(entry, OverlappedPair):
            awaited = _lower_overlapped_pair(builder, data_lowering, entry, awaited)
            continue
        last_task, loss_tasks = _lower_pass(builder, data_lowering, entry, awaited)
        if builder.paired_sends and isinstance(next_entry, Action) and (entry.kind, next_entry.kind) == _PAIRED_KINDS:
            held_forward, awaited = entry, loss_tasks
            continue
        awaited = () if held_forward is None else _add_send(builder, held_forward, last_task)
        awaited, held_forward = (*awaited, *_add_send(builder, entry, last_task), *loss_tasks), None


def _lower_pass(
    builder: RankProgramBuilder, data_lowering: DataParallelLowering, action: Action, depends_on: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """Issue a pass; return the task that completes its output, and the loss tasks that the next pass waits for."""
    received = _add_receive(builder, StagePass(builder.plan.stages[action.stage], action, depends_on))
    stage_pass = add_batch_fetch(builder, add_pass_overhead(builder, received))
    last_task = data_lowering.lower_pass(builder, stage_pass)
    return last_task, add_microbatch_loss(builder, stage_pass, last_task)


def _lower_overlapped_pair(
    builder: RankProgramBuilder, data_lowering: DataParallelLowering, pair: OverlappedPair, depends_on: tuple[int, ...]
) -> tuple[int, ...]:
    """Issue a forward and a backward interleaved; return the tasks that the next pass waits for because of them."""
    builder.in_overlapped_pair, forward_begin = True, len(builder.tasks)
    forward, loss_tasks = _lower_pass(builder, data_lowering, pair.forward, depends_on)
    backward_begin = len(builder.tasks)
    backward, _ = _lower_pass(builder, data_lowering, pair.backward, depends_on)
    builder.tasks.interleave(forward_begin, backward_begin)
    builder.in_overlapped_pair = False
    return (*_add_send(builder, pair.forward, forward), *_add_send(builder, pair.backward, backward), *loss_tasks)


def _add_receive(builder: RankProgramBuilder, stage_pass: StagePass) -> StagePass:
    """Wait for the message from another pipeline rank.

    Without sequence parallelism its tensor-parallel slices are all-gathered on arrival.
    """
    stage, action, depends_on, _ = stage_pass
    key = action.stage, action.kind
    if key not in builder.stage_inputs:
        builder.stage_inputs[key] = _stage_input(builder, *key)
    message, input_operations = builder.stage_inputs[key]
    if message is None:
        return stage_pass
    if stream := _ENCODER_STREAMS.get(message.comm_group):
        task = builder.tasks.add(stream, CollectiveTask(message))
    else:
        task = builder.tasks.add(_RECEIVE_STREAM, ReceiveTask(message, action))
    return StagePass(stage, action, (*depends_on, task), input_operations)


def _stage_input(
    builder: RankProgramBuilder, stage: int, kind: ActionKind
) -> tuple[CommOp | None, tuple[Operation, ...]]:
    """The message that passes of a stage receive (None: none), and the operations applied to it before they run."""
    plan, forward = builder.plan, kind is FORWARD
    source = stage + (-1 if forward else 1)
    message, group = _stage_message(builder, kind, source, stage), plan.tensor_group(stage)
    if message is None or group is None or (group is TP_GROUP and plan.layout.sequence_parallel):
        return message, ()
    size = plan.encoder.output_bytes if group is not TP_GROUP and plan.encoder else plan.sent_bytes(min(source, stage))
    gather = CommOp("gather stage input", CollectiveType.ALL_GATHER, group.name, size)
    return message, (Operation(gather, WorkType.FORWARD if forward else WorkType.BACKWARD),)


def _stage_message(
    builder: RankProgramBuilder, kind: ActionKind, source_stage: int, target_stage: int
) -> CommOp | None:
    """The message with a pass's output from stage to stage; None where nothing is sent."""
    return None if kind is ActionKind.WEIGHT_GRADIENT else builder.p2p_message(source_stage, target_stage)


def _has_paired_sends(plan: Plan, order: PipelineOrder) -> bool:
    """Whether a forward's output is sent together with that of the backward right behind it.

    Megatron-LM's interleaved schedule does so where p2p is not overlapped: after each forward and backward of
    the steady phase it sends in both directions at once (`send_forward_backward_recv_forward_backward`). It
    requires the microbatches to be a multiple of the pipeline size, and runs all forwards first if the two are
    equal. An order that would deadlock with paired sends is not Megatron's: there each output is sent by
    itself.
    """
    if plan.layout.overlap_p2p_comm or plan.placement.max_chunks == 1:
        return False
    is_steady = plan.microbatches > plan.layout.pp and plan.microbatches % plan.layout.pp == 0
    return is_steady and runs_with_paired_sends(order)


def _add_send(builder: RankProgramBuilder, action: Action, last_task: int) -> tuple[int, ...]:
    """Send a pass's output; return the tasks that the next pass must wait for because of it."""
    stage, kind, microbatch = action
    forward = kind is FORWARD
    target = stage + (1 if forward else -1)
    key = stage, kind
    if key not in builder.stage_outputs:
        builder.stage_outputs[key] = _stage_message(builder, kind, stage, target)
    message = builder.stage_outputs[key]
    if message is None:
        return ()
    if stream := _ENCODER_STREAMS.get(message.comm_group):
        task = builder.tasks.add(stream, CollectiveTask(message, (last_task,)))
        return () if builder.plan.layout.overlap_p2p_comm else (task,)
    tag = Action(target, kind if forward else builder.backward_kinds[target, microbatch], microbatch)
    task = builder.tasks.add(_SEND_STREAM[forward], SendTask(message, tag, (last_task,)))
    return () if builder.plan.layout.overlap_p2p_comm else (task,)


def _reduce_tied_embeddings(builder: RankProgramBuilder, stages: tuple[PipelineStage, ...], last_task: int) -> None:
    """All-reduce the gradients of tied embeddings, which several pipeline ranks hold."""
    embedding_ranks = builder.plan.embedding_ranks
    holds_embedding = any(builder.plan.placement.stage_ranks[stage.index] in embedding_ranks for stage in stages)
    (dense,) = (group for group in builder.plan.parameter_groups if group.name == DENSE)
    if not (len(embedding_ranks) > 1 and holds_embedding and dense.is_trained):
        return
    vocab_rows = builder.plan.layer_shard.vocab_rows(builder.plan.model.vocab)
    shard_count = (
        dense.shard_count if builder.plan.layout.data.zero_stage > 1 else 1
    )  # ZeRO-2 and -3 hold a shard of the gradient
    gradient_dtype = dense.formats.gradients
    payload = float(vocab_rows * builder.plan.model.hidden * gradient_dtype.bytes / shard_count)
    comm_op = CommOp(
        "reduce tied embedding", CollectiveType.ALL_REDUCE, EMBEDDING_GROUP.name, payload, reduce_dtype=gradient_dtype
    )
    builder.reduction_tasks.append(
        builder.tasks.add(Stream.DP, CollectiveTask(comm_op, (last_task, *builder.reduction_tasks[-1:])))
    )


def _add_optimizer(builder: RankProgramBuilder, stages: tuple[PipelineStage, ...], pipeline_rank: int | None) -> int:
    """Clip and apply the gradients that this rank updates; return the optimizer's task id.

    pipeline_rank: own pipeline rank, where the norm is passed along the pipeline; None: it is all-reduced at
    once.
    """
    plan = builder.plan
    updates = list(_updated_parameters(plan, stages))
    prepare = _prepare_gradients(builder, updates, norm_all_reduced=pipeline_rank is None)
    updates = [(with_upcast_gradients(training), count) for training, count in updates]
    depends_on = tuple(builder.reduction_tasks)
    if plan.training.gradient_clipping:
        kernels = [
            *prepare,
            *(
                optimizer_operation
                for training, count in updates
                for optimizer_operation in optimizer_operations(gradient_norm_kernels(training, count))
            ),
        ]
        depends_on, prepare = (
            _add_global_norm(builder, kernels)
            if pipeline_rank is None
            else _add_running_norm(builder, pipeline_rank, kernels),
            [],
        )
    host_share = plan.training.offload.share
    device_updates = [(training, (1.0 - host_share) * count) for training, count in updates if host_share < 1.0]
    if isinstance(plan.training.optimizer, MatrixOptimizer):
        from clustersim.lowering.matrix_updates import add_matrix_updates

        return add_matrix_updates(builder, stages, device_updates, (prepare, depends_on))
    operations = [
        *prepare,
        *(
            operation
            for training, count in device_updates
            for operation in optimizer_operations(optimizer_step_kernels(training, count))
        ),
    ]
    host_tasks = list(
        _add_host_updates(builder, sum(len(builder.units.stage_units(stage)) for stage in stages), updates, depends_on)
    )
    if not host_tasks:
        return builder.add_standalone("optimizer", operations, depends_on)
    if operations:
        builder.add_standalone("optimizer", operations, depends_on)
    return builder.add_standalone(
        "optimizer", [], (host_tasks[-1],)
    )  # the step ends when the weights are back on the device


def _prepare_gradients(
    builder: RankProgramBuilder, updates: list[tuple[Training, float]], *, norm_all_reduced: bool
) -> list[Operation]:
    """Upcast and unscale device gradients for the optimizer; return operations still to be run.

    In FP16 all ranks of a model learn whether gradients are finite before anything else is done with them;
    where the norm is passed along the pipeline (not `norm_all_reduced`) that information travels with it.
    """
    if builder.plan.training.offload.offloads_gradients:
        return []
    operations = [
        optimizer_operation
        for training, count in updates
        for optimizer_operation in optimizer_operations(upcast_kernels(training, count))
    ]
    operations += [
        operation
        for training, count in updates
        for operation in optimizer_operations(unscale_kernels(with_upcast_gradients(training), count))
    ]
    if not (norm_all_reduced and unscales_gradients(builder.plan.training)):
        return operations
    task = builder.add_standalone("unscale gradients", operations, builder.reduction_tasks)
    builder.reduction_tasks = [*_all_reduce_over_copy(builder, "found infinite", task)]
    return []


def _add_host_updates(
    builder: RankProgramBuilder, slice_count: int, updates: list[tuple[Training, float]], depends_on: tuple[int, ...]
) -> Iterator[int]:
    """Update the host's share of the parameters in slices; yield the tasks after which weights are there."""
    offload = builder.plan.training.offload
    is_sequential = offload.update is HostUpdate.SEQUENTIAL
    previous: tuple[int, ...] = ()
    for training, count in (update for update in updates if update[1] and offload.states is not None):
        slice_parameters, formats = offload.share * count / slice_count, training.recipe.weight_formats
        (kernel,) = optimizer_step_kernels(replace(training, fused=ALL_FUSED), slice_parameters)
        update_bytes = kernel.bytes + is_sequential * slice_parameters * separate_pass_bytes(formats)
        for _ in range(slice_count):
            inputs = depends_on
            if not offload.offloads_gradients:
                inputs = (
                    builder.host_tasks.add_host_op(
                        HostOpKind.D2H, "offload gradients", slice_parameters * formats.gradients.bytes, depends_on
                    ),
                )
            task = builder.host_tasks.add_host_op(
                HostOpKind.ON_HOST, "optimizer on the host", update_bytes, (*inputs, *previous)
            )
            if not offload.offloads_shards:
                task = builder.host_tasks.add_host_op(
                    HostOpKind.H2D, "fetch weights", slice_parameters * formats.stored.bytes, (task,)
                )
            previous = (task,) if is_sequential else ()
            yield task


def _updated_parameters(plan: Plan, stages: tuple[PipelineStage, ...]) -> Iterator[tuple[Training, float]]:
    """Number of parameters a rank updates, by weight formats and optimizer, as a `Training` with these."""
    counts: dict[tuple[WeightFormats, AnyOptimizer], float] = {}
    for group in plan.trained_groups:
        parameter_count = sum(plan.parameter_count(stage, group.name) for stage in stages)
        key = group.formats, group.optimizer
        counts[key] = counts.get(key, 0.0) + parameter_count / group.shard_count
    for (formats, optimizer), count in counts.items():
        yield replace(plan.with_weight_formats(formats), optimizer=optimizer), count


def _add_global_norm(builder: RankProgramBuilder, kernels: list[Operation]) -> tuple[int, ...]:
    """Sum the squares of all gradients; return the tasks after which the global sum is available."""
    squares_task = _add_squared_sum(builder, kernels)
    return _all_reduce_over_copy(builder, _NORM_NAME, squares_task)


def _all_reduce_over_copy(builder: RankProgramBuilder, name: str, task: int) -> tuple[int, ...]:
    """All-reduce a scalar over the ranks that hold one copy of the gradients, for each parameter group."""
    comm_groups = single_copy_groups(builder.plan.layout, builder.plan.trained_groups)
    comm_ops = (CommOp(name, CollectiveType.ALL_REDUCE, comm_group.name, NORM_BYTES) for comm_group in comm_groups)
    return tuple(builder.add_dp_collective(comm_op, (task,)) for comm_op in comm_ops)


def _add_running_norm(builder: RankProgramBuilder, pipeline_rank: int, kernels: list[Operation]) -> tuple[int, ...]:
    """Sum squared gradients up to this pipeline rank and pass the sum on; return the tasks that complete it.

    The messages' tags are those of the last weight gradient of the stage with the rank's index, which sends
    nothing itself.
    """
    reduce_groups = [TP_GROUP.name] if builder.plan.layout.tp > 1 else []
    if builder.plan.layout.has_expert_mesh and any(group.name == EXPERTS for group in builder.plan.trained_groups):
        reduce_groups.append(ETP_EP_GROUP.name)
    comm_ops = (CommOp(_NORM_NAME, CollectiveType.ALL_REDUCE, comm_group, NORM_BYTES) for comm_group in reduce_groups)
    kernels = [*kernels, *(Operation(comm_op, WorkType.OPTIMIZER) for comm_op in comm_ops)]
    partial_norm: tuple[int, ...] = (_add_squared_sum(builder, kernels),)
    for comm_group in dict.fromkeys(
        group.shard_group for group in builder.plan.trained_groups if group.shard_count > 1
    ):
        if comm_group is not None:
            partial_norm = (
                builder.add_dp_collective(
                    CommOp(_NORM_NAME, CollectiveType.ALL_REDUCE, comm_group.name, NORM_BYTES), partial_norm
                ),
            )
    message = CommOp(_NORM_NAME, CollectiveType.SEND_RECV, PP_NEXT_GROUP.name, NORM_BYTES)
    tag = Action(pipeline_rank, ActionKind.WEIGHT_GRADIENT, builder.plan.microbatches - 1)
    if pipeline_rank > 0:
        partial_norm = (*partial_norm, builder.tasks.add(Stream.RECEIVE, ReceiveTask(message, tag)))
    if pipeline_rank + 1 < builder.plan.layout.pp:
        builder.tasks.add(Stream.SEND_NEXT, SendTask(message, tag._replace(stage=pipeline_rank + 1), partial_norm))
    return partial_norm


def _add_squared_sum(builder: RankProgramBuilder, operations: list[Operation]) -> int:
    """Sum the squares of this rank's reduced gradients, on the device or the host; return the task id."""
    depends_on = tuple(builder.reduction_tasks)
    if builder.plan.training.offload.offloads_gradients:
        bytes_read = sum(operation.kernel.bytes for operation in operations if operation.kernel is not None)
        depends_on = (
            builder.host_tasks.add_host_op(HostOpKind.ON_HOST, f"{_NORM_NAME} on the host", bytes_read, depends_on),
        )
        operations = [operation for operation in operations if operation.kernel is None]
    return builder.add_standalone(_NORM_NAME, operations, depends_on)
