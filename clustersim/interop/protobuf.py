"""How does a message of protocol buffers look in a file?

Fields as Chakra's schema has them: numbers, texts, messages, lists of numbers. So little of the format is needed that
no library is: generated code would tie this program to one of its versions. Tests read what is written with Google's.
Reference: protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterable
from typing import Final

_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
_CONTINUATION_BIT: Final = 0x80  # of a byte that another one follows
_PAYLOAD_BITS: Final = 7


def encode_varint(value: int) -> bytes:
    """A whole number, not below zero, in groups of seven bits, the lowest first."""
    encoded = bytearray()
    while value >= _CONTINUATION_BIT:
        encoded.append(value & (_CONTINUATION_BIT - 1) | _CONTINUATION_BIT)
        value >>= _PAYLOAD_BITS
    encoded.append(value)
    return bytes(encoded)


def integer_field(field_number: int, value: int) -> bytes:
    """A field that is a whole number, a truth value or of an enumeration; of those not said a reader takes 0."""
    return encode_varint(field_number << 3 | _VARINT) + encode_varint(value) if value else b""


def oneof_field(field_number: int, value: int) -> bytes:
    """The same of a field that is one of several (`oneof`), which is written even where it is 0."""
    return encode_varint(field_number << 3 | _VARINT) + encode_varint(value)


def message_field(field_number: int, value: bytes) -> bytes:
    """A field that is a message."""
    return encode_varint(field_number << 3 | _LENGTH_DELIMITED) + encode_varint(len(value)) + value


def string_field(field_number: int, value: str) -> bytes:
    """A field that is a text."""
    return message_field(field_number, value.encode()) if value else b""


def packed_field(field_number: int, values: Iterable[int]) -> bytes:
    """A field that is a list of whole numbers."""
    packed = b"".join(map(encode_varint, values))
    return message_field(field_number, packed) if packed else b""


def length_delimited(message: bytes) -> bytes:
    """A message in a file of several: its length stands before it."""
    return encode_varint(len(message)) + message
