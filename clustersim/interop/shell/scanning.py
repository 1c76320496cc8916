"""Where do quotes, expansions and words of shell text end?

Positions are indices into the text. An expansion or quote that never ends raises InputError.
"""

from collections.abc import Iterator
from typing import Final

from clustersim.common.errors import InputError

_MAX_DEPTH: Final = 60
_CLOSING: Final = {"(": ")", "{": "}"}


def skip_quoted(text: str, start: int, depth: int = 0) -> int:
    """The position after a quoted part, an expansion, an escaped or a plain character at `start`."""
    if depth > _MAX_DEPTH:
        raise InputError("quotes and expansions are nested too deeply")
    match text[start : start + 2]:
        case two if two.startswith("\\"):
            end = min(start + 2, len(text))
        case two if two.startswith("'"):
            end = _skip_to(text, "'", start + 1)
        case two if two.startswith('"'):
            end = _skip_until(text, start + 1, '"', depth)
        case two if two.startswith("`"):
            end = _skip_escaped(text, "`", start + 1)
        case "$(" | "${":
            end = skip_bracketed(text, start + 1, depth)
        case "$'":
            end = _skip_escaped(text, "'", start + 2)
        case _:
            end = start + 1
    return end


def skip_bracketed(text: str, start: int, depth: int = 0) -> int:
    """The position after the bracket that closes the one at `start`."""
    opening, closing = text[start], _CLOSING[text[start]]
    position, level = start + 1, 1
    while position < len(text):
        character = text[position]
        if character == closing:
            level -= 1
            if not level:
                return position + 1
        if character == opening:
            level += 1
        position = position + 1 if character in "(){}" else skip_quoted(text, position, depth + 1)
    raise InputError(f"{opening!r} is never closed")


def _skip_until(text: str, position: int, end: str, depth: int) -> int:
    """The position after the end of a double-quoted string; apostrophes mean nothing inside."""
    while position < len(text):
        if text[position] == end:
            return position + 1
        is_plain = text[position] == "'" or text[position : position + 2] == "$'"
        position = position + 1 if is_plain else skip_quoted(text, position, depth + 1)
    raise InputError("a quote is never closed")


def _skip_escaped(text: str, end: str, position: int) -> int:
    """The position after a quote in which a backslash escapes."""
    while position < len(text):
        if text[position] == end:
            return position + 1
        position += 2 if text[position] == "\\" else 1
    raise InputError("a quote is never closed")


def _skip_to(text: str, end: str, start: int) -> int:
    position = text.find(end, start)
    if position < 0:
        raise InputError("a quote is never closed")
    return position + 1


def raw_words(text: str) -> Iterator[str]:
    """The words of a line, quotes and expansions kept.

    >>> list(raw_words(' -n "${A[0]} b" && $(x y) '))
    ['-n', '"${A[0]} b"', '&&', '$(x y)']
    """
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        start = position
        while position < len(text) and not text[position].isspace():
            position = skip_quoted(text, position)
        if text[start:position] != "\\\n":
            yield text[start:position]


def single_quoted_positions(text: str) -> Iterator[int]:
    """The positions between single quotes, where nothing is expanded.

    >>> [*single_quoted_positions("a'b'c")]
    [2]
    """
    position, is_double = 0, False
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == '"':
            is_double = not is_double
        elif character == "'" and not is_double:
            end = text.find("'", position + 1)
            yield from range(position + 1, len(text) if end < 0 else end)
            position = len(text) if end < 0 else end
        position += 1
