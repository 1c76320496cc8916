"""How is a shell script parsed? With tree-sitter's grammar of bash, within bounds."""

import re
import time
from collections.abc import Iterator
from functools import cache
from typing import Final

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from clustersim.common.errors import InputError

MAX_SCRIPT: Final = 200_000
"""Characters of a script; launch scripts have up to 50,000."""
_MAX_SECONDS: Final = 4.0
"""CPU time to parse one; a launch script takes a hundredth. The grammar's recovery from errors may be quadratic."""
_MAX_PIPES: Final = 1_000
_SLICE: Final = 65_536
_MAX_DEPTH: Final = 150
_PLACEHOLDER: Final = re.compile(r"(?m)^([ \t]*(?:export[ \t]+)?[A-Za-z_]\w*=)(<[^<>\n()$]*>[^\s;#&|<>]*)")
"""An assignment whose value the script's author left for the reader to fill in."""
_OFFSET: Final = re.compile(r"(\$\{\w+:)(\$\w+(?:[-+*/]\$?\w+)*)(?=[:}])")
"""An offset of `${NAME:OFFSET}` that begins with a variable, which the grammar reads in `$(( ))` alone."""


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def parse_script(text: str, source: str) -> Node:
    """The syntax tree; raises InputError for a text that is too long or deep, or holds a NUL."""
    if len(text) > MAX_SCRIPT:
        raise InputError(f"{source}: has {len(text):,} characters; a launch script has at most {MAX_SCRIPT:,}")
    if "\0" in text:
        raise InputError(f"{source}: holds a NUL, so it is no script")
    normalized = text.replace("\r\n", "\n")
    normalized = _OFFSET.sub(r"\1$((\2))", normalized)
    normalized = re.sub(r"\\\s*\Z", "\n", normalized)  # a last line that is continued by none
    pipes = max(line.count("|") for line in normalized.split("\n"))
    if pipes > _MAX_PIPES:  # the grammar's time is quadratic in them
        raise InputError(f"{source}: has a line with {pipes:,} pipes; a launch script has at most {_MAX_PIPES:,}")
    _require_shallow(normalized, source)
    marked = _PLACEHOLDER.sub(lambda match: f"{match[1]}$'{match[2]}'" if "'" not in match[2] else match[0], normalized)
    return _parse(marked.encode(), source)


def _parse(code: bytes, source: str) -> Node:
    started = time.thread_time()
    try:
        tree = _parser().parse(
            lambda start, _point: code[start : start + _SLICE],
            progress_callback=lambda *_state: time.thread_time() - started > _MAX_SECONDS,
        )
    except ValueError:  # the callback ended it
        raise InputError(f"{source}: is no shell script that can be parsed in {_MAX_SECONDS:.0f} s") from None
    return tree.root_node


def _require_shallow(text: str, source: str) -> None:
    """Raise InputError for a text whose brackets or keywords nest deeper than any script's."""
    depth = 0
    for match in re.finditer(r"[({]|[)}]|\b(?:if|case|do)\b|\b(?:fi|esac|done)\b", text):
        opens = match[0] in ("(", "{", "if", "case", "do")
        depth = max(0, depth + (1 if opens else -1))
        if depth > _MAX_DEPTH * 4:
            raise InputError(f"{source}: is nested more than {_MAX_DEPTH * 4} deep, as no launch script is")


def node_text(node: Node) -> str:
    """The script's text of a node."""
    return (node.text or b"").decode(errors="replace")


def first_line(node: Node) -> int:
    """The line on which a node begins, from 1."""
    return int(node.start_point[0]) + 1


def faulty_nodes(node: Node) -> Iterator[Node]:
    """The parts of a tree that the grammar does not read."""
    pending = [node]
    while pending:
        current = pending.pop()
        if current.is_error or current.is_missing:
            yield current
        elif current.has_error:
            pending += reversed(current.children)


def assigned_names(node: Node) -> Iterator[str]:
    """The variables that statements set: by assignments, `read`, `mapfile` and arithmetic."""
    pending = [node]
    while pending:
        current = pending.pop()
        pending += current.named_children
        text = node_text(current)
        if current.type == "variable_assignment":
            yield from re.findall(r"^\w+", text)
        elif current.type == "command" and re.match(r"(read|mapfile|readarray)\b", text):
            yield from re.findall(r"(?<=\s)[A-Za-z_]\w*(?=\s|$)", text.partition("<")[0])
        elif text.startswith(("((", "let ")):
            yield from re.findall(r"\b([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))", text)
