"""How is a simulated step written as execution traces of Chakra, for ASTRA-sim to run on networks of its own?

A file for each rank: what it does, and what must be done before. A kernel is a node that lasts as long as in the
simulation, what communication beside it slows included, with its FLOP and bytes for ASTRA-sim's roofline. Durations are
whole microseconds; what rounding leaves is carried to the next kernel, so those of a rank sum to what it computes.
Collectives and messages have sizes, from which ASTRA-sim finds their times; the durations that are beside them, those
that they take alone here, it uses where it replays. Copies to and from the host are stores to and loads from remote
memory.

Nodes of a stream follow each other, but for receives, whose buffers are posted ahead. A kernel and an exchange that are
one operation run side by side. Sizes are what each rank puts in, as ASTRA-sim's collectives count them (so of an
all-gather its own part). What Chakra has no type for is written as what moves as much: exchanges of a dispatcher as
all-to-all, parts that go round a ring as all-gather. So is what ASTRA-sim stops at: a reduce as reduce-scatter, a
scatter or a gather as all-gather, each of whose links carries what that of the one rank does. A broadcast lasts there
as long as its node says. Groups of one rank move nothing and are left out; the others are numbered from 1 (0 is
ASTRA-sim's word for all ranks).

Nothing is zero that ASTRA-sim divides by or counts down from: FLOP and bytes of a kernel are at least 1, bytes that are
sent are rounded up.

References: mlcommons/chakra, schema/protobuf/et_def.proto (0.0.4); astra-sim/astra-sim, astra-sim/workload/Workload.cc
and astraccl/native_collectives/collective_algorithm/Ring.cc
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import count
from math import ceil
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.lru import LruCache, unit_size
from clustersim.common.units import Seconds
from clustersim.interop.protobuf import chosen, content, delimited, number, numbers, text
from clustersim.model.kernels import Kernel
from clustersim.program.task import (
    CollectiveTask,
    CollectiveType,
    CommOp,
    ComputeTask,
    HostOp,
    HostOpKind,
    Operation,
    ReceiveTask,
    SendTask,
    Stream,
)

if TYPE_CHECKING:
    from clustersim.results.simulation_result import SimulationResult

VERSION: Final = "0.0.4"


class NodeType(IntEnum):
    """What a node does, by the schema's numbers."""

    LOAD = 2
    STORE = 3
    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


_ALL_GATHER: Final = 2  # each member begins with its own part
_TYPES: Final[Mapping[CollectiveType, int]] = {  # CollectiveCommType, those that ASTRA-sim runs
    CollectiveType.ALL_REDUCE: 0,
    CollectiveType.REDUCE: 7,
    CollectiveType.ALL_GATHER: _ALL_GATHER,
    CollectiveType.GATHER: _ALL_GATHER,
    CollectiveType.SCATTER: _ALL_GATHER,
    CollectiveType.BROADCAST: 5,
    CollectiveType.ALL_TO_ALL: 6,
    CollectiveType.REDUCE_SCATTER: 7,
    CollectiveType.DISPATCH: 6,
    CollectiveType.COMBINE: 6,
    CollectiveType.SHIFT: _ALL_GATHER,
}
_OF_ONE: Final = (
    CollectiveType.REDUCE,
    CollectiveType.GATHER,
    CollectiveType.SCATTER,
)  # one rank has, or gets, all of it
_HOST: Final = {HostOpKind.D2H: NodeType.STORE, HostOpKind.H2D: NodeType.LOAD, HostOpKind.ON_HOST: NodeType.COMPUTE}
_KEPT: Final = 32  # simulated ranks whose nodes are kept: ranks of several classes may come in turn
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29  # fields of AttributeProto, as ASTRA-sim's readers take them


_Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a rank. fixed: its fields but for those of its group or peer; between: what has one."""

    fixed: bytes
    between: CommOp | SendTask | ReceiveTask | None = None


class ChakraWriter:
    """Writes ranks of one answer; ranks that stand for each other share most of what is written."""

    def __init__(self, result: "SimulationResult") -> None:
        self.result = result
        self._nodes: LruCache[tuple[_Node, ...]] = LruCache(_KEPT, unit_size)

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """Ranks of each communicator, by its number."""
        rows = ((role, row) for role in self._roles for row in self.result.program.groups[role].members.tolist())
        return dict(enumerate((row for _, row in rows), start=1))

    @property
    def remarks(self) -> tuple[str, ...]:
        """What of the step the traces do not say, or say as something else."""
        scenario, program = self.result.scenario, self.result.program
        kinds = {comm_op.collective for comm_op in program.comm_ops if not isinstance(comm_op, HostOp)}
        said = {
            "tokens go to experts and back as all-to-all, whatever passes them on": any(
                kind.is_token_routing for kind in kinds
            ),
            "parts that go round a ring are written as all-gather": CollectiveType.SHIFT in kinds,
            "a reduce is written as reduce-scatter, a scatter or a gather as all-gather": not kinds.isdisjoint(_OF_ONE),
            "broadcasts last as long as here, whatever the network": CollectiveType.BROADCAST in kinds,
            "links that are slow or dead, as the network is ASTRA-sim's own": scenario.degradations.affects_network
            or bool(scenario.degradations.temporary_links),
            "what others send on the network": bool(scenario.background_traffic or scenario.co_scheduled_jobs),
        }
        return tuple(words for words, there in said.items() if there)

    def rank(self, rank: int) -> bytes:
        """The file of one rank."""
        simulated = int(self.result.trace.representative[rank])
        made = self._nodes.get_or_compute(
            (simulated,), lambda: tuple(_Drafts(self.result, simulated, self._tags).nodes())
        )
        head = text(1, VERSION) + content(2, _attribute("schema", text(_STRING, f"1.0.2-chakra.{VERSION}")))
        nodes = (node.fixed + self._own(node, rank) for node in made)
        return b"".join(map(delimited, (head, *nodes)))

    def _own(self, node: _Node, rank: int) -> bytes:
        """What a node says of its rank: its group, or whom it sends to or receives from."""
        match node.between:
            case SendTask(exchange):
                return _peers(rank, self._peer(exchange.comm_group, rank, place=0))
            case ReceiveTask(exchange):
                return _peers(self._peer(exchange.comm_group, rank, place=1), rank)
            case CommOp(comm_group=role):
                group = self._first[role] + int(self._rows[role][rank])
                return content(10, _attribute("pg_name", text(_STRING, str(group))))
        return b""

    def _peer(self, role: str, rank: int, *, place: int) -> int:
        """The other member of a pair in which a rank sends (0) or receives (1)."""
        groups = self.result.program.groups[role]
        row = int(self._pairs[role, place][rank])
        return int(groups.members[row, 1 - place])

    @cached_property
    def _roles(self) -> tuple[str, ...]:
        """Roles of groups that communicate together, sorted."""
        program = self.result.program
        between = {comm_op.comm_group for comm_op in program.comm_ops if not isinstance(comm_op, HostOp)}
        several = (role for role in between if program.groups[role].members.shape[1] > 1)
        return tuple(sorted(role for role in several if not program.groups[role].ordered))

    @cached_property
    def _first(self) -> dict[str, int]:
        """The number of each role's first group."""
        sizes = [len(self.result.program.groups[role].members) for role in self._roles]
        return dict(zip(self._roles, (1 + np.cumsum([0, *sizes])).tolist(), strict=False))

    @cached_property
    def _rows(self) -> dict[str, IntArray]:
        return {role: self.result.program.groups[role].group_indices(self.result.rank_count) for role in self._roles}

    @cached_property
    def _pairs(self) -> dict[tuple[str, int], IntArray]:
        """The pair of a role in which each rank is the sender (0) or the receiver (1)."""
        pairs = {role: groups for role, groups in self.result.program.groups.items() if groups.ordered}
        return {
            (role, place): groups.group_indices(self.result.rank_count, member_index=place)
            for role, groups in pairs.items()
            for place in range(2)
        }

    @cached_property
    def _tags(self) -> dict[tuple[str, object], int]:
        """A number for each message between two ranks, the same on both."""
        tags: dict[tuple[str, object], int] = {}
        for program in self.result.program.programs:
            for task in program.tasks:
                if isinstance(task, (SendTask, ReceiveTask)):
                    tags.setdefault((task.comm_op.comm_group, task.tag), len(tags) + 1)
        return tags


