"""Error messages for a scenario file, one sentence per problem.

A message is prefixed by the dotted key as the user wrote it. Pydantic's errors are translated: keys that the
config models insert for shorthands (`cluster: dgx-h100` is `cluster: {name: dgx-h100}`) are removed again.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from clustersim.common.errors import MAX_PROBLEMS, format_value, suggest_nearest
from clustersim.common.renamed_keys import SCENARIO, renamed_key_message
from clustersim.common.synonyms import find_key_synonym, has_no_effect
from clustersim.scenario.config_reader import ConfigModel, yaml_number_message

LIST_OF_KEYS: Final = "clustersim schema --markdown"
"""The command that lists all keys of a scenario file."""
_MAX_KEYS_SHOWN = 6
_MIN_SIMILARITY_ELSEWHERE: Final = 0.8  # of a key of another section, which is less likely meant
_ROUNDED_COUNT: Final = re.compile(r"(\d+) ?([kKmM])")  # 8k, which may be 8192 or 8000
_MESSAGES = {
    "int_type": "{value} is not a whole number (no unit, no quotes)",
    "bool_type": "{value} is neither true nor false",
    "float_type": "{value} is not a number (no unit, no quotes)",
    "string_type": "{value} is not a text",
    "list_type": "{value} is not a list such as [1, 2]",
    "dict_type": "{value} is not a mapping of keys to values",
    "greater_than_equal": "{value} is too small; the smallest legal value is {ge:,}",
    "less_than_equal": "{value} is too large; the largest legal value is {le:,}",
}


def translate_validation_error(
    error: ValidationError, root_model: type[ConfigModel], raw_mapping: Mapping[str, Any], section: Sequence[str] = ()
) -> list[str]:
    """Messages for pydantic's error about `raw_mapping`, which failed to validate as a `root_model`.

    section: path of the scenario file's section that `root_model` is; empty for the whole file.
    """
    details = error.errors(include_url=False)
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    meant_keys = {key for detail in unknown[:MAX_PROBLEMS] for key in _meant_keys(detail)}
    problems = [
        detail
        for detail in details
        if not (detail["type"] == "missing" and _dotted_path((*section, *detail["loc"])) in meant_keys)
    ]
    messages = [_message(detail, root_model, raw_mapping, section) for detail in problems[:MAX_PROBLEMS]]
    left_out = len(problems) - len(messages)
    return messages + [f"and {left_out:,} more problems"] * (left_out > 0)


def _meant_keys(detail: ErrorDetails) -> Iterator[str]:
    """The dotted key that another tool's word for it stands for, which is not missing besides."""
    if (meant := find_key_synonym(str(detail["loc"][-1]), str(detail["loc"][0]))) is not None:
        yield re.split(r"[,:]", meant)[0]


def _message(
    detail: ErrorDetails, root_model: type[ConfigModel], raw_mapping: Mapping[str, Any], section: Sequence[str]
) -> str:
    kind, location = detail["type"], detail["loc"]
    if renamed := _renamed_message(detail, section):
        return f"{_dotted_path(location)}: {renamed}"
    if kind == "extra_forbidden":
        return f"{_dotted_path(location)}: unknown key; {_unknown_key_hint(location, root_model)}"
    key = _dotted_path(_user_location(location, raw_mapping, missing=kind == "missing"))
    return f"{key}: {_describe_problem(detail, root_model)}"


def _renamed_message(detail: ErrorDetails, section: Sequence[str]) -> str | None:
    """New name of an old key, or of a bare word that stands for one; None for any other problem."""
    kind, location, value = detail["type"], (*section, *detail["loc"]), detail["input"]
    if kind == "extra_forbidden":
        return renamed_key_message(SCENARIO, location)
    is_word = kind == "mistake" and isinstance(value, str)
    renamed = renamed_key_message(SCENARIO, (*location, value)) if is_word else None
    return renamed and f"{value} {renamed}"


def _describe_problem(detail: ErrorDetails, root_model: type[ConfigModel]) -> str:
    """What is wrong with a value, and what to write instead."""
    kind, location, value = detail["type"], detail["loc"], detail["input"]
    if kind == "missing":
        return f"is missing{_missing_key_example(location, root_model)}"
    if kind == "model_type":
        return (
            f"{format_value(value)} is not a mapping of keys to "
            f"values{_describe_keys(root_model.config_at(location) or root_model)}"
        )
    if kind == "int_type" and (integer_message := _integer_message(value)):
        return integer_message
    template = _MESSAGES.get(kind)
    return detail["msg"] if template is None else template.format(value=format_value(value), **detail.get("ctx", {}))


