"""Chakra's schema (0.0.4), as far as it is written, for Google's decoder; and a replayer of decoded traces."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Fields = descriptor_pb2.FieldDescriptorProto
_SCHEMA: dict[str, list[tuple[str, int, int, bool, str]]] = {  # name, number, type, repeated, oneof or type's name
    "AttributeProto": [
        ("name", 1, Fields.TYPE_STRING, False, ""),
        ("double_val", 3, Fields.TYPE_DOUBLE, False, "value"),
        ("int32_val", 7, Fields.TYPE_INT32, False, "value"),
        ("int64_val", 9, Fields.TYPE_INT64, False, "value"),
        ("uint32_val", 11, Fields.TYPE_UINT32, False, "value"),
        ("uint64_val", 13, Fields.TYPE_UINT64, False, "value"),
        ("bool_val", 27, Fields.TYPE_BOOL, False, "value"),
        ("string_val", 29, Fields.TYPE_STRING, False, "value"),
    ],
    "GlobalMetadata": [
        ("version", 1, Fields.TYPE_STRING, False, ""),
        ("attr", 2, Fields.TYPE_MESSAGE, True, ".ChakraProtoMsg.AttributeProto"),
    ],
    "Node": [
        ("id", 1, Fields.TYPE_UINT64, False, ""),
        ("name", 2, Fields.TYPE_STRING, False, ""),
        ("type", 3, Fields.TYPE_INT32, False, ""),
        ("ctrl_deps", 4, Fields.TYPE_UINT64, True, ""),
        ("data_deps", 5, Fields.TYPE_UINT64, True, ""),
        ("start_time_micros", 6, Fields.TYPE_UINT64, False, ""),
        ("duration_micros", 7, Fields.TYPE_UINT64, False, ""),
        ("attr", 10, Fields.TYPE_MESSAGE, True, ".ChakraProtoMsg.AttributeProto"),
    ],
}
LOAD, STORE, COMPUTE, SEND, RECEIVE, COLLECTIVE = 2, 3, 4, 5, 6, 7


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field_name, field_number, kind, repeated, type_name in fields:
            label = Fields.LABEL_REPEATED if repeated else Fields.LABEL_OPTIONAL
            proto_field = message.field.add(name=field_name, number=field_number, type=kind, label=label)
            if type_name == "value":
                if not message.oneof_decl:
                    message.oneof_decl.add(name="value")
                proto_field.oneof_index = 0
            elif type_name:
                proto_field.type_name = type_name
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}")) for name in _SCHEMA
    }


MESSAGES = _messages()


@dataclass
class DecodedNode:
    """A node, with its attributes by name; duration in microseconds."""

    id: int
    name: str
    type: int
    deps: list[int]
    duration: int
    attr: dict[str, Any] = field(default_factory=dict)


def decode(content: bytes) -> tuple[str, list[DecodedNode]]:
    """The version and the nodes of a file; nothing in it is unknown to the schema."""
    messages = list(_split_messages(content))
    head = MESSAGES["GlobalMetadata"].FromString(messages[0])
    nodes = []
    for message in messages[1:]:
        node = MESSAGES["Node"].FromString(message)
        assert len(node.SerializeToString()) == len(message)
        attr = {item.name: getattr(item, item.WhichOneof("value")) for item in node.attr}
        nodes.append(DecodedNode(node.id, node.name, node.type, [*node.data_deps], node.duration_micros, attr))
    return head.version, nodes


def _split_messages(content: bytes) -> Any:
    """Length-delimited messages."""
    offset = 0
    while offset < len(content):
        size, shift = 0, 0
        while True:
            byte = content[offset]
            size |= (byte & 0x7F) << shift
            offset, shift = offset + 1, shift + 7
            if byte < 0x80:
                break
        yield content[offset : offset + size]
        offset += size


def replay(ranks: Sequence[list[DecodedNode]], groups: dict[int, list[int]]) -> float:
    """Makespan in microseconds of all nodes with their recorded durations."""
    replayer = _Replayer(ranks, groups)
    replayer.run()
    left = sum(map(len, ranks)) - sum(map(len, replayer.ends))
    assert not left, f"stuck with {left} nodes"
    return max(max(end.values()) for end in replayer.ends)


class _Replayer:
    """A collective begins when all members have arrived; a message arrives when its sender has sent it.

    blocked: how many dependencies of each node have not ended; waiting: nodes at a collective, or for a message.
    """

    def __init__(self, ranks: Sequence[list[DecodedNode]], groups: dict[int, list[int]]) -> None:
        self.ranks, self.groups = ranks, groups
        self.ends: list[dict[int, float]] = [{} for _ in ranks]
        self.blocked = [{node.id: len(node.deps) for node in nodes} for nodes in ranks]
        self.successors: list[dict[int, list[DecodedNode]]] = [{} for _ in ranks]
        self.waiting: dict[tuple[int, ...], list[tuple[int, DecodedNode]]] = {}
        self.sent: dict[tuple[int, ...], float] = {}
        self.collective_ids: dict[tuple[int, int], tuple[int, int]] = {}  # of a node: its group's, and which of that
        for rank, nodes in enumerate(ranks):
            call_counts: dict[int, int] = {}
            for node in nodes:
                for dep in node.deps:
                    self.successors[rank].setdefault(dep, []).append(node)
                if node.type == COLLECTIVE:
                    group = int(node.attr["pg_name"])
                    self.collective_ids[rank, node.id] = group, call_counts.setdefault(group, 0)
                    call_counts[group] += 1

    def run(self) -> None:
        """Run nodes whose dependencies have ended until there is none."""
        ready = [(rank, node) for rank, nodes in enumerate(self.ranks) for node in nodes if not node.deps]
        while ready:
            for rank, node in self.started_nodes(*ready.pop()):
                for successor in self.successors[rank].get(node.id, ()):
                    self.blocked[rank][successor.id] -= 1
                    if not self.blocked[rank][successor.id]:
                        ready.append((rank, successor))

    def started_nodes(self, rank: int, node: DecodedNode) -> list[tuple[int, DecodedNode]]:
        """Nodes that end now that the dependencies of this one have: itself, its peers, the receiver of its message."""
        if node.type == COLLECTIVE:
            collective_id = self.collective_ids[rank, node.id]
            members = self.waiting.setdefault(collective_id, [])
            members.append((rank, node))
            is_complete = len(members) == len(self.groups[collective_id[0]])
            return self.end_nodes(members, max(self.ready_time(*member) for member in members)) if is_complete else []
        if node.type == RECEIVE:
            message = node.attr["comm_src"], rank, node.attr["comm_tag"]
            if message not in self.sent:
                self.waiting[message] = [(rank, node)]
                return []
            return self.end_nodes([(rank, node)], max(self.ready_time(rank, node), self.sent[message]))
        ended = self.end_nodes([(rank, node)], self.ready_time(rank, node))
        if node.type == SEND:
            message = rank, node.attr["comm_dst"], node.attr["comm_tag"]
            self.sent[message] = self.ends[rank][node.id]
            ended += [end for receiver in self.waiting.pop(message, []) for end in self.started_nodes(*receiver)]
        return ended

    def ready_time(self, rank: int, node: DecodedNode) -> float:
        """When the last dependency of a node has ended."""
        return max((self.ends[rank][dep] for dep in node.deps), default=0.0)

    def end_nodes(self, started: list[tuple[int, DecodedNode]], begin: float) -> list[tuple[int, DecodedNode]]:
        """Nodes that start at once, with their ends noted."""
        for rank, node in started:
            self.ends[rank][node.id] = begin + node.duration
        return list(started)
