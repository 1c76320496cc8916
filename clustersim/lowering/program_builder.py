"""Builder of one rank's program: turns forwards and backwards through stages into tasks.

Here pipeline and data parallelism meet: the pipeline decides which pass comes next and what it waits for; a
`DataParallelLowering` issues its compute tasks and the data-parallel communication around them.

A pass of an `OverlappedPair` is split at MoE communication and interleaved with the other one
(`lowering.moe_overlap`).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from clustersim.common.cached_method import cached_by, cached_method
from clustersim.common.units import Bytes
from clustersim.lowering.moe_overlap import defer_weight_gradients, split_overlap_phases
from clustersim.lowering.offload import HostTaskIssuer, split_at_host_copies
from clustersim.lowering.task_list import SegmentCache, TaskList
from clustersim.lowering.units import Unit, UnitBuilder, execution_order
from clustersim.model.gradient_kernels import pre_reduction_kernels
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.unattributed import NO_UNATTRIBUTED_WORK, UnattributedWork
from clustersim.parallel.data_parallel_strategy import GradientSync
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import FROM_ENCODER_GROUP, TO_ENCODER_GROUP
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.parallel.plan import Plan
from clustersim.parallel.process_groups import P2P_DIRECTIONS, encoder_group_sizes
from clustersim.program.action import Action, ActionKind
from clustersim.program.task import (
    CollectiveTask,
    CollectiveType,
    CommOp,
    ComputeTask,
    HostOpKind,
    Operation,
    Segment,
    Stream,
    WorkType,
)

_PASS_NAMES: Final = MappingProxyType(
    {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.INPUT_GRADIENT: "input gradient",
        ActionKind.WEIGHT_GRADIENT: "weight gradient",
    }
)


_COMPUTE_STREAM: Final = Stream.COMPUTE
_EP_STREAM: Final = Stream.EP
ParameterCounts = Sequence[tuple[ParameterGroup, int]]
"""Parameter groups, each with a number of parameters."""
SegmentRepeats = Sequence[tuple[Segment, int]]
"""Consecutive segments, each with its number of repetitions."""
PhaseSegments = tuple[Segment | None, tuple[CommOp, ...], Segment | None]
"""Segment that an overlap phase computes, its comm ops, and the segment of deferred weight gradients."""


class StagePass(NamedTuple):
    """An action of the schedule with its dependencies.

    depends_on: task ids that it waits for; input_operations: operations on its received input, run before it. A
    named tuple, as actions are: a step has tens of thousands of them.
    """

    stage: PipelineStage
    action: Action
    depends_on: tuple[int, ...]
    input_operations: tuple[Operation, ...] = ()


def _pass_key(_builder: "RankProgramBuilder", stage_pass: StagePass) -> tuple[int, ActionKind, bool]:
    """Equal for passes with the same operations."""
    return stage_pass.stage.index, stage_pass.action.kind, bool(stage_pass.input_operations)


@dataclass
class RankProgramBuilder:
    """State of lowering one rank.

    stage_inputs, stage_outputs: by stage and kind of pass, the message that it receives with the operations
    applied to it, and the message that it sends; determined at the first microbatch. final_backwards: the last
    backward (or weight gradient) of each of its stages; backward_kinds: by stage and microbatch, on all ranks,
    whether backward is full or begins with its input-gradient half; paired_sends: a forward's output is sent
    together with that of a backward right behind it; unattributed: work of no operator; in_overlapped_pair: the
    current pass is one of an overlapped pair; last_compute: the latest compute task; reduction_tasks: tasks
    that the optimizer waits for.
    """

    plan: Plan
    units: UnitBuilder
    segments: SegmentCache
    final_backwards: frozenset[Action] = frozenset()
    backward_kinds: Mapping[tuple[int, int], ActionKind] = field(default_factory=dict)
    paired_sends: bool = False
    unattributed: UnattributedWork = NO_UNATTRIBUTED_WORK
    in_overlapped_pair: bool = False
    tasks: TaskList = field(default_factory=TaskList)
    last_compute: int | None = None
    reduction_tasks: list[int] = field(default_factory=list)
    stage_inputs: dict[tuple[int, ActionKind], tuple[CommOp | None, tuple[Operation, ...]]] = field(
        default_factory=dict
    )
    stage_outputs: dict[tuple[int, ActionKind], CommOp | None] = field(default_factory=dict)
    _awaited_comm: tuple[int, ...] = ()

    @cached_property
    def host_tasks(self) -> HostTaskIssuer:
        """Issues the rank's host copies and host computation."""
        activations = self.plan.training.offload.activations
        return HostTaskIssuer(self.tasks, 0 if activations is None else activations.buffer_count)

    @cached_property
    def gradient_sync(self) -> GradientSync:
        """When gradients are reduced."""
        return self.plan.layout.gradient_sync

    @cached_property
    def _offloads_nothing(self) -> bool:
        """Whether nothing of a pass is offloaded, so that no segment is split for it."""
        return self.plan.training.offload == NO_OFFLOAD

    @property
    def splits_passes(self) -> bool:
        """Whether passes are split by offloading or by interleaving, whatever the data-parallel strategy."""
        return self.in_overlapped_pair or not self._offloads_nothing

    def add_compute(self, stage_pass: StagePass, key: Hashable, operations: Sequence[Operation]) -> int:
        """Add a compute task whose segment is shared by all passes with this key; return its task id.

        There are several tasks in sequence if activations of inner layers are offloaded or fetched; the last id is
        returned.
        """
        add_slice = self._add_phases if self.in_overlapped_pair else self._add_slice
        if self._offloads_nothing:
            return add_slice(stage_pass, key, operations)
        task, depends_on, input_operations = -1, stage_pass.depends_on, stage_pass.input_operations
        for index, slice_operations in enumerate(split_at_host_copies(operations)):
            inputs = (*depends_on, *self.host_tasks.slice_inputs(stage_pass.action, slice_operations))
            task = add_slice(
                StagePass(stage_pass.stage, stage_pass.action, inputs, input_operations), (key, index), slice_operations
            )
            self.reduction_tasks += self.host_tasks.add_offloads(stage_pass.action, slice_operations, task)
            depends_on, input_operations = (), ()
        return task

    def add_full_pass(self, stage_pass: StagePass) -> int:
        """Add a pass as one unsplit segment; return its last compute task."""
        if self.splits_passes:
            return self.add_compute(
                stage_pass, self.units.stage_class(stage_pass.stage), self.pass_operations(stage_pass)
            )
        return self._add_segment(stage_pass, self._full_segment(stage_pass))

    @cached_by(_pass_key)
    def _full_segment(self, stage_pass: StagePass) -> Segment:
        """The segment of an unsplit pass."""
        return self._pass_segment(
            stage_pass, self.units.stage_class(stage_pass.stage), self.pass_operations(stage_pass)
        )

    def add_unit(self, stage_pass: StagePass, unit: Unit, copy_operations: tuple[Operation, ...]) -> int:
        """Add one unit of a pass, after the copy-out of its gathered parameters; return its last compute task."""
        operations = unit.operations(stage_pass.action.kind)
        return self.add_compute(
            stage_pass,
            (unit, bool(copy_operations)),
            (*copy_operations, *operations) if copy_operations else operations,
        )

    def add_units(self, stage_pass: StagePass) -> int:
        """Add an unsplit pass, one segment per unit; return its last compute task."""
        first_segment, repeats = self._unit_segments(stage_pass)
        task = self._add_segment(stage_pass, first_segment)
        for segment, count in repeats:
            task = self.last_compute = self.tasks.add_repeated(
                _COMPUTE_STREAM, ComputeTask(segment, (), stage_pass.action), count
            )
        return task

    @cached_by(_pass_key)
    def _unit_segments(self, stage_pass: StagePass) -> tuple[Segment, SegmentRepeats]:
        """The segments of a pass's units: the first one, and the others run-length encoded."""
        kind, next_pass = stage_pass.action.kind, StagePass(stage_pass.stage, stage_pass.action, ())
        units = execution_order(self.units.stage_units(stage_pass.stage), kind)
        unit_passes = zip((stage_pass, *[next_pass] * (len(units) - 1)), units, strict=True)
        first, *others = (
            self._pass_segment(unit_pass, (unit, False), unit.operations(kind)) for unit_pass, unit in unit_passes
        )
        return first, [(segment, len([*equal])) for segment, equal in groupby(others)]

    def _add_phases(self, stage_pass: StagePass, key: Hashable, operations: Sequence[Operation]) -> int:
        """Add a slice of a pass in overlap phases; return the last compute task that is not deferred."""
        depends_on, action, last_task = (
            (*stage_pass.depends_on, *self._awaited_comm),
            stage_pass.action,
            self.last_compute or 0,
        )
        add_task = self.tasks.add
        for segment, comm_ops, deferred in self._phase_segments(stage_pass, key, operations):
            if segment is not None:
                last_task = self.last_compute = add_task(_COMPUTE_STREAM, ComputeTask(segment, depends_on, action))
                depends_on = ()
            inputs = depends_on or (last_task,)
            comm_tasks = [add_task(_EP_STREAM, CollectiveTask(comm_op, inputs)) for comm_op in comm_ops]
            if deferred is not None:
                self.last_compute = add_task(_COMPUTE_STREAM, ComputeTask(deferred, (), action))
            if comm_tasks:
                self.tasks.mark_switch_point()
                depends_on = (comm_tasks[-1],)
        self._awaited_comm = depends_on if operations and operations[-1].moe_comm else ()
        return last_task

    @cached_by(lambda _, stage_pass, key, _operations: (stage_pass.action.kind, bool(stage_pass.input_operations), key))
    def _phase_segments(
        self, stage_pass: StagePass, key: Hashable, operations: Sequence[Operation]
    ) -> tuple[PhaseSegments, ...]:
        """Overlap phases of a slice of a pass; operations on received input precede the first phase's computation."""
        phases: list[PhaseSegments] = []
        for index, phase in enumerate(split_overlap_phases(operations)):
            segment = deferred = None
            if phase.compute:
                segment = self._pass_segment(stage_pass, (key, "leg", index), phase.compute)
                stage_pass = StagePass(stage_pass.stage, stage_pass.action, ())
            if phase.deferred_wgrad:
                deferred = self._pass_segment(
                    StagePass(stage_pass.stage, stage_pass.action, ()), (key, "late", index), phase.deferred_wgrad
                )
            phases.append((segment, phase.comm_ops, deferred))
        return tuple(phases)

    def pass_operations(self, stage_pass: StagePass) -> tuple[Operation, ...]:
        """All operations of a pass, with weight gradients deferred if configured."""
        defers_wgrad = (
            self.in_overlapped_pair
            and self.plan.layout.delay_wgrad_compute
            and stage_pass.action.kind is ActionKind.BACKWARD
        )
        if not defers_wgrad:
            return self.units.stage_operations(stage_pass.stage, stage_pass.action.kind)
        return self._deferred_operations(stage_pass.stage)

    @cached_by(lambda _, stage: stage.index)
    def _deferred_operations(self, stage: PipelineStage) -> tuple[Operation, ...]:
        """Operations of a backward through a stage, with deferred weight gradients."""
        return defer_weight_gradients(self.units.stage_units(stage))

    def _add_slice(self, stage_pass: StagePass, key: Hashable, operations: Sequence[Operation]) -> int:
        return self._add_segment(stage_pass, self._pass_segment(stage_pass, key, operations))

    def _pass_segment(self, stage_pass: StagePass, key: Hashable, operations: Sequence[Operation]) -> Segment:
        name, interleaved = _PASS_NAMES[stage_pass.action.kind], self.in_overlapped_pair
        segment_operations = (*stage_pass.input_operations, *operations) if stage_pass.input_operations else operations
        return self.segments.segment(
            (name, bool(stage_pass.input_operations), key, interleaved),
            name,
            segment_operations,
            interleaved=interleaved,
        )

    def _add_segment(self, stage_pass: StagePass, segment: Segment) -> int:
        self.last_compute = self.tasks.add(
            _COMPUTE_STREAM, ComputeTask(segment, stage_pass.depends_on, stage_pass.action)
        )
        return self.last_compute

    def add_standalone(self, name: str, operations: Sequence[Operation], depends_on: Sequence[int]) -> int:
        """Add a compute task that belongs to no pass; return its task id."""
        return self._add_standalone_segment(self._standalone_segment(name, operations), depends_on)

    def add_repeated_standalone(
        self, name: str, operations: Sequence[Operation], depends_on: Sequence[int], count: int
    ) -> int:
        """Add equal compute tasks that belong to no pass, the first after `depends_on`; return the last one's id."""
        segment = self._standalone_segment(name, operations)
        task = self._add_standalone_segment(segment, depends_on)
        return task if count == 1 else self.tasks.add_repeated(Stream.COMPUTE, ComputeTask(segment, ()), count - 1)

    def _standalone_segment(self, name: str, operations: Sequence[Operation]) -> Segment:
        """The segment of a name and operations that are made anew for each pass or rank."""
        content = tuple((operation.body, operation.work_type) for operation in operations)
        return self.segments.segment((name, content), name, operations)

    def _add_standalone_segment(self, segment: Segment, depends_on: Sequence[int]) -> int:
        return self.tasks.add(Stream.COMPUTE, ComputeTask(segment, tuple(depends_on)))

    @cached_method
    def p2p_message(self, source_stage: int, target_stage: int) -> CommOp | None:
        """The p2p message between two stages; each tensor-parallel rank sends its slice (Narayanan 2021, 4.1).

        None where both stages are on this rank, or one of them does not exist.
        """
        if min(source_stage, target_stage) < 0 or max(source_stage, target_stage) >= len(self.plan.stages):
            return None
        if self.plan.layout.encoder_ranks and 0 in (source_stage, target_stage):
            return self._encoder_message(is_forward=target_stage > source_stage)
        is_forward, direction = target_stage > source_stage, self.plan.placement.direction(source_stage, target_stage)
        group = next((group for group, other in P2P_DIRECTIONS.items() if other == direction), None)
        if group is None or not (is_forward or self.plan.receives_gradients(target_stage)):
            return None
        size = self.plan.sent_bytes(min(source_stage, target_stage)) / self.plan.layout.tp
        return CommOp("activations" if is_forward else "gradients", CollectiveType.SEND_RECV, group.name, size)

    def _encoder_message(self, *, is_forward: bool) -> CommOp | None:
        """What an encoder on ranks of its own sends to the model, or the gradient of it; None if it needs none.

        Each rank of the model gets its tensor-parallel slice of the tokens of all images, of which its part of the
        sequence needs some; it returns the gradients of its part.
        """
        layout, size = self.plan.layout, self.plan.sent_bytes(0) / self.plan.layout.tp
        encoder_ranks, model_ranks = encoder_group_sizes(layout)
        if is_forward:
            group, payload = FROM_ENCODER_GROUP.name, model_ranks * size
            return CommOp("images", CollectiveType.SEND_RECV, group, payload, senders=encoder_ranks)
        if not self.plan.receives_gradients(0):
            return None
        group, payload = TO_ENCODER_GROUP.name, model_ranks * size / layout.cp
        return CommOp("gradients of images", CollectiveType.SEND_RECV, group, payload, senders=model_ranks)

    def add_dp_collective(self, comm_op: CommOp, depends_on: Sequence[int]) -> int:
        """Add a collective of data parallelism; return its task id."""
        return self.tasks.add(Stream.DP, CollectiveTask(comm_op, tuple(depends_on)))

    def gather_parameters(
        self, name: str, parameter_counts: ParameterCounts, depends_on: Sequence[int], *, is_regather: bool = False
    ) -> tuple[int, ...]:
        """All-gather parameters of groups from the ranks that hold shards of them; return the tasks.

        Groups sharded over the same ranks are gathered at once, whatever their formats (FSDP2 does, as bytes).
        is_regather: parameters have been gathered since they were last updated, so the secondary shards (hpZ) hold
        them, too. Shards on the host are first copied to the device, in host format; secondary shards stay on the
        device.
        """
        gathers = self._gather_comm_ops(name, parameter_counts, is_regather=is_regather)
        inputs = [
            (self.host_tasks.add_host_op(HostOpKind.H2D, "fetch parameters", h2d_bytes, depends_on),)
            if h2d_bytes
            else depends_on
            for _, h2d_bytes in gathers
        ]
        pairs = zip(gathers, inputs, strict=True)
        return tuple(self.add_dp_collective(comm_op, inputs_ready) for (comm_op, _), inputs_ready in pairs)

    @cached_by(
        lambda _, name, parameter_counts, *, is_regather: (
            name,
            is_regather,
            *((group.name, count) for group, count in parameter_counts),
        )
    )
    def _gather_comm_ops(
        self, name: str, parameter_counts: ParameterCounts, *, is_regather: bool
    ) -> tuple[tuple[CommOp, Bytes], ...]:
        """All-gathers of groups, and the H2D bytes before each."""
        payloads: dict[str, Bytes] = {}
        host_bytes: dict[str, Bytes] = {}
        for group, parameters in parameter_counts:
            uses_secondary = is_regather and group.secondary_group is not None
            comm_group, shard_count = (
                (group.secondary_group, group.secondary_shard_count)
                if uses_secondary
                else (group.shard_group, group.shard_count)
            )
            if comm_group is not None and shard_count > 1 and parameters:
                payloads[comm_group.name] = (
                    payloads.get(comm_group.name, 0.0) + parameters * group.formats.gathered.bytes
                )
                if self.plan.training.offload.offloads_shards and not uses_secondary:
                    host_bytes[comm_group.name] = (
                        host_bytes.get(comm_group.name, 0.0) + parameters * group.host_format.bytes / group.shard_count
                    )
        comm_ops = (
            CommOp(name, CollectiveType.ALL_GATHER, comm_group, payload) for comm_group, payload in payloads.items()
        )
        return tuple((comm_op, host_bytes.get(comm_op.comm_group, 0.0)) for comm_op in comm_ops)

    def reduce_gradients(
        self,
        name: str,
        group: ParameterGroup,
        parameter_count: int,
        depends_on: Sequence[int],
        *,
        across_replicas: bool = True,
    ) -> tuple[int, ...]:
        """Reduce gradients of a group: reduce-scatter over its shards, then all-reduce over its replicas.

        across_replicas: whether the all-reduce is done, too, or left to a later reduction. Where gradients are
        offloaded, they are copied to the host once both are done. Returns the last task, if there is one.
        """
        if not group.is_trained or not parameter_count:
            return ()
        if group.dp_size == 1:
            return self._offload_unreduced(parameter_count * group.formats.gradients.bytes, depends_on)
        prepare_segment, comm_ops, offload_bytes = self._reduction_comm_ops(
            name, group, parameter_count, across_replicas=across_replicas
        )
        if prepare_segment is not None:
            depends_on = (self._add_standalone_segment(prepare_segment, depends_on),)
        last_tasks: tuple[int, ...] = ()
        for comm_op in comm_ops:
            last_tasks = (self.add_dp_collective(comm_op, last_tasks or depends_on),)
        if last_tasks and offload_bytes:
            last_tasks = (self.host_tasks.add_host_op(HostOpKind.D2H, "offload gradients", offload_bytes, last_tasks),)
        return last_tasks

    @cached_by(
        lambda _, name, group, parameter_count, *, across_replicas: (name, group.name, parameter_count, across_replicas)
    )
    def _reduction_comm_ops(
        self, name: str, group: ParameterGroup, parameter_count: int, *, across_replicas: bool
    ) -> tuple[Segment | None, tuple[CommOp, ...], Bytes]:
        """The segment that prepares gradients of a group, their reductions, and the bytes that are then offloaded."""
        kernels = pre_reduction_kernels(self.plan.with_weight_formats(group.formats), parameter_count)
        operations = [Operation(kernel, WorkType.BACKWARD) for kernel in kernels]
        prepare_segment = self._standalone_segment("prepare gradients", operations) if operations else None
        gradient_dtype = group.formats.gradients
        payload = parameter_count * gradient_dtype.bytes
        comm_ops: list[CommOp] = []
        if group.shard_group is not None and group.shard_count > 1:
            comm_ops.append(
                CommOp(
                    name, CollectiveType.REDUCE_SCATTER, group.shard_group.name, payload, reduce_dtype=gradient_dtype
                )
            )
        if across_replicas and group.replicate_group is not None and group.replica_count > 1:
            shard_payload = payload / group.shard_count if group.shard_count > 1 else payload
            comm_ops.append(
                CommOp(
                    name,
                    CollectiveType.ALL_REDUCE,
                    group.replicate_group.name,
                    shard_payload,
                    reduce_dtype=gradient_dtype,
                )
            )
        offloads = (across_replicas or group.replica_count == 1) and self.plan.training.offload.offloads_gradients
        return prepare_segment, tuple(comm_ops), payload / group.shard_count if offloads else 0.0

    def _offload_unreduced(self, size_bytes: Bytes, depends_on: Sequence[int]) -> tuple[int, ...]:
        """Copy gradients that no other rank shares to the host, where others (dense, say) are reduced and copied."""
        if self.plan.offloads_unreduced_gradients or not self.plan.training.offload.offloads_gradients:
            return ()
        return (self.host_tasks.add_host_op(HostOpKind.D2H, "offload gradients", size_bytes, depends_on),)


class DataParallelLowering(Protocol):
    """Interface between pipeline and data parallelism: how passes become tasks of one rank."""

    def begin_step(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage]) -> None:
        """Issue what the step starts with."""

    def lower_pass(self, builder: RankProgramBuilder, stage_pass: StagePass) -> int:
        """Issue one pass; return the id of its last compute task."""

    def reduce_gradients(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage], last_task: int) -> None:
        """Issue the gradient reductions not yet issued during backward; last_task: the last compute task."""

    def end_step(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage], optimizer_task: int) -> None:
        """Issue what follows the optimizer, task `optimizer_task`."""


@dataclass(frozen=True, slots=True)
class NoDataParallelLowering:
    """No data parallelism."""

    def begin_step(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage]) -> None:
        """Nothing to do."""

    def lower_pass(self, builder: RankProgramBuilder, stage_pass: StagePass) -> int:
        """One segment."""
        return builder.add_full_pass(stage_pass)

    def reduce_gradients(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage], last_task: int) -> None:
        """Nothing to do."""

    def end_step(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage], optimizer_task: int) -> None:
        """Nothing to do."""