class _Drafts:
    """Nodes of a simulated rank, in the order of its tasks."""

    def __init__(self, result: "SimulationResult", rank: int, tags: Mapping[tuple[str, object], int]) -> None:
        self.result, self.rank, self.tags = result, rank, tags
        self.program = result.program.programs[int(result.program.program_index[rank])]
        self.ids = count()
        self.computed = 0.0  # seconds of kernels until now
        rows = result.trace.rank_events(rank)
        order = rows[np.argsort(result.trace.task[rows])]
        self.times = np.stack([result.trace.start[order], result.trace.end[order]], axis=1)

    def nodes(self) -> Iterator[_Node]:
        """All nodes; each waits for such as come before it."""
        done: list[_Ids] = []  # the last nodes of each task
        behind: dict[Stream, int] = {}
        inside = self.result.operation_spans(self.rank)
        first = np.searchsorted(inside.task, np.arange(len(self.program.tasks) + 1))
        columns = np.stack([inside.start, inside.end, inside.exposed_delay], axis=1)
        for place, (task, stream) in enumerate(zip(self.program.tasks, self.program.streams, strict=True)):
            before = {
                *task.depends_on,
                *([behind[stream]] if stream in behind and stream is not Stream.RECEIVE else ()),
            }
            waits = tuple(sorted({node for item in before for node in done[item]}))
            if isinstance(task, CollectiveTask) and self._idle(task.comm_op):
                pass
            elif isinstance(task, ComputeTask):
                waits = yield from self._block(task, waits, columns[first[place] : first[place + 1]])
            else:
                own = next(self.ids)
                yield self._alone(own, place, waits)
                waits = (own,)
            done.append(waits)
            behind[stream] = place

    def _block(self, task: ComputeTask, waits: _Ids, times: FloatArray) -> Generator[_Node, None, _Ids]:
        """Nodes of a block's operations, one behind the other; returns the last ones."""
        timing = self.result.cost.time_segment(self.rank, task.segment)
        for place, operation in enumerate(task.segment.operations):
            start, end, exposed = times[place].tolist()
            alone = float(timing.exposed_comm[place]) + exposed if place in timing.overlaps else 0.0
            waits = yield from self._operation(operation, waits, max(0.0, end - start - alone))
        return waits

    def _operation(self, operation: Operation, waits: _Ids, lasting: Seconds) -> Generator[_Node, None, _Ids]:
        last: list[int] = []
        if operation.kernel is not None:
            last.append(next(self.ids))
            yield self._kernel(last[-1], operation.kernel, waits, lasting)
        if operation.comm_op is not None and not self._idle(operation.comm_op):
            last.append(next(self.ids))
            yield self._exchange(last[-1], operation.comm_op, waits)
        return tuple(last) or waits

    def _idle(self, exchange: CommOp) -> bool:
        """Whether it is of a rank with itself, which moves nothing."""
        return not isinstance(exchange, HostOp) and self._members(exchange) == 1

    def _members(self, exchange: CommOp) -> int:
        return int(self.result.program.groups[exchange.comm_group].members.shape[1])

    def _kernel(self, own: int, kernel: Kernel, waits: _Ids, lasting: Seconds) -> _Node:
        before = round(1e6 * self.computed)
        self.computed += lasting
        more = _lasts(round(1e6 * self.computed) - before) + _integer("num_ops", max(1, int(kernel.flops)))
        more += _unsigned("tensor_size", max(1, int(kernel.bytes)))
        return _Node(_node(own, f"{kernel.kind.value} {kernel.name}", NodeType.COMPUTE, waits, more))

    def _alone(self, own: int, place: int, waits: _Ids) -> _Node:
        """The node of a task that is no block."""
        task = self.program.tasks[place]
        match task:
            case SendTask() | ReceiveTask():
                kind = NodeType.SEND if isinstance(task, SendTask) else NodeType.RECEIVE
                tag = _small("comm_tag", self.tags[task.comm_op.comm_group, task.tag])
                lasts = b"" if isinstance(task, ReceiveTask) else self._lasts(task.comm_op, place=0)
                more = lasts + _integer("comm_size", ceil(task.comm_op.payload)) + tag
                return _Node(_node(own, f"{task.comm_op.name} {task.tag}", kind, waits, more), task)
            case CollectiveTask(HostOp() as exchange):
                return self._host(own, place, exchange, waits)
            case CollectiveTask(exchange):
                return self._exchange(own, exchange, waits)
        raise TypeError(f"{task} has no node")

    def _exchange(self, own: int, exchange: CommOp, waits: _Ids) -> _Node:
        kind = _TYPES[exchange.collective]
        payload = exchange.payload / self._members(exchange) if kind == _ALL_GATHER else exchange.payload
        more = self._lasts(exchange) + _integer("comm_type", kind) + _integer("comm_size", ceil(payload))
        return _Node(_node(own, exchange.name, NodeType.COLLECTIVE, waits, more), exchange)

    def _lasts(self, exchange: CommOp, place: int | None = None) -> bytes:
        """What an exchange takes alone in the rank's group, of pairs that in which it has a place."""
        row = self.result.program.groups[exchange.comm_group].group_indices(self.result.rank_count, member_index=place)[
            self.rank
        ]
        return _lasts(round(1e6 * float(self.result.cost.comm_timing_by_group(exchange).seconds[row])))

    def _host(self, own: int, place: int, exchange: HostOp, waits: _Ids) -> _Node:
        """A copy, or what the host computes, which takes what it takes in the simulation."""
        kind, more = _HOST[exchange.kind], _unsigned("tensor_size", int(exchange.payload))
        if kind is not NodeType.COMPUTE:
            return _Node(_node(own, exchange.name, kind, waits, more))
        start, end = self.times[place].tolist()
        more += _lasts(round(1e6 * (end - start))) + _integer("num_ops", 0)
        return _Node(_node(own, exchange.name, kind, waits, more, on_host=True))


def _node(own: int, name: str, kind: NodeType, waits: _Ids, more: bytes, *, on_host: bool = False) -> bytes:
    """A message Node. more: further fields."""
    head = number(1, own) + text(2, name) + number(3, kind) + numbers(5, waits)
    return head + content(10, _attribute("is_cpu_op", chosen(_BOOL, on_host))) + more


def _lasts(microseconds: int) -> bytes:
    return number(7, microseconds)


def _peers(source: int, target: int) -> bytes:
    return _small("comm_src", source) + _small("comm_dst", target)


def _small(name: str, value: int) -> bytes:
    return content(10, _attribute(name, chosen(_INT32, value)))


def _integer(name: str, value: int) -> bytes:
    return content(10, _attribute(name, chosen(_INT64, value)))


def _unsigned(name: str, value: int) -> bytes:
    return content(10, _attribute(name, chosen(_UINT64, value)))


def _attribute(name: str, value: bytes) -> bytes:
    """A message AttributeProto."""
    return text(1, name) + value