def _integer_message(value: object) -> str:
    """What is wrong with an integer written as a float or a string; empty if the value is not one."""
    if isinstance(value, float) and value.is_integer():
        return f"{format_value(value)} has a point; write {int(value)}"
    if isinstance(value, str) and (match := _ROUNDED_COUNT.fullmatch(value.strip())):
        count, unit = int(match[1]), match[2].lower()
        binary, decimal = (count * (base ** (1 + "km".index(unit))) for base in (1024, 1000))
        return f"{format_value(value)} is not a whole number; write {binary} or {decimal}"
    return yaml_number_message(value, integer=True)


def _missing_key_example(location: tuple[int | str, ...], root_model: type[ConfigModel]) -> str:
    """Text with an example of a missing key; empty without one."""
    model, key = root_model.config_at(location[:-1]) or root_model, location[-1]
    examples = model.model_fields[str(key)].examples if key in model.model_fields else None
    return f"; write {key}: {examples[0]}" if examples else ""


def _describe_keys(model: type[ConfigModel]) -> str:
    """Text with an example or the allowed keys of a section."""
    if model.example:
        return f"; write {model.example}"
    keys = list(model.key_types())
    return (
        f"; its keys are {', '.join(keys[:_MAX_KEYS_SHOWN])}{' and others' * (len(keys) > _MAX_KEYS_SHOWN)}"
        if keys
        else ""
    )


def _unknown_key_hint(location: tuple[int | str, ...], root_model: type[ConfigModel]) -> str:
    """The likely intended key for an unknown one: of the same section, of another, or of another tool."""
    allowed, word = (root_model.config_at(location[:-1]) or root_model).key_types(), str(location[-1])
    if not allowed:
        return f"{location[-2]} has no options"
    if len(location) > 1 and location[-1] in root_model.key_types():
        return f"did you mean {word}, a key of the whole file?"
    if (meant := find_key_synonym(word, str(location[0]))) is not None:
        return f"write {meant}"
    if has_no_effect(word):
        return "the time of a step does not depend on it, leave it out"
    # too deep to be a misplaced key of another section
    unlisted = () if len(location) > 2 else _keys_elsewhere(word, root_model)
    return suggest_nearest(word, allowed, unlisted=unlisted, listed_by=LIST_OF_KEYS)


def _keys_elsewhere(word: str, root_model: type[ConfigModel]) -> list[str]:
    """The keys of that name that are nested least; without any, those of the file's sections with nearly that name."""
    inner_keys = list(_inner_keys(root_model))
    same_name = [key for key in inner_keys if key.rpartition(".")[2] == word]
    if same_name:
        depth = min(key.count(".") for key in same_name)
        return [key for key in same_name if key.count(".") == depth]
    section_keys = {key: key.rpartition(".")[2] for key in inner_keys if key.count(".") == 1}
    near = difflib.get_close_matches(word, sorted(set(section_keys.values())), n=1, cutoff=_MIN_SIMILARITY_ELSEWHERE)
    return [key for key, name in section_keys.items() if name in near]


def _inner_keys(model: type[ConfigModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of the sections in a config model, and of those in them."""
    for key in model.key_types():
        section = model.config_at([key])
        if section is not None:
            yield from (f"{prefix}{key}.{inner}" for inner in section.key_types())
            yield from _inner_keys(section, f"{prefix}{key}.")


def _dotted_path(location: Iterable[int | str]) -> str:
    return ".".join(str(key) for key in location) or "the file"


def _nested_keys(key: int | str, raw_value: object) -> tuple[str, ...]:
    """The keys of `cp: {kind: ...}`, which is short for `cp_kind`; none where the user wrote nothing like it."""
    section, _, name = str(key).partition("_")
    inner = raw_value.get(section) if isinstance(raw_value, Mapping) else None
    return (section, name) if isinstance(inner, Mapping) and name in inner else ()


def _user_location(location: tuple[int | str, ...], raw_value: object, *, missing: bool) -> tuple[int | str, ...]:
    """Truncate a location where the user's own nesting ends; a single entry written without its list is entry 0."""
    user_keys: list[int | str] = []
    for key in location:
        if isinstance(raw_value, Mapping) and isinstance(key, int):
            user_keys.append(key)
            continue
        in_list = isinstance(raw_value, list) and isinstance(key, int)
        if not in_list and not (isinstance(raw_value, Mapping) and key in raw_value):
            return location if missing else (*user_keys, *_nested_keys(key, raw_value))
        user_keys.append(key)
        raw_value = raw_value[key]  # type: ignore[index]
    return tuple(user_keys)
