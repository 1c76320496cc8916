"""State that simulated ranks share: event loop, program, costs, network, pending collectives, message delivery.

It also answers what a rank must know of the others before it runs a segment:

    is_isolated          no other simulated rank takes part and no link is shared: the segment is one event
    sync_group           all synchronization inside is with the same ranks: the segment is one event per member, or,
                         where its comm ops share links or are of several kinds of groups, one process of the group
    is_contended         a comm op shares links: it becomes a flow of the fluid network
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from clustersim.common.cached_method import cached_by, cached_method
from clustersim.common.units import Seconds
from clustersim.cost.contention import ContentionMap
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.kernel.background_traffic import run_background_flow
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.network.flow_demands import FlowDemands
from clustersim.engine.kernel.network.fluid_network import FluidNetwork
from clustersim.engine.kernel.rendezvous import Rendezvous, RendezvousRegistry
from clustersim.engine.kernel.transfers import ContendedTransfers, Transfers, UncontendedTransfers
from clustersim.engine.recording.recorder import Recorder
from clustersim.engine.scalar.group_segments import GroupSegments
from clustersim.engine.scalar.joint_run import JointSegments
from clustersim.engine.scalar.segment_curves import SegmentCurves
from clustersim.program.action import Action
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import CommOp, Operation, ReceiveTask, Segment, SendTask, Stream
from clustersim.symmetry.refinement import SymmetryClasses

_RECEIVE: Final = Stream.RECEIVE  # module constant: read for every message
ReceiveTasks = Mapping[tuple[str, Action], int]
"""Receive tasks of a rank: task id by kind of pair and message tag."""


class SyncGroup(NamedTuple):
    """The ranks with which a rank synchronizes in a segment: its group of this kind, and of any other kind.

    is_stepwise: comm ops share links, or are of several kinds of groups, so that it is run step by step (`JointRun`).
    """

    comm_group: str
    is_stepwise: bool


class TaskListener(Protocol):
    """Interface of a rank to those that complete its tasks, such as the sender of a message."""

    def finish_task(self, task_id: int) -> None:
        """Mark a task as done."""


@dataclass
class SharedState:
    """Shared state of one simulation; nothing in it outlives the simulation.

    coalesce: isolated segments are single events; contention_map: which comm ops share links, None: no network;
    environment, network: event loop and links, shared between co-scheduled jobs; ranks: the simulated ranks by
    id.
    """

    program: Program
    classes: SymmetryClasses
    cost: SegmentCost
    coalesce: bool = True
    contention_map: ContentionMap | None = None
    jitter: Jitter | None = None
    environment: SimEnvironment = field(default_factory=SimEnvironment)
    network: FluidNetwork | None = None
    recorder: Recorder = field(default_factory=Recorder)
    ranks: dict[int, TaskListener] = field(default_factory=dict)
    transfers: Transfers = field(init=False)
    progress_curves: SegmentCurves = field(init=False)
    group_segments: GroupSegments = field(init=False)
    joint_segments: JointSegments = field(init=False)
    _rendezvous: RendezvousRegistry = field(init=False)
    _group_cache: dict[tuple[str, int], tuple[tuple[str, int], int]] = field(init=False, default_factory=dict)
    _isolated_cache: dict[tuple[Segment, int, bool], bool] = field(init=False, default_factory=dict)
    _sync_group_cache: dict[tuple[Segment, int], list[tuple[str, int]]] = field(init=False, default_factory=dict)
    _receiver_cache: dict[tuple[str, int], tuple[int, ReceiveTasks]] = field(init=False, default_factory=dict)
    _task_count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._rendezvous = RendezvousRegistry(self.environment)
        self.progress_curves = SegmentCurves(self.program, self.cost, self.jitter)
        self.group_segments = GroupSegments(self.environment, self.program, self.classes, self.cost, self.jitter)
        self.joint_segments = JointSegments(self.environment, self.recorder, self.cost)
        if self.contention_map is None:
            self.transfers = UncontendedTransfers(self.environment, self.cost)
        else:
            environment, link_colours = self.environment, self.classes.link_colours
            network = self.network = self.network or FluidNetwork(environment, self.classes.link_class_count)
            self.transfers = ContendedTransfers(
                environment, FlowDemands(self.program, self.classes, self.contention_map.demands), network
            )
            for flow in self.contention_map.background:
                environment.process(run_background_flow(environment, network, flow, link_colours, self._is_finished))

    def _is_finished(self) -> bool:
        """Whether all simulated ranks are done."""
        if not self._task_count:
            self._task_count = sum(len(self.rank_program(rank).tasks) for rank in self.ranks)
        return self.recorder.span_count >= self._task_count

    def rank_program(self, rank: int) -> RankProgram:
        """The program of a rank."""
        return self.program.programs[self._program_of(rank)]

    def _program_of(self, rank: int) -> int:
        return int(self.program.program_index[rank])

    @cached_by(_program_of)
    def stream_task_ids(self, rank: int) -> Mapping[Stream, list[int]]:
        """The tasks of each stream of a rank, in order."""
        streams = np.frombuffer(bytes(self.rank_program(rank).streams), np.uint8)
        return {Stream(stream): np.flatnonzero(streams == stream).tolist() for stream in np.unique(streams).tolist()}

    def join_collective(self, rank: int, comm_op: CommOp, stream: Stream) -> Rendezvous:
        """The pending collective, shared with the other simulated members, that is the rank's next one on a stream."""
        group, member_count = self.group_of_rank(comm_op.comm_group, rank)
        return self._rendezvous.join((group, stream), rank, member_count)

    def is_isolated(self, rank: int, segment: Segment, *, no_overlap: bool = False) -> bool:
        """Whether the segment may be one event: its comm ops involve no other simulated rank and share no links.

        no_overlap: no DP or EP collective of the rank can run concurrently.
        """
        if not self.coalesce:
            return False
        isolated = self._isolated_cache.get((segment, rank, no_overlap))
        if isolated is None:
            comm_ops = segment.distinct_comm_ops
            isolated = not any(
                self.synchronizes(rank, comm_op) or self.is_contended(rank, comm_op, no_overlap=no_overlap)
                for comm_op in comm_ops
            )
            self._isolated_cache[segment, rank, no_overlap] = isolated
        return isolated

    @cached_method
    def sync_group(self, rank: int, segment: Segment) -> SyncGroup | None:
        """The group that runs a rank's segment together (`GroupSegments`, `JointRun`); None: each rank by itself.

        All members must agree: one of two that synchronize may also synchronize with other ranks.
        """
        comm_groups = self._sync_kinds(rank, segment) if self.coalesce else ()
        return self._agree_on_group(rank, segment, comm_groups) if comm_groups else None

    @cached_by(lambda self, rank, segment, comm_groups: (segment, self.group_of_rank(comm_groups[0], rank)[0]))
    def _agree_on_group(self, rank: int, segment: Segment, comm_groups: tuple[str, ...]) -> SyncGroup | None:
        """The group of these kinds, if all members say so and share links in its comm ops only, without kernels."""
        members = self._simulated_members(comm_groups[0], rank)
        if any(self._sync_kinds(member, segment) != comm_groups for member in members):
            return None
        contended = {tuple(self._contended_operations(member, segment)) for member in members}
        if len(contended) > 1 or not all(
            operation.comm_op is not None and operation.comm_op.comm_group in comm_groups and operation.kernel is None
            for operation in next(iter(contended))
        ):
            return None
        return SyncGroup(comm_groups[0], len(comm_groups) > 1 or any(contended))

    def _contended_operations(self, rank: int, segment: Segment) -> list[Operation]:
        """The operations of a segment that share links."""
        comm_ops = ((operation, operation.comm_op) for operation in segment.distinct_operations)
        return [
            operation for operation, comm_op in comm_ops if comm_op is not None and self.is_contended(rank, comm_op)
        ]

    def _sync_kinds(self, rank: int, segment: Segment) -> tuple[str, ...]:
        """The kinds of groups with which a rank synchronizes in a segment, if all its groups have the same members.

        None if these also synchronize outside segments.
        """
        comm_groups = dict.fromkeys(comm_op.comm_group for comm_op in segment.distinct_comm_ops)
        kinds = tuple(comm_group for comm_group in comm_groups if self.group_of_rank(comm_group, rank)[1] > 1)
        members = [self._simulated_members(comm_group, rank) for comm_group in kinds]
        is_one_group = all(entry == members[0] for entry in members) and all(map(self._is_segment_internal, kinds))
        return kinds if is_one_group else ()

    @cached_method
    def _is_segment_internal(self, comm_group: str) -> bool:
        return self.program.is_segment_internal(comm_group)

    @cached_by(lambda self, comm_group, rank: self.group_of_rank(comm_group, rank)[0])
    def _simulated_members(self, comm_group: str, rank: int) -> tuple[int, ...]:
        """The simulated ranks that stand for the members of a rank's group."""
        members = self.program.groups[comm_group].members[self.program.group_indices[comm_group][rank]]
        return tuple(sorted(set(self.classes.representative[members].tolist())))

    def record_sync(self, rank: int, task_id: int, segment: Segment) -> None:
        """Record with which groups task `task_id` of a rank synchronized inside its segment."""
        self.recorder.add_sync(rank, task_id, self._sync_groups(rank, segment))

    def _sync_groups(self, rank: int, segment: Segment) -> list[tuple[str, int]]:
        """Keys of the groups with which a rank synchronizes inside a segment, in the order of their first comm ops."""
        sync_groups = self._sync_group_cache.get((segment, rank))
        if sync_groups is None:
            groups = dict.fromkeys(
                self.group_of_rank(comm_op.comm_group, rank) for comm_op in segment.distinct_comm_ops
            )
            sync_groups = self._sync_group_cache[segment, rank] = [
                group_key for group_key, member_count in groups if member_count > 1
            ]
        return sync_groups

    def is_contended(self, rank: int, comm_op: CommOp, *, no_overlap: bool = False) -> bool:
        """Whether a comm op inside a segment shares links with other traffic, in the rank's group.

        no_overlap: no DP or EP collective of the rank can run concurrently, nor of the members that it stands for.
        """
        if self.contention_map is None or comm_op not in self.contention_map.contended:
            return False
        group_index = self.program.group_indices[comm_op.comm_group][rank]
        is_uncontended = (
            no_overlap and self.contention_map.self_only[comm_op][group_index] and not self.synchronizes(rank, comm_op)
        )
        return bool(self.contention_map.contended[comm_op][group_index] and not is_uncontended)

    def synchronizes(self, rank: int, comm_op: CommOp) -> bool:
        """Whether other simulated ranks take part in a comm op."""
        return self.group_of_rank(comm_op.comm_group, rank)[1] > 1

    def deliver_message(self, sender: int, send: SendTask, start: Seconds, predecessor: int) -> None:
        """Complete the receive task of a message that has arrived, and record its span."""
        comm_group = send.comm_op.comm_group
        receiver, receive_tasks = self._receiver_of(comm_group, sender)
        task_id, now = receive_tasks[comm_group, send.tag], self.environment.now
        self.recorder.add_span((receiver, task_id, _RECEIVE, predecessor, start, start, start, now, 0.0, 0.0))
        self.ranks[receiver].finish_task(task_id)

    def _receiver_of(self, comm_group: str, sender: int) -> tuple[int, ReceiveTasks]:
        """The simulated rank that stands for the receiver of a rank's messages, and its receive tasks."""
        result = self._receiver_cache.get((comm_group, sender))
        if result is None:
            pair = self.program.groups[comm_group].members[self.program.group_indices[comm_group][sender]]
            receiver = int(self.classes.representative[pair[1]])
            result = self._receiver_cache[comm_group, sender] = receiver, self._receive_tasks_of(receiver)
        return result

    def group_of_rank(self, comm_group: str, rank: int) -> tuple[tuple[str, int], int]:
        """Key of the rank's group (kind, colour), and how many simulated ranks stand for its members."""
        result = self._group_cache.get((comm_group, rank))
        if result is None:
            group_index = self.program.group_indices[comm_group][rank]
            group_key = comm_group, int(self.classes.group_colours[comm_group][group_index])
            result = self._group_cache[comm_group, rank] = group_key, self._member_count(*group_key, group_index)
        return result

    @cached_by(lambda _self, comm_group, colour, _group_index: (comm_group, colour))
    def _member_count(self, comm_group: str, _colour: int, group_index: int) -> int:
        """How many simulated ranks stand for the members of a group, the same for all of its colour."""
        members = self.program.groups[comm_group].members[group_index]
        return len(np.unique(self.classes.rank_colours[members]))

    @cached_by(_program_of)
    def _receive_tasks_of(self, rank: int) -> ReceiveTasks:
        tasks = self.rank_program(rank).tasks
        return {
            (task.comm_op.comm_group, task.tag): task_id
            for task_id in self.stream_task_ids(rank).get(_RECEIVE, ())
            if isinstance(task := tasks[task_id], ReceiveTask)
        }
