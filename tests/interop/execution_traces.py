"""Chakra's schema (0.0.4), as far as it is written, for Google's own decoder; and a player of what was decoded."""

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
        for called, number, kind, repeated, more in fields:
            label = Fields.LABEL_REPEATED if repeated else Fields.LABEL_OPTIONAL
            added = message.field.add(name=called, number=number, type=kind, label=label)
            if more == "value":
                if not message.oneof_decl:
                    message.oneof_decl.add(name="value")
                added.oneof_index = 0
            elif more:
                added.type_name = more
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}")) for name in _SCHEMA
    }


MESSAGES = _messages()


@dataclass
class Decoded:
    """A node, with its attributes by name."""

    id: int
    name: str
    type: int
    deps: list[int]
    lasting: int
    attr: dict[str, Any] = field(default_factory=dict)


def decode(content: bytes) -> tuple[str, list[Decoded]]:
    """The version and the nodes of a file; nothing in it is unknown to the schema."""
    parts = list(_parts(content))
    head = MESSAGES["GlobalMetadata"].FromString(parts[0])
    nodes = []
    for part in parts[1:]:
        node = MESSAGES["Node"].FromString(part)
        assert len(node.SerializeToString()) == len(part)
        attr = {item.name: getattr(item, item.WhichOneof("value")) for item in node.attr}
        nodes.append(Decoded(node.id, node.name, node.type, [*node.data_deps], node.duration_micros, attr))
    return head.version, nodes


def _parts(content: bytes) -> Any:
    """Messages behind their lengths."""
    place = 0
    while place < len(content):
        size, shift = 0, 0
        while True:
            byte = content[place]
            size |= (byte & 0x7F) << shift
            place, shift = place + 1, shift + 7
            if byte < 0x80:
                break
        yield content[place : place + size]
        place += size


def played(ranks: Sequence[list[Decoded]], groups: dict[int, list[int]]) -> float:
    """When all nodes are done, in microseconds, with the durations that they have."""
    player = _Player(ranks, groups)
    waiting = [(rank, node) for rank, nodes in enumerate(ranks) for node in nodes]
    while waiting:
        left = [(rank, node) for rank, node in waiting if not player.done(rank, node)]
        assert len(left) < len(waiting), f"stuck with {len(left)} nodes"
        waiting = left
    return max(max(end.values()) for end in player.ends)


class _Player:
    """A collective begins when all members have come; a message has come when its sender has sent it."""

    def __init__(self, ranks: Sequence[list[Decoded]], groups: dict[int, list[int]]) -> None:
        self.groups = groups
        self.ends: list[dict[int, float]] = [{} for _ in ranks]
        self.arrived: dict[tuple[int, ...], float] = {}
        self.come: dict[tuple[int, int], dict[int, float]] = {}
        self.numbers: dict[tuple[int, int], tuple[int, int]] = {}  # of a node: its group's, and which of that
        for rank, nodes in enumerate(ranks):
            called: dict[int, int] = {}
            for node in (decoded for decoded in nodes if decoded.type == COLLECTIVE):
                group = int(node.attr["pg_name"])
                self.numbers[rank, node.id] = group, called.setdefault(group, 0)
                called[group] += 1

    def done(self, rank: int, node: Decoded) -> bool:
        """Run a node, if that can be known already."""
        ends = self.ends[rank]
        if any(dep not in ends for dep in node.deps):
            return False
        begin = self.begin(rank, node, max((ends[item] for item in node.deps), default=0.0))
        if begin is None:
            return False
        ends[node.id] = begin + node.lasting
        if node.type == SEND:
            self.arrived[rank, node.attr["comm_dst"], node.attr["comm_tag"]] = ends[node.id]
        return True

    def begin(self, rank: int, node: Decoded, ready: float) -> float | None:
        """When a node that may begin at a moment does, None: who it waits for is not there yet."""
        if node.type == RECEIVE:
            sent = self.arrived.get((node.attr["comm_src"], rank, node.attr["comm_tag"]))
            return None if sent is None else max(ready, sent)
        if node.type != COLLECTIVE:
            return ready
        number = self.numbers[rank, node.id]
        come = self.come.setdefault(number, {})
        come[rank] = ready
        return max(come.values()) if len(come) == len(self.groups[number[0]]) else None
