"""How does one forward or backward through a stage become tasks of a rank?

The seam between the pipeline and data parallelism: the pipeline says which pass comes next and what it waits for; a
`DataLowering` issues its compute tasks and whatever data parallelism communicates around them.

A pass of a pair is cut where tokens travel to experts and back, and takes turns with the other (`lowering.moe_overlap`).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from clustersim.common.units import Bytes
from clustersim.lowering.moe_overlap import legs, put_off
from clustersim.lowering.offload import HostTasks, pieces
from clustersim.lowering.task_list import Blocks, TaskList
from clustersim.lowering.units import Unit, Units, in_order
from clustersim.model.gradient_kernels import pre_reduction_kernels
from clustersim.model.offload import NO_OFFLOAD
from clustersim.parallel.data_parallel_strategy import GradientSync
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.parallel.plan import Plan
from clustersim.parallel.process_groups import P2P_DIRECTIONS
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

_NAMES: Final = MappingProxyType(
    {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.INPUT_GRADIENT: "input gradient",
        ActionKind.WEIGHT_GRADIENT: "weight gradient",
    }
)


_COMPUTE: Final = Stream.COMPUTE
_EXPERTS: Final = Stream.EP
Held = Sequence[tuple[ParameterGroup, int]]
"""Groups of which something has parameters, and how many."""
Runs = Sequence[tuple[Segment, int]]
"""Blocks one after the other, each so many times in a row."""
LegBlocks = tuple[Segment | None, tuple[CommOp, ...], Segment | None]
"""What a leg computes, sends, and computes beside that."""


class Pass(NamedTuple):
    """An action of the schedule. after: tasks that it waits for; arriving: operations that run before it.

    A named tuple, as actions: a step has tens of thousands of them.
    """

    stage: PipelineStage
    action: Action
    after: tuple[int, ...]
    arriving: tuple[Operation, ...] = ()


@dataclass
class Lowering:
    """What lowering one rank works on.

    arrivals, departures: by stage and kind of pass, the message that it waits for and what is done to that, and the
    message that it sends, worked out for the first microbatch.
    last: the last backward of each of its stages, or its half of the weights; backwards: by stage and microbatch, on
    all ranks, whether backward is whole or begins with its half of the inputs; together: whether a forward's output is
    sent with that of a backward right behind it; paired: the pass under way is one of a pair; computed: its last
    compute task; reducing: what the optimizer waits for.
    """

    plan: Plan
    units: Units
    blocks: Blocks
    last: frozenset[Action] = frozenset()
    backwards: Mapping[tuple[int, int], ActionKind] = field(default_factory=dict)
    together: bool = False
    paired: bool = False
    tasks: TaskList = field(default_factory=TaskList)
    computed: int | None = None
    reducing: list[int] = field(default_factory=list)
    arrivals: dict[tuple[int, ActionKind], tuple[CommOp | None, tuple[Operation, ...]]] = field(default_factory=dict)
    departures: dict[tuple[int, ActionKind], CommOp | None] = field(default_factory=dict)
    _between: dict[tuple[int, int], CommOp | None] = field(default_factory=dict)
    _put_off: dict[int, tuple[Operation, ...]] = field(default_factory=dict)
    _sent: tuple[int, ...] = ()
    _legs: dict[Hashable, list[LegBlocks]] = field(default_factory=dict)
    _wholes: dict[tuple[int, ActionKind, bool], Segment] = field(default_factory=dict)
    _rows: dict[tuple[int, ActionKind, bool], tuple[Segment, Runs]] = field(default_factory=dict)
    _gathers: dict[Hashable, tuple[tuple[CommOp, Bytes], ...]] = field(default_factory=dict)
    _reductions: dict[Hashable, tuple[Segment | None, tuple[CommOp, ...], Bytes]] = field(default_factory=dict)

    @cached_property
    def host(self) -> HostTasks:
        """What the rank does with its host."""
        activations = self.plan.training.offload.activations
        return HostTasks(self.tasks, 0 if activations is None else activations.buffer_count)

    @cached_property
    def sync(self) -> GradientSync:
        """When gradients are reduced."""
        return self.plan.layout.gradient_sync

    @cached_property
    def _stays(self) -> bool:
        """Whether nothing of a pass goes to the host, so that no block is cut for it."""
        return self.plan.training.offload == NO_OFFLOAD

    @property
    def cuts(self) -> bool:
        """Whether passes are cut by what goes to the host, or by turns, whatever the strategy."""
        return self.paired or not self._stays

    def compute(self, run: Pass, key: Hashable, operations: Sequence[Operation]) -> int:
        """Add a compute task whose block is shared by all passes with this key; return its number.

        There are several, one after the other, where activations of layers inside go to the host or come back.
        """
        add = self._apart if self.paired else self._compute
        if self._stays:
            return add(run, key, operations)
        task, after, arriving = -1, run.after, run.arriving
        for place, piece in enumerate(pieces(operations)):
            ready = (*after, *self.host.before(run.action, piece))
            task = add(Pass(run.stage, run.action, ready, arriving), (key, place), piece)
            self.reducing += self.host.after(run.action, piece, task)
            after, arriving = (), ()
        return task

    def whole(self, run: Pass) -> int:
        """Add a pass that nothing cuts, in one block; return its last compute task."""
        if self.cuts:
            return self.compute(run, self.units.shape(run.stage), self.operations(run))
        key = run.stage.index, run.action.kind, bool(run.arriving)
        if key not in self._wholes:
            self._wholes[key] = self._block(run, self.units.shape(run.stage), self.operations(run))
        return self._issue(run, self._wholes[key])

    def unit(self, run: Pass, unit: Unit, copied: tuple[Operation, ...] = ()) -> int:
        """Add one unit of a pass, behind the copy of what was gathered for it; return its last compute task."""
        operations = unit.operations(run.action.kind)
        return self.compute(run, (id(unit), bool(copied)), (*copied, *operations) if copied else operations)

    def one_by_one(self, run: Pass) -> int:
        """Add a pass that nothing cuts, unit by unit; return its last compute task."""
        key = run.stage.index, run.action.kind, bool(run.arriving)
        if key not in self._rows:
            self._rows[key] = self._row(run)
        first, runs = self._rows[key]
        task = self._issue(run, first)
        for block, times in runs:
            task = self.computed = self.tasks.repeat(_COMPUTE, ComputeTask(block, (), run.action), times)
        return task

    def _row(self, run: Pass) -> tuple[Segment, Runs]:
        """The blocks of a pass's units."""
        kind, following = run.action.kind, Pass(run.stage, run.action, ())
        units = in_order(self.units.of(run.stage), kind)
        parts = zip((run, *[following] * (len(units) - 1)), units, strict=True)
        first, *others = (self._block(part, (id(unit), False), unit.operations(kind)) for part, unit in parts)
        return first, [(block, len([*alike])) for block, alike in groupby(others)]

    def _apart(self, run: Pass, key: Hashable, operations: Sequence[Operation]) -> int:
        """Add a part of a pass in legs; return the last compute task that was not put off."""
        after, action, done = (*run.after, *self._sent), run.action, self.computed or 0
        add, told = self.tasks.add, (run.action.kind, bool(run.arriving), key)
        if told not in self._legs:
            self._legs[told] = [*self._blocks_of_legs(run, key, operations)]
        for block, sends, late in self._legs[told]:
            if block is not None:
                done = self.computed = add(_COMPUTE, ComputeTask(block, after, action))
                after = ()
            ready = after or (done,)
            sent = [add(_EXPERTS, CollectiveTask(exchange, ready)) for exchange in sends]
            if late is not None:
                self.computed = add(_COMPUTE, ComputeTask(late, (), action))
            if sent:
                self.tasks.turn()
                after = (sent[-1],)
        self._sent = after if operations and operations[-1].moe_comm else ()
        return done

    def _blocks_of_legs(self, run: Pass, key: Hashable, operations: Sequence[Operation]) -> Iterator[LegBlocks]:
        """Legs of a part of a pass, what arrives before the first one's computation."""
        for place, leg in enumerate(legs(operations)):
            block = late = None
            if leg.computes:
                block = self._block(run, (key, "leg", place), leg.computes)
                run = Pass(run.stage, run.action, ())
            if leg.late:
                late = self._block(Pass(run.stage, run.action, ()), (key, "late", place), leg.late)
            yield block, leg.sends, late

    def operations(self, run: Pass) -> tuple[Operation, ...]:
        """What a pass does, in one piece."""
        puts_off = self.paired and self.plan.layout.delay_wgrad and run.action.kind is ActionKind.BACKWARD
        if not puts_off:
            return self.units.operations(run.stage, run.action.kind)
        if run.stage.index not in self._put_off:
            self._put_off[run.stage.index] = put_off(self.units.of(run.stage))
        return self._put_off[run.stage.index]

    def _compute(self, run: Pass, key: Hashable, operations: Sequence[Operation]) -> int:
        return self._issue(run, self._block(run, key, operations))

    def _block(self, run: Pass, key: Hashable, operations: Sequence[Operation]) -> Segment:
        name, turns = _NAMES[run.action.kind], self.paired
        does = (*run.arriving, *operations) if run.arriving else operations
        return self.blocks.block((name, bool(run.arriving), key, turns), name, does, takes_turns=turns)

    def _issue(self, run: Pass, block: Segment) -> int:
        self.computed = self.tasks.add(_COMPUTE, ComputeTask(block, run.after, run.action))
        return self.computed

    def beside(self, name: str, operations: Sequence[Operation], after: Sequence[int]) -> int:
        """Add a compute task that is no part of a pass; return its number."""
        return self._beside(self._block_beside(name, operations), after)

    def _block_beside(self, name: str, operations: Sequence[Operation]) -> Segment:
        return self.blocks.block((name, tuple(operations)), name, operations)

    def _beside(self, block: Segment, after: Sequence[int]) -> int:
        return self.tasks.add(Stream.COMPUTE, ComputeTask(block, tuple(after)))

    def message(self, source: int, target: int) -> CommOp | None:
        """What a stage sends another, each tensor-parallel rank its part (Narayanan 2021, 4.1).

        None where both are here, or one of them is none.
        """
        key = source, target
        if key not in self._between:
            there = min(key) >= 0 and max(key) < len(self.plan.stages)
            self._between[key] = self._message(source, target) if there else None
        return self._between[key]

    def _message(self, source: int, target: int) -> CommOp | None:
        way, many = self.plan.placement.direction(source, target), self.plan.sent_activation_count(min(source, target))
        return self._messages.get((target > source, way, many))

    @cached_property
    def _messages(self) -> Mapping[tuple[bool, int, int], CommOp]:
        """By whether it goes forward, by its way, and by how many activations it carries."""
        size = self.plan.activation_bytes / self.plan.layout.tp
        return {
            (forward, way, many): CommOp(name, CollectiveType.SEND_RECV, role.name, many * size)
            for forward, name in ((True, "activations"), (False, "gradients"))
            for role, way in P2P_DIRECTIONS.items()
            for many in (1, 1 + self.plan.model.mtp_layers)
        }

    def communicate(self, exchange: CommOp, after: Sequence[int]) -> int:
        """Add a collective of data parallelism; return its number."""
        return self.tasks.add(Stream.DP, CollectiveTask(exchange, tuple(after)))

    def gather(self, name: str, held: Held, after: Sequence[int], *, again: bool = False) -> tuple[int, ...]:
        """Gather parameters of groups from the ranks that hold parts of them; return the tasks.

        Groups that the same ranks hold are gathered at once, whatever their formats (FSDP2 does, as bytes).
        again: since they were last updated, so that a second copy of them has them, too. Parts that are on the host
        come from there first, as they are held; second copies stay on the device.
        """
        key = name, again, *((group.name, parameters) for group, parameters in held)
        if key not in self._gathers:
            self._gathers[key] = self._gathering(name, held, again=again)
        gathers = self._gathers[key]
        fetched = [
            (self.host.run(HostOpKind.H2D, "fetch parameters", size, after),) if size else after for _, size in gathers
        ]
        every = zip(gathers, fetched, strict=True)
        return tuple(self.communicate(exchange, ready) for (exchange, _), ready in every)

    def _gathering(self, name: str, held: Held, *, again: bool) -> tuple[tuple[CommOp, Bytes], ...]:
        """Gathers of groups, and the bytes that come from the host before each."""
        payloads: dict[str, Bytes] = {}
        there: dict[str, Bytes] = {}
        for group, parameters in held:
            second = again and group.secondary_group is not None
            role, ranks = (
                (group.secondary_group, group.secondary_shard_count)
                if second
                else (group.shard_group, group.shard_count)
            )
            if role is not None and ranks > 1 and parameters:
                payloads[role.name] = payloads.get(role.name, 0.0) + parameters * group.formats.gathered.bytes
                if self.plan.training.offload.offloads_shards and not second:
                    there[role.name] = (
                        there.get(role.name, 0.0) + parameters * group.host_format.bytes / group.shard_count
                    )
        exchanges = (CommOp(name, CollectiveType.ALL_GATHER, role, payload) for role, payload in payloads.items())
        return tuple((exchange, there.get(exchange.comm_group, 0.0)) for exchange in exchanges)

    def reduce(
        self, name: str, group: ParameterGroup, parameters: int, after: Sequence[int], *, across: bool = True
    ) -> tuple[int, ...]:
        """Sum gradients of a group: scattered over those who hold parts, then over those who hold equal ones.

        across: whether the second is done, too, or left to a later reduction. Where gradients are
        on the host, they go there once both are done. Return the last task, if there is one.
        """
        if not group.is_trained or not parameters:
            return ()
        if group.dp_size == 1:
            return self._unreduced(parameters * group.formats.gradients.bytes, after)
        key = name, group.name, parameters, across
        if key not in self._reductions:
            self._reductions[key] = self._reduction(name, group, parameters, across=across)
        prepared, exchanges, leaves = self._reductions[key]
        if prepared is not None:
            after = (self._beside(prepared, after),)
        last: tuple[int, ...] = ()
        for exchange in exchanges:
            last = (self.communicate(exchange, last or after),)
        if last and leaves:
            last = (self.host.run(HostOpKind.D2H, "offload gradients", leaves, last),)
        return last

    def _reduction(
        self, name: str, group: ParameterGroup, parameters: int, *, across: bool
    ) -> tuple[Segment | None, tuple[CommOp, ...], Bytes]:
        """What is done to gradients of a group before they are reduced, their reductions, and bytes that then leave."""
        kernels = pre_reduction_kernels(self.plan.with_weight_formats(group.formats), parameters)
        operations = [Operation(kernel, WorkType.BACKWARD) for kernel in kernels]
        prepared = self._block_beside("prepare gradients", operations) if operations else None
        form = group.formats.gradients
        payload = parameters * form.bytes
        exchanges: list[CommOp] = []
        if group.shard_group is not None and group.shard_count > 1:
            exchanges.append(
                CommOp(name, CollectiveType.REDUCE_SCATTER, group.shard_group.name, payload, reduce_dtype=form)
            )
        if across and group.replicate_group is not None and group.replica_count > 1:
            part = payload / group.shard_count if group.shard_count > 1 else payload
            exchanges.append(
                CommOp(name, CollectiveType.ALL_REDUCE, group.replicate_group.name, part, reduce_dtype=form)
            )
        leave = (across or group.replica_count == 1) and self.plan.training.offload.offloads_gradients
        return prepared, tuple(exchanges), payload / group.shard_count if leave else 0.0

    def _unreduced(self, size: Bytes, after: Sequence[int]) -> tuple[int, ...]:
        """Send gradients that this rank alone has to the host, where others are reduced and sent (experts, say)."""
        if self.plan.offloads_unreduced_gradients or not self.plan.training.offload.offloads_gradients:
            return ()
        return (self.host.run(HostOpKind.D2H, "offload gradients", size, after),)


class DataLowering(Protocol):
    """The seam between the pipeline and data parallelism: how passes become tasks of one rank."""

    def begin(self, low: Lowering, stages: Sequence[PipelineStage]) -> None:
        """Issue what the step starts with."""

    def run(self, low: Lowering, run: Pass) -> int:
        """Issue one pass; return the number of its last compute task."""

    def reduce(self, low: Lowering, stages: Sequence[PipelineStage], after: int) -> None:
        """Issue the gradient reductions that have not been issued during backward; `after` is the last compute task."""

    def end(self, low: Lowering, stages: Sequence[PipelineStage], after: int) -> None:
        """Issue what follows the optimizer, task `after`."""


@dataclass(frozen=True, slots=True)
class Plain:
    """No data parallelism."""

    def begin(self, low: Lowering, stages: Sequence[PipelineStage]) -> None:
        """Nothing to do."""

    def run(self, low: Lowering, run: Pass) -> int:
        """One block."""
        return low.whole(run)

    def reduce(self, low: Lowering, stages: Sequence[PipelineStage], after: int) -> None:
        """Nothing to do."""

    def end(self, low: Lowering, stages: Sequence[PipelineStage], after: int) -> None:
        """Nothing to do."""
