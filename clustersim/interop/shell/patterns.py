"""How do bash's patterns match, and what do its expansions remove and replace?"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

from clustersim.common.errors import InputError

_MAX_PATTERN: Final = 1000
_CLASSES: Final = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "space": r"\s", "upper": "A-Z", "lower": "a-z",
    "punct": r"!-/:-@\[-`{-~", "blank": r" \t", "xdigit": "0-9a-fA-F",
}  # fmt: skip


@lru_cache(maxsize=512)
def pattern_regex(pattern: str) -> re.Pattern[str]:
    r"""A pattern as a regular expression; a backslash makes the next character a literal.

    >>> bool(pattern_regex("*-7[bB]").fullmatch("llama-7B")), bool(pattern_regex(r"\*").fullmatch("x"))
    (True, False)
    """
    if len(pattern) > _MAX_PATTERN:
        raise InputError(f"a pattern of {len(pattern):,} characters is too long")
    segments: list[str] = []
    position = 0
    while position < len(pattern):
        segment, position = _next_part(pattern, position)
        if segment != ".*" or segments[-1:] != [".*"]:
            segments.append(segment)
    return re.compile("".join(segments), re.DOTALL)


def _next_part(pattern: str, position: int) -> tuple[str, int]:
    character = pattern[position]
    if character == "\\" and position + 1 < len(pattern):
        return re.escape(pattern[position + 1]), position + 2
    if character in "@?*+!" and pattern[position + 1 : position + 2] == "(":
        end = pattern.find(")", position)
        if end > 0 and character != "!":
            return _extended_part(character, pattern[position + 2 : end]), end + 1
    if character == "[":
        end = pattern.find("]", position + 2)
        if end > 0:
            return _bracket_part(pattern, position)
    return {"*": ".*", "?": "."}.get(character, re.escape(character)), position + 1


def _extended_part(character: str, alternatives: str) -> str:
    inner = "|".join(pattern_regex(alternative).pattern for alternative in alternatives.split("|"))
    return f"(?:{inner}){'' if character == '@' else character}"


def _bracket_part(pattern: str, position: int) -> tuple[str, int]:
    match = re.compile(r"\[([!^]?)((?:\[:\w+:\]|[^\]])(?:\[:\w+:\]|[^\]])*)\]").match(pattern, position)
    if match is None:
        return r"\[", position + 1
    inner = re.sub(r"\[:(\w+):\]", lambda name: f"\0{_CLASSES.get(name[1], '')}\0", match[2])
    escaped = "".join(
        segment
        if index % 2
        else segment.replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^").replace("&", r"\&")
        for index, segment in enumerate(inner.split("\0"))
    )
    return f"[{'^' if match[1] else ''}{escaped}]", match.end()


def matches_pattern(text: str, pattern: str) -> bool:
    """Whether all of a text matches a pattern."""
    try:
        return pattern_regex(pattern).fullmatch(text) is not None
    except re.error:
        return text == pattern


def _without_prefix(value: str, pattern: str, *, longest: bool) -> str:
    ends = range(len(value) + 1)
    for end in reversed(ends) if longest else ends:
        if matches_pattern(value[:end], pattern):
            return value[end:]
    return value


def _without_suffix(value: str, pattern: str, *, longest: bool) -> str:
    starts = range(len(value) + 1)
    for start in starts if longest else reversed(starts):
        if matches_pattern(value[start:], pattern):
            return value[:start]
    return value


def _replaced(value: str, pattern: str, replacement: str, count: int) -> str:
    if not pattern:
        return value
    return pattern_regex(pattern).sub(lambda _match: replacement, value, count=count)


def _anchored(value: str, pattern: str, replacement: str, *, at_start: bool) -> str:
    rest = (_without_prefix if at_start else _without_suffix)(value, pattern, longest=True)
    if rest == value and not matches_pattern("", pattern):
        return value
    return replacement + rest if at_start else rest + replacement


REMOVALS: Final[Mapping[str, Callable[[str, str], str]]] = {
    "##": lambda value, pattern: _without_prefix(value, pattern, longest=True),
    "#": lambda value, pattern: _without_prefix(value, pattern, longest=False),
    "%%": lambda value, pattern: _without_suffix(value, pattern, longest=True),
    "%": lambda value, pattern: _without_suffix(value, pattern, longest=False),
}
"""What `${value#pattern}` and its kin leave."""
REPLACEMENTS: Final[Mapping[str, Callable[[str, str, str], str]]] = {
    "//": lambda value, pattern, replacement: _replaced(value, pattern, replacement, 0),
    "/#": lambda value, pattern, replacement: _anchored(value, pattern, replacement, at_start=True),
    "/%": lambda value, pattern, replacement: _anchored(value, pattern, replacement, at_start=False),
    "/": lambda value, pattern, replacement: _replaced(value, pattern, replacement, 1),
}
"""What `${value/pattern/replacement}` and its kin yield."""
CASES: Final[Mapping[str, Callable[[str], str]]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda value: value[:1].upper() + value[1:],
    ",": lambda value: value[:1].lower() + value[1:],
}
"""What `${value^^}` and its kin yield."""
