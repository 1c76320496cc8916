"""How is a simulated step exported as Chakra execution traces, for ASTRA-sim to run on its own network models?

One file per rank with its nodes and their dependencies. A kernel is a compute node with the simulated
duration, slowdown by overlapping communication included, and FLOP and bytes for ASTRA-sim's roofline.
Durations are integer microseconds; rounding errors are carried to the next kernel, so that a rank's
durations sum to its compute time. Collectives and messages have sizes, from which ASTRA-sim computes their
times; their durations, the uncontended ones of this simulator, are used for replay only. Copies to and from
the host are stores to and loads from remote memory.

Nodes of a stream depend on the previous one, except receives, whose buffers are pre-posted. The kernel and
the collective of one operation run concurrently. Sizes are each rank's input, as ASTRA-sim's collectives
count them (of an all-gather, its own shard). Operations without a Chakra type are written as one that moves
as much: a dispatcher's dispatch and combine as all-to-all, ring shifts as all-gather. So are types that
ASTRA-sim does not run: a reduce as reduce-scatter, a scatter or gather as all-gather, each of whose links
carries what the root's links do. A broadcast takes its node's duration in ASTRA-sim. Groups of one rank
move nothing and are omitted; the others have ids from 1 (0 means all ranks in ASTRA-sim).

Nothing is zero that ASTRA-sim divides by or counts down from: FLOP and bytes of a kernel are at least 1,
sent bytes are rounded up.

References: mlcommons/chakra, schema/protobuf/et_def.proto (0.0.4); astra-sim/astra-sim,
astra-sim/workload/Workload.cc and astraccl/native_collectives/collective_algorithm/Ring.cc
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
    """Node types with the numbers of Chakra's schema."""

    LOAD = 2
    STORE = 3
    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


_ALL_GATHER: Final = 2  # each member starts with its own shard
_COMM_TYPES: Final[Mapping[CollectiveType, int]] = {  # CollectiveCommType, those that ASTRA-sim runs
    CollectiveType.ALL_REDUCE: 0,
    CollectiveType.REDUCE: 7,
    CollectiveType.ALL_GATHER: _ALL_GATHER,
    CollectiveType.GATHER: _ALL_GATHER,
    CollectiveType.SCATTER: _ALL_GATHER,
    CollectiveType.BROADCAST: 5,
    CollectiveType.ALL_TO_ALL: 6,
    CollectiveType.REDUCE_SCATTER: 7,
    CollectiveType.SEND_RECV: 6,
    CollectiveType.DISPATCH: 6,
    CollectiveType.COMBINE: 6,
    CollectiveType.SHIFT: _ALL_GATHER,
}
_ROOTED_COLLECTIVES: Final = (
    CollectiveType.REDUCE,
    CollectiveType.GATHER,
    CollectiveType.SCATTER,
)  # one root rank sends or receives everything
_HOST_NODE_TYPES: Final = {
    HostOpKind.D2H: ChakraNodeType.STORE,
    HostOpKind.H2D: ChakraNodeType.LOAD,
    HostOpKind.ON_HOST: ChakraNodeType.COMPUTE,
    HostOpKind.LAUNCH: ChakraNodeType.COMPUTE,
}
_MAX_CACHED_RANKS: Final = (
    32  # simulated ranks whose nodes are cached: ranks of several equivalence classes may alternate
)
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29  # field numbers of AttributeProto that ASTRA-sim reads


_NodeIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _ChakraNode:
    """A node of a simulated rank. encoded: all fields but its group or peer; communication: what has one."""

    encoded: bytes
    communication: CommOp | SendTask | ReceiveTask | None = None


