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
    pending = [(rank, node) for rank, nodes in enumerate(ranks) for node in nodes]
    while pending:
        remaining = [(rank, node) for rank, node in pending if not replayer.run_node(rank, node)]
        assert len(remaining) < len(pending), f"stuck with {len(remaining)} nodes"
        pending = remaining
    return max(max(end.values()) for end in replayer.ends)


class _Replayer:
    """A collective begins when all members have arrived; a message arrives when its sender has sent it."""

    def __init__(self, ranks: Sequence[list[DecodedNode]], groups: dict[int, list[int]]) -> None:
        self.groups = groups
        self.ends: list[dict[int, float]] = [{} for _ in ranks]
        self.arrived: dict[tuple[int, ...], float] = {}
        self.arrivals: dict[tuple[int, int], dict[int, float]] = {}
        self.collective_ids: dict[tuple[int, int], tuple[int, int]] = {}  # of a node: its group's, and which of that
        for rank, nodes in enumerate(ranks):
            call_counts: dict[int, int] = {}
            for node in (decoded_node for decoded_node in nodes if decoded_node.type == COLLECTIVE):
                group = int(node.attr["pg_name"])
                self.collective_ids[rank, node.id] = group, call_counts.setdefault(group, 0)
                call_counts[group] += 1

    def run_node(self, rank: int, node: DecodedNode) -> bool:
        """Run a node if its dependencies have ended; return whether it ran."""
        ends = self.ends[rank]
        if any(dep not in ends for dep in node.deps):
            return False
        begin = self.start_time(rank, node, max((ends[item] for item in node.deps), default=0.0))
        if begin is None:
            return False
        ends[node.id] = begin + node.duration
        if node.type == SEND:
            self.arrived[rank, node.attr["comm_dst"], node.attr["comm_tag"]] = ends[node.id]
        return True

    def start_time(self, rank: int, node: DecodedNode, ready: float) -> float | None:
        """Start time of a node that is ready at a time; None if a peer has not arrived yet."""
        if node.type == RECEIVE:
            sent = self.arrived.get((node.attr["comm_src"], rank, node.attr["comm_tag"]))
            return None if sent is None else max(ready, sent)
        if node.type != COLLECTIVE:
            return ready
        collective_id = self.collective_ids[rank, node.id]
        group_arrivals = self.arrivals.setdefault(collective_id, {})
        group_arrivals[rank] = ready
        return max(group_arrivals.values()) if len(group_arrivals) == len(self.groups[collective_id[0]]) else None
