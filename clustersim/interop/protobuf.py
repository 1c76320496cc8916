"""Minimal protocol buffers encoder: how is a message encoded in a file?

Supports the field types of Chakra's schema: integers, strings, messages, packed integers. So little of the
format is needed that no library is used: generated code would depend on one of its versions. Tests read the
output with Google's library. Reference: protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterable
from typing import Final

_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
_CONTINUATION_BIT: Final = 0x80  # set in every byte but the last
_PAYLOAD_BITS: Final = 7


def encode_varint(value: int) -> bytes:
    """A non-negative integer as a varint: groups of seven bits, least significant first."""
    encoded = bytearray()
    while value >= _CONTINUATION_BIT:
        encoded.append(value & (_CONTINUATION_BIT - 1) | _CONTINUATION_BIT)
        value >>= _PAYLOAD_BITS
    encoded.append(value)
    return bytes(encoded)


def integer_field(field_number: int, value: int) -> bytes:
    """An integer, boolean or enumeration field; 0 is the default and is omitted."""
    return encode_varint(field_number << 3 | _VARINT) + encode_varint(value) if value else b""


def oneof_field(field_number: int, value: int) -> bytes:
    """An integer field of a `oneof`, which is written even if it is 0."""
    return encode_varint(field_number << 3 | _VARINT) + encode_varint(value)


def message_field(field_number: int, value: bytes) -> bytes:
    """A field that holds an encoded message."""
    return encode_varint(field_number << 3 | _LENGTH_DELIMITED) + encode_varint(len(value)) + value


def string_field(field_number: int, value: str) -> bytes:
    """A string field; the empty string is the default and is omitted."""
    return message_field(field_number, value.encode()) if value else b""


def packed_field(field_number: int, values: Iterable[int]) -> bytes:
    """A packed repeated integer field."""
    packed = b"".join(map(encode_varint, values))
    return message_field(field_number, packed) if packed else b""


def length_delimited(message: bytes) -> bytes:
    """A message prefixed by its length, as in a file of several messages."""
    return encode_varint(len(message)) + message
