"""What is wrong with a scenario file, in one sentence for each mistake?

Mistakes are sentences behind the dotted key that the user wrote. Pydantic's errors are translated: the keys that its
sections add for shorthands (`cluster: dgx-h100` is `cluster: {name: dgx-h100}`) are cut off again.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from clustersim.common.errors import InputError, nearest, shown
from clustersim.scenario.config_reader import Section, yaml_number

_MOST_KEYS = 6
_SENTENCES = {
    "int_type": "{value} is not a whole number (no unit, no quotes)",
    "bool_type": "{value} is neither true nor false",
    "float_type": "{value} is not a number (no unit, no quotes)",
    "string_type": "{value} is not a text",
    "list_type": "{value} is not a list such as [1, 2]",
    "dict_type": "{value} is not a mapping of keys to values",
    "greater_than_equal": "{value} is too small; the smallest legal value is {ge:,}",
    "less_than_equal": "{value} is too large; the largest legal value is {le:,}",
}


def refuse(source: str, problems: Sequence[str]) -> InputError:
    """One error for all problems of one file: a sentence, or a count and one line for each."""
    if len(problems) == 1:
        return InputError(f"{source}: {problems[0]}")
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return InputError(f"{source}: {len(problems)} problems{lines}")


def translate(error: ValidationError, root: type[Section], written: Mapping[str, Any]) -> list[str]:
    """Sentences for pydantic's error about `written`, which should have been a `root`."""
    return [_sentence(detail, root, written) for detail in error.errors(include_url=False)]


def _sentence(detail: ErrorDetails, root: type[Section], written: Mapping[str, Any]) -> str:
    kind, location = detail["type"], detail["loc"]
    if kind == "extra_forbidden":
        return f"{_dotted(location)}: unknown key; {_remedy(location, root)}"
    key = _dotted(_as_written(location, written, missing=kind == "missing"))
    return f"{key}: {_wrong(detail, root)}"


def _wrong(detail: ErrorDetails, root: type[Section]) -> str:
    """What is wrong with a value, and what to write."""
    kind, location, value = detail["type"], detail["loc"], detail["input"]
    if kind == "missing":
        return f"is missing{_example(location, root)}"
    if kind == "model_type":
        return f"{shown(value)} is not a mapping of keys to values{_keys(root.at(location) or root)}"
    if kind == "int_type" and (meant := _whole(value)):
        return meant
    template = _SENTENCES.get(kind)
    return detail["msg"] if template is None else template.format(value=shown(value), **detail.get("ctx", {}))


def _whole(value: object) -> str:
    """What is wrong with a whole number that is written as another kind of value; empty if it is none."""
    if isinstance(value, float) and value.is_integer():
        return f"{shown(value)} has a point; write {int(value)}"
    return yaml_number(value, whole=True)


def _example(location: tuple[int | str, ...], root: type[Section]) -> str:
    """What may be written for a key that is missing."""
    section, key = root.at(location[:-1]) or root, location[-1]
    examples = section.model_fields[str(key)].examples if key in section.model_fields else None
    return f"; write {key}: {examples[0]}" if examples else ""


def _keys(section: type[Section]) -> str:
    """What may be written for a section."""
    if section.example:
        return f"; write {section.example}"
    keys = list(section.keys())
    return f"; its keys are {', '.join(keys[:_MOST_KEYS])}{' and others' * (len(keys) > _MOST_KEYS)}" if keys else ""


def _remedy(location: tuple[int | str, ...], root: type[Section]) -> str:
    """What an unknown key may have meant: a key beside it, or one of another section."""
    legal = (root.at(location[:-1]) or root).keys()
    if not legal:
        return f"{location[-2]} has no options"
    if len(location) > 2:  # too deep for a key that was meant for another section
        return nearest(str(location[-1]), legal)
    if len(location) > 1 and location[-1] in root.keys():  # noqa: SIM118
        return f"did you mean {location[-1]}, a key of the whole file?"
    sections = {key: section.keys() for key in root.keys() if (section := root.at([key])) is not None}  # noqa: SIM118
    return nearest(
        str(location[-1]), legal, elsewhere=[f"{key}.{inner}" for key in sections for inner in sections[key]]
    )


def _dotted(location: Iterable[int | str]) -> str:
    return ".".join(str(part) for part in location) or "the file"


def _as_written(location: tuple[int | str, ...], written: object, *, missing: bool) -> tuple[int | str, ...]:
    """Cut a location where the user's own nesting ends; an entry that stands without its list is entry 0 of it."""
    kept: list[int | str] = []
    for part in location:
        if isinstance(written, Mapping) and isinstance(part, int):
            kept.append(part)
            continue
        in_list = isinstance(written, list) and isinstance(part, int)
        if not in_list and not (isinstance(written, Mapping) and part in written):
            return location if missing else tuple(kept)
        kept.append(part)
        written = written[part]  # type: ignore[index]
    return tuple(kept)
