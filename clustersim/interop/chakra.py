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
from clustersim.interop.protobuf import (
    integer_field,
    length_delimited,
    message_field,
    oneof_field,
    packed_field,
    string_field,
)
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

SCHEMA_VERSION: Final = "0.0.4"


class ChakraNodeType(IntEnum):
    """What a node does, by the schema's numbers."""

    LOAD = 2
    STORE = 3
    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


_ALL_GATHER: Final = 2  # each member begins with its own part
_COMM_TYPES: Final[Mapping[CollectiveType, int]] = {  # CollectiveCommType, those that ASTRA-sim runs
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
_ROOTED_COLLECTIVES: Final = (
    CollectiveType.REDUCE,
    CollectiveType.GATHER,
    CollectiveType.SCATTER,
)  # one rank has, or gets, all of it
_HOST_NODE_TYPES: Final = {
    HostOpKind.D2H: ChakraNodeType.STORE,
    HostOpKind.H2D: ChakraNodeType.LOAD,
    HostOpKind.ON_HOST: ChakraNodeType.COMPUTE,
}
_MAX_CACHED_RANKS: Final = 32  # simulated ranks whose nodes are kept: ranks of several classes may come in turn
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29  # fields of AttributeProto, as ASTRA-sim's readers take them


_NodeIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _ChakraNode:
    """A node of a rank. fixed: its fields but for those of its group or peer; between: what has one."""

    encoded: bytes
    communication: CommOp | SendTask | ReceiveTask | None = None


class ChakraWriter:
    """Writes ranks of one answer; ranks that stand for each other share most of what is written."""

    def __init__(self, result: "SimulationResult") -> None:
        self.result = result
        self._nodes: LruCache[tuple[_ChakraNode, ...]] = LruCache(_MAX_CACHED_RANKS, unit_size)

    @cached_property
    def ranks_by_group_id(self) -> dict[int, list[int]]:
        """Ranks of each communicator, by its number."""
        group_members = (
            (comm_group, members)
            for comm_group in self._comm_groups
            for members in self.result.program.groups[comm_group].members.tolist()
        )
        return dict(enumerate((members for _, members in group_members), start=1))

    @property
    def approximations(self) -> tuple[str, ...]:
        """What of the step the traces do not say, or say as something else."""
        scenario, program = self.result.scenario, self.result.program
        types = {comm_op.collective for comm_op in program.comm_ops if not isinstance(comm_op, HostOp)}
        conditions = {
            "tokens go to experts and back as all-to-all, whatever passes them on": any(
                collective_type.is_token_routing for collective_type in types
            ),
            "parts that go round a ring are written as all-gather": CollectiveType.SHIFT in types,
            "a reduce is written as reduce-scatter, a scatter or a gather as all-gather": not types.isdisjoint(
                _ROOTED_COLLECTIVES
            ),
            "broadcasts last as long as here, whatever the network": CollectiveType.BROADCAST in types,
            "links that are slow or dead, as the network is ASTRA-sim's own": scenario.degradations.affects_network
            or bool(scenario.degradations.temporary_links),
            "what others send on the network": bool(scenario.background_traffic or scenario.co_scheduled_jobs),
        }
        return tuple(text for text, applies in conditions.items() if applies)

    def encode_rank(self, rank: int) -> bytes:
        """The file of one rank."""
        representative = int(self.result.trace.representative[rank])
        chakra_nodes = self._nodes.get_or_compute(
            (representative,), lambda: tuple(_RankNodeBuilder(self.result, representative, self._message_tags).nodes())
        )
        header = string_field(1, SCHEMA_VERSION) + message_field(
            2, _attribute("schema", string_field(_STRING, f"1.0.2-chakra.{SCHEMA_VERSION}"))
        )
        encoded_nodes = (chakra_node.encoded + self._rank_attributes(chakra_node, rank) for chakra_node in chakra_nodes)
        return b"".join(map(length_delimited, (header, *encoded_nodes)))

    def _rank_attributes(self, node: _ChakraNode, rank: int) -> bytes:
        """What a node says of its rank: its group, or whom it sends to or receives from."""
        match node.communication:
            case SendTask(exchange):
                return _peer_attributes(rank, self._peer(exchange.comm_group, rank, position=0))
            case ReceiveTask(exchange):
                return _peer_attributes(self._peer(exchange.comm_group, rank, position=1), rank)
            case CommOp(comm_group=comm_group):
                group_id = self._first_group_ids[comm_group] + int(self._group_indices[comm_group][rank])
                return message_field(10, _attribute("pg_name", string_field(_STRING, str(group_id))))
        return b""

    def _peer(self, comm_group: str, rank: int, *, position: int) -> int:
        """The other member of a pair in which a rank sends (0) or receives (1)."""
        groups = self.result.program.groups[comm_group]
        group_index = int(self._pair_indices[comm_group, position][rank])
        return int(groups.members[group_index, 1 - position])

    @cached_property
    def _comm_groups(self) -> tuple[str, ...]:
        """Roles of groups that communicate together, sorted."""
        program = self.result.program
        used_groups = {comm_op.comm_group for comm_op in program.comm_ops if not isinstance(comm_op, HostOp)}
        multi_rank_groups = (
            comm_group for comm_group in used_groups if program.groups[comm_group].members.shape[1] > 1
        )
        return tuple(sorted(comm_group for comm_group in multi_rank_groups if not program.groups[comm_group].ordered))

    @cached_property
    def _first_group_ids(self) -> dict[str, int]:
        """The number of each role's first group."""
        sizes = [len(self.result.program.groups[comm_group].members) for comm_group in self._comm_groups]
        return dict(zip(self._comm_groups, (1 + np.cumsum([0, *sizes])).tolist(), strict=False))

    @cached_property
    def _group_indices(self) -> dict[str, IntArray]:
        return {
            comm_group: self.result.program.groups[comm_group].group_indices(self.result.rank_count)
            for comm_group in self._comm_groups
        }

    @cached_property
    def _pair_indices(self) -> dict[tuple[str, int], IntArray]:
        """The pair of a role in which each rank is the sender (0) or the receiver (1)."""
        pairs = {comm_group: groups for comm_group, groups in self.result.program.groups.items() if groups.ordered}
        return {
            (comm_group, position): groups.group_indices(self.result.rank_count, member_index=position)
            for comm_group, groups in pairs.items()
            for position in range(2)
        }

    @cached_property
    def _message_tags(self) -> dict[tuple[str, object], int]:
        """A number for each message between two ranks, the same on both."""
        tag_ids: dict[tuple[str, object], int] = {}
        for program in self.result.program.programs:
            for task in program.tasks:
                if isinstance(task, (SendTask, ReceiveTask)):
                    tag_ids.setdefault((task.comm_op.comm_group, task.tag), len(tag_ids) + 1)
        return tag_ids


class _RankNodeBuilder:
    """Nodes of a simulated rank, in the order of its tasks."""

    def __init__(self, result: "SimulationResult", rank: int, tags: Mapping[tuple[str, object], int]) -> None:
        self.result, self.rank, self.tags = result, rank, tags
        self.program = result.program.programs[int(result.program.program_index[rank])]
        self.id_counter = count()
        self.computed_seconds = 0.0  # seconds of kernels until now
        event_indices = result.trace.rank_events(rank)
        order = event_indices[np.argsort(result.trace.task[event_indices])]
        self.times = np.stack([result.trace.start[order], result.trace.end[order]], axis=1)

    def nodes(self) -> Iterator[_ChakraNode]:
        """All nodes; each waits for such as come before it."""
        last_nodes: list[_NodeIds] = []  # the last nodes of each task
        last_task: dict[Stream, int] = {}
        operations = self.result.operation_spans(self.rank)
        first = np.searchsorted(operations.task, np.arange(len(self.program.tasks) + 1))
        columns = np.stack([operations.start, operations.end, operations.exposed_delay], axis=1)
        for task_id, (task, stream) in enumerate(zip(self.program.tasks, self.program.streams, strict=True)):
            dependencies = {
                *task.depends_on,
                *([last_task[stream]] if stream in last_task and stream is not Stream.RECEIVE else ()),
            }
            parents = tuple(sorted({node for dependency in dependencies for node in last_nodes[dependency]}))
            if isinstance(task, CollectiveTask) and self._is_single_rank(task.comm_op):
                pass
            elif isinstance(task, ComputeTask):
                parents = yield from self._segment_nodes(task, parents, columns[first[task_id] : first[task_id + 1]])
            else:
                node_id = next(self.id_counter)
                yield self._task_node(node_id, task_id, parents)
                parents = (node_id,)
            last_nodes.append(parents)
            last_task[stream] = task_id

    def _segment_nodes(
        self, task: ComputeTask, parents: _NodeIds, times: FloatArray
    ) -> Generator[_ChakraNode, None, _NodeIds]:
        """Nodes of a block's operations, one behind the other; returns the last ones."""
        timing = self.result.cost.time_segment(self.rank, task.segment)
        for index, operation in enumerate(task.segment.operations):
            start, end, exposed = times[index].tolist()
            comm_seconds = float(timing.exposed_comm[index]) + exposed if index in timing.overlaps else 0.0
            parents = yield from self._operation_nodes(operation, parents, max(0.0, end - start - comm_seconds))
        return parents

    def _operation_nodes(
        self, operation: Operation, parents: _NodeIds, duration: Seconds
    ) -> Generator[_ChakraNode, None, _NodeIds]:
        node_ids: list[int] = []
        if operation.kernel is not None:
            node_ids.append(next(self.id_counter))
            yield self._kernel_node(node_ids[-1], operation.kernel, parents, duration)
        if operation.comm_op is not None and not self._is_single_rank(operation.comm_op):
            node_ids.append(next(self.id_counter))
            yield self._collective_node(node_ids[-1], operation.comm_op, parents)
        return tuple(node_ids) or parents

    def _is_single_rank(self, comm_op: CommOp) -> bool:
        """Whether it is of a rank with itself, which moves nothing."""
        return not isinstance(comm_op, HostOp) and self._group_size(comm_op) == 1

    def _group_size(self, comm_op: CommOp) -> int:
        return int(self.result.program.groups[comm_op.comm_group].members.shape[1])

    def _kernel_node(self, node_id: int, kernel: Kernel, parents: _NodeIds, duration: Seconds) -> _ChakraNode:
        rounded_before = round(1e6 * self.computed_seconds)
        self.computed_seconds += duration
        fields = _duration_field(round(1e6 * self.computed_seconds) - rounded_before) + _int64_attribute(
            "num_ops", max(1, int(kernel.flops))
        )
        fields += _uint64_attribute("tensor_size", max(1, int(kernel.bytes)))
        return _ChakraNode(
            _encode_node(node_id, f"{kernel.kind.value} {kernel.name}", ChakraNodeType.COMPUTE, parents, fields)
        )

    def _task_node(self, node_id: int, task_id: int, parents: _NodeIds) -> _ChakraNode:
        """The node of a task that is no block."""
        task = self.program.tasks[task_id]
        match task:
            case SendTask() | ReceiveTask():
                node_type = ChakraNodeType.SEND if isinstance(task, SendTask) else ChakraNodeType.RECEIVE
                tag = _int32_attribute("comm_tag", self.tags[task.comm_op.comm_group, task.tag])
                duration_field = (
                    b"" if isinstance(task, ReceiveTask) else self._comm_duration_field(task.comm_op, position=0)
                )
                fields = duration_field + _int64_attribute("comm_size", ceil(task.comm_op.payload)) + tag
                return _ChakraNode(
                    _encode_node(node_id, f"{task.comm_op.name} {task.tag}", node_type, parents, fields), task
                )
            case CollectiveTask(HostOp() as comm_op):
                return self._host_node(node_id, task_id, comm_op, parents)
            case CollectiveTask(comm_op):
                return self._collective_node(node_id, comm_op, parents)
        raise TypeError(f"{task} has no node")

    def _collective_node(self, node_id: int, comm_op: CommOp, parents: _NodeIds) -> _ChakraNode:
        comm_type = _COMM_TYPES[comm_op.collective]
        payload = comm_op.payload / self._group_size(comm_op) if comm_type == _ALL_GATHER else comm_op.payload
        fields = (
            self._comm_duration_field(comm_op)
            + _int64_attribute("comm_type", comm_type)
            + _int64_attribute("comm_size", ceil(payload))
        )
        return _ChakraNode(_encode_node(node_id, comm_op.name, ChakraNodeType.COLLECTIVE, parents, fields), comm_op)

    def _comm_duration_field(self, comm_op: CommOp, position: int | None = None) -> bytes:
        """What an exchange takes alone in the rank's group, of pairs that in which it has a place."""
        group_index = self.result.program.groups[comm_op.comm_group].group_indices(
            self.result.rank_count, member_index=position
        )[self.rank]
        return _duration_field(round(1e6 * float(self.result.cost.comm_timing_by_group(comm_op).seconds[group_index])))

    def _host_node(self, node_id: int, task_id: int, host_op: HostOp, parents: _NodeIds) -> _ChakraNode:
        """A copy, or what the host computes, which takes what it takes in the simulation."""
        node_type, fields = _HOST_NODE_TYPES[host_op.kind], _uint64_attribute("tensor_size", int(host_op.payload))
        if node_type is not ChakraNodeType.COMPUTE:
            return _ChakraNode(_encode_node(node_id, host_op.name, node_type, parents, fields))
        start, end = self.times[task_id].tolist()
        fields += _duration_field(round(1e6 * (end - start))) + _int64_attribute("num_ops", 0)
        return _ChakraNode(_encode_node(node_id, host_op.name, node_type, parents, fields, on_host=True))


def _encode_node(
    node_id: int, name: str, node_type: ChakraNodeType, parents: _NodeIds, fields: bytes, *, on_host: bool = False
) -> bytes:
    """A message Node. more: further fields."""
    header = integer_field(1, node_id) + string_field(2, name) + integer_field(3, node_type) + packed_field(5, parents)
    return header + message_field(10, _attribute("is_cpu_op", oneof_field(_BOOL, on_host))) + fields


def _duration_field(microseconds: int) -> bytes:
    return integer_field(7, microseconds)


def _peer_attributes(source: int, target: int) -> bytes:
    return _int32_attribute("comm_src", source) + _int32_attribute("comm_dst", target)


def _int32_attribute(name: str, value: int) -> bytes:
    return message_field(10, _attribute(name, oneof_field(_INT32, value)))


def _int64_attribute(name: str, value: int) -> bytes:
    return message_field(10, _attribute(name, oneof_field(_INT64, value)))


def _uint64_attribute(name: str, value: int) -> bytes:
    return message_field(10, _attribute(name, oneof_field(_UINT64, value)))


def _attribute(name: str, value: bytes) -> bytes:
    """A message AttributeProto."""
    return string_field(1, name) + value
