"""Hostile variants of a valid file: of its text, and of what it holds.

Everything is drawn from one `random.Random`, so that a seed reproduces a variant.
"""

import copy
import json
import random
import re
from typing import Any

import yaml

TOKENS = (
    "", "-1", "0", "1.5", "1e400", "-1e400", "1e-300", "nan", ".nan", ".inf", "-.inf", "null", "~", "true", "[]",
    "{}", "[1, 2]", "{a: b}", "2024-01-01", "12:30:45", "!!int ''", "!!float ''", "!!binary aGk=",
    "!!python/object:os.system x", "9" * 30, "-" + "9" * 30, "9" * 5000, "0x" + "F" * 5000, "0o17", "1_000", "1,000",
    "10 GB", "-5 GB", "0 GB/s", "1 parsec", "*x", "&x", "<<: *x", "%TAG", "---", "\x00", "\x1b[31m",
    "\x1b]0;title\x07", "é", "\u202e", "\ud7ff", "=1+1", "'", '"', "a: b: c", "../../etc/passwd", "/dev/zero",
    "$(id)", "${x:-y}", "`id`", "\\", ",", ";", "0F" + "9" * 20, "a" * 300, "no", "1:2:3:4:5", "[" * 200, "(1,",
    "%s%n", "{0}", "\t",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**99, 0.0, -0.0, 1.5, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), "", "x", "1", "-1 GB", "1e400 GB/s", "10 GB", "0 s", [], {}, [None], [[]], [1, 2, 3],
    {"": None}, {"a": {"b": {"c": 1}}}, [{}], "\x00", "\x1b[31m", "9" * 90, ["x"] * 50, {"1": 1}, "2024-01-01",
    "=cmd()",
)  # fmt: skip


def mutate_text(text: str, source: random.Random) -> str:
    """A variant with one to three changed places: words, lines and characters dropped, repeated or replaced."""
    for _ in range(source.randint(1, 3)):
        text = source.choice(_TEXT_CHANGES)(text, source)
    return text


def mutate_content(text: str, source: random.Random, *, is_json: bool) -> str:
    """A variant of a YAML or JSON file with one to three changed values, keys or entries."""
    content = json.loads(text) if is_json else yaml.safe_load(text)
    for _ in range(source.randint(1, 3)):
        content = _changed_content(copy.deepcopy(content), source)
    return json.dumps(content, default=str) if is_json else yaml.safe_dump(content)


def _changed_content(content: Any, source: random.Random) -> Any:
    holders = [holder for holder in _containers(content) if len(holder)]
    if not holders:
        return source.choice(VALUES)
    holder = source.choice(holders)
    key = source.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    match source.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(source.choice(VALUES))[:40]] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.extend([holder[key]] * source.randint(1, 40))
        case 3 if isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * source.choice([-1, 0, 0.5, 1e-9, 1e9, 10**25, 3])
        case _:
            holder[key] = copy.deepcopy(source.choice(VALUES))
    return content


def _containers(content: Any) -> list[Any]:
    listed, pending = [], [content]
    while pending:
        value = pending.pop()
        if isinstance(value, (dict, list)):
            listed.append(value)
            pending.extend(value.values() if isinstance(value, dict) else value)
    return listed


def _drop_slice(text: str, source: random.Random) -> str:
    start = source.randrange(len(text) + 1)
    return text[:start] + text[start + source.choice([1, 2, 10, 200]) :]


def _truncate(text: str, source: random.Random) -> str:
    return text[: source.randrange(len(text) + 1)]


def _insert_token(text: str, source: random.Random) -> str:
    start = source.randrange(len(text) + 1)
    return text[:start] + source.choice(TOKENS) + text[start:]


def _replace_word(text: str, source: random.Random) -> str:
    words = list(re.finditer(r"[\w.\-]+", text))
    if not words:
        return source.choice(TOKENS)
    word = source.choice(words)
    return text[: word.start()] + source.choice(TOKENS) + text[word.end() :]


def _replace_cell(text: str, source: random.Random) -> str:
    parts = re.split(r"([,\n ])", text)
    parts[source.randrange(len(parts))] = source.choice(TOKENS)
    return "".join(parts)


def _change_lines(text: str, source: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    index = source.randrange(len(lines))
    match source.randrange(3):
        case 0:
            del lines[index]
        case 1:
            lines.insert(index, lines[source.randrange(len(lines))])
        case 2:
            lines[index] = " " * source.randint(0, 3) + lines[index].lstrip()
    return "".join(lines)


_TEXT_CHANGES = (_drop_slice, _truncate, _insert_token, _replace_word, _replace_word, _replace_cell, _change_lines)
