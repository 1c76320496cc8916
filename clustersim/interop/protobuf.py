"""How does a message of protocol buffers look in a file?

Fields as Chakra's schema has them: numbers, texts, messages, lists of numbers. So little of the format is needed that
no library is: generated code would tie this program to one of its versions. Tests read what is written with Google's.
Reference: protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterable
from typing import Final

_VARINT: Final = 0
_LENGTH: Final = 2
_MORE: Final = 0x80  # of a byte that another one follows
_BITS: Final = 7


def varint(value: int) -> bytes:
    """A whole number, not below zero, in groups of seven bits, the lowest first."""
    found = bytearray()
    while value >= _MORE:
        found.append(value & (_MORE - 1) | _MORE)
        value >>= _BITS
    found.append(value)
    return bytes(found)


def number(field: int, value: int) -> bytes:
    """A field that is a whole number, a truth value or of an enumeration; of those not said a reader takes 0."""
    return varint(field << 3 | _VARINT) + varint(value) if value else b""


def chosen(field: int, value: int) -> bytes:
    """The same of a field that is one of several (`oneof`), which is written even where it is 0."""
    return varint(field << 3 | _VARINT) + varint(value)


def content(field: int, value: bytes) -> bytes:
    """A field that is a message."""
    return varint(field << 3 | _LENGTH) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    """A field that is a text."""
    return content(field, value.encode()) if value else b""


def numbers(field: int, values: Iterable[int]) -> bytes:
    """A field that is a list of whole numbers."""
    packed = b"".join(map(varint, values))
    return content(field, packed) if packed else b""


def delimited(message: bytes) -> bytes:
    """A message in a file of several: its length stands before it."""
    return varint(len(message)) + message