class ChakraWriter:
    """Exports ranks of one simulation result; ranks with the same representative share most of the encoding."""

    def __init__(self, result: "SimulationResult") -> None:
        self.result = result
        self._nodes: LruCache[tuple[_ChakraNode, ...]] = LruCache(_MAX_CACHED_RANKS, unit_size)

    @cached_property
    def ranks_by_group_id(self) -> dict[int, list[int]]:
        """Ranks of each communicator by its id."""
        group_members = (
            (comm_group, members)
            for comm_group in self._comm_groups
            for members in self.result.program.groups[comm_group].members.tolist()
        )
        return dict(enumerate((members for _, members in group_members), start=1))

    @property
    def approximations(self) -> tuple[str, ...]:
        """What the traces omit or approximate, as sentences."""
        scenario, program = self.result.scenario, self.result.program
        types = {comm_op.collective for comm_op in program.comm_ops if not isinstance(comm_op, HostOp)}
        conditions = {
            "tokens go to experts and back as all-to-all, whatever passes them on": any(
                collective_type.is_token_routing for collective_type in types
            ),
            "images go to the model from an encoder on GPUs of its own, and gradients back, as all-to-all": (
                scenario.layout.encoder_ranks > 0
            ),
            "context-parallel ring exchanges are written as all-gather": CollectiveType.SHIFT in types,
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
        """The encoded file of one rank."""
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
        """The attributes that depend on the actual rank: its group id, or source and destination of a message."""
        match node.communication:
            case SendTask(comm_op):
                return _peer_attributes(rank, self._peer(comm_op.comm_group, rank, position=0))
            case ReceiveTask(comm_op):
                return _peer_attributes(self._peer(comm_op.comm_group, rank, position=1), rank)
            case CommOp(comm_group=comm_group):
                group_id = self._first_group_ids[comm_group] + int(self._group_indices[comm_group][rank])
                return message_field(10, _attribute("pg_name", string_field(_STRING, str(group_id))))
        return b""

    def _peer(self, comm_group: str, rank: int, *, position: int) -> int:
        """The other rank of a pair in which `rank` is the sender (position 0) or the receiver (1)."""
        groups = self.result.program.groups[comm_group]
        group_index = int(self._pair_indices[comm_group, position][rank])
        return int(groups.members[group_index, 1 - position])

    @cached_property
    def _comm_groups(self) -> tuple[str, ...]:
        """Sorted names of the comm groups with more than one rank that run collectives."""
        program = self.result.program
        used_groups = {comm_op.comm_group for comm_op in program.comm_ops if not isinstance(comm_op, HostOp)}
        multi_rank_groups = (
            comm_group for comm_group in used_groups if program.groups[comm_group].members.shape[1] > 1
        )
        return tuple(sorted(comm_group for comm_group in multi_rank_groups if not program.groups[comm_group].ordered))

    @cached_property
    def _first_group_ids(self) -> dict[str, int]:
        """The id of the first communicator of each comm group."""
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
        """For each p2p comm group and position (0: sender, 1: receiver): [ranks] index of each rank's pair."""
        pairs = {comm_group: groups for comm_group, groups in self.result.program.groups.items() if groups.ordered}
        return {
            (comm_group, position): groups.group_indices(self.result.rank_count, member_index=position)
            for comm_group, groups in pairs.items()
            for position in range(2)
        }

    @cached_property
    def _message_tags(self) -> dict[tuple[str, object], int]:
        """An id for each message between two ranks, the same on both."""
        tag_ids: dict[tuple[str, object], int] = {}
        for program in self.result.program.programs:
            for task in program.tasks:
                if isinstance(task, (SendTask, ReceiveTask)):
                    tag_ids.setdefault((task.comm_op.comm_group, task.tag), len(tag_ids) + 1)
        return tag_ids


class _RankNodeBuilder:
    """Builds the nodes of a simulated rank, in the order of its tasks."""

    def __init__(self, result: "SimulationResult", rank: int, tags: Mapping[tuple[str, object], int]) -> None:
        self.result, self.rank, self.tags = result, rank, tags
        self.program = result.program.programs[int(result.program.program_index[rank])]
        self.id_counter = count()
        self.computed_seconds = 0.0  # seconds of all kernels so far
        event_indices = result.trace.rank_events(rank)
        order = event_indices[np.argsort(result.trace.task[event_indices])]
        self.times = np.stack([result.trace.start[order], result.trace.end[order]], axis=1)

    def nodes(self) -> Iterator[_ChakraNode]:
        """All nodes; each depends only on nodes before it."""
        last_nodes: list[_NodeIds] = []  # last nodes of each task
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
        """Nodes of a segment's operations in sequence; returns the last node ids."""
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
        """Whether the group has one rank, so that nothing moves."""
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
        """The node of a task that is not a compute segment."""
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
        """Uncontended duration in the rank's group, or in the pair in which it has the position."""
        group_index = self.result.program.groups[comm_op.comm_group].group_indices(
            self.result.rank_count, member_index=position
        )[self.rank]
        return _duration_field(round(1e6 * float(self.result.cost.comm_timing_by_group(comm_op).seconds[group_index])))

    def _host_node(self, node_id: int, task_id: int, host_op: HostOp, parents: _NodeIds) -> _ChakraNode:
        """A copy, or computation on the host, which has its simulated duration."""
        node_type, fields = _HOST_NODE_TYPES[host_op.kind], _uint64_attribute("tensor_size", int(host_op.payload))
        if node_type is not ChakraNodeType.COMPUTE:
            return _ChakraNode(_encode_node(node_id, host_op.name, node_type, parents, fields))
        start, end = self.times[task_id].tolist()
        fields += _duration_field(round(1e6 * (end - start))) + _int64_attribute("num_ops", 0)
        return _ChakraNode(_encode_node(node_id, host_op.name, node_type, parents, fields, on_host=True))


def _encode_node(
    node_id: int, name: str, node_type: ChakraNodeType, parents: _NodeIds, fields: bytes, *, on_host: bool = False
) -> bytes:
    """A Node message. fields: additional encoded fields."""
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
    """An AttributeProto message."""
    return string_field(1, name) + value
