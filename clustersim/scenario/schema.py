"""What may a scenario file say, for editors? JSON Schema (draft 2020-12), made from the sections that read it.

Editors complete keys and check what sections check of shapes and words. What reads a value itself (quantities with
units, rates, shares) is left to it: the schema lets it through.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from itertools import pairwise
from textwrap import dedent
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from clustersim.scenario.config.scenario import ScenarioFile
from clustersim.scenario.config_reader import Choice, Reader, Section, Shipped

_READERS: Final = (Section, Shipped, Choice)
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def scenario_schema() -> dict[str, Any]:
    """The schema of a scenario file."""
    found = ScenarioFile.model_json_schema(schema_generator=_Sections)
    return {"$schema": _DIALECT, "title": "clustersim scenario", **_plain(found)}


def dotted_keys() -> tuple[str, ...]:
    """Every key of a scenario file that can be given a value by itself, such as `layout.tp`, in the file's order.

    Keys inside lists, and those that a user names, are not among them.
    """
    return tuple(_keys(ScenarioFile, ""))


def _keys(section: type[Section], prefix: str) -> Iterator[str]:
    for key, annotation in section.keys().items():
        kinds = [kind for kind in _kinds(annotation) if kind is not NoneType]
        inner = [item for item in kinds if isinstance(item, type) and issubclass(item, Section)]
        if len(inner) < len(kinds) or any(_shorthand(element) is not None for element in inner):
            yield f"{prefix}{key}"
        for entry in inner:
            yield from _keys(entry, f"{prefix}{key}.")


def _kinds(annotation: object) -> Iterator[object]:
    """The types that a value may have."""
    if get_origin(annotation) in {Annotated, Union, UnionType}:
        for get_arg in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
            yield from _kinds(get_arg)
    else:
        yield annotation


class _Sections(GenerateJsonSchema):
    """Sections as users write them: also by their shorthand, and what a validator reads as it likes."""

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """What stands behind something that reads a value first."""
        reader = schema["function"]["function"]
        if isinstance(reader, Reader):
            examples = {"examples": [*reader.examples]} if reader.examples else {}
            typed = self.generate_inner(TypeAdapter(reader.of).core_schema)
            return {**typed, "$comment": reader.legal, **examples}
        if "json_schema_input_schema" in schema:
            return self.generate_inner(schema["json_schema_input_schema"])
        return self.generate_inner(schema["schema"]) if _is_of_section(schema) else {}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """A section, or its shorthand."""
        written = super().model_schema(schema)
        words = _words(schema["cls"])
        for key, value in written["properties"].items():
            value["description"] = words[key]
        if issubclass(schema["cls"], Choice):
            written |= {"minProperties": 1, "maxProperties": 1}
        short = _shorthand(schema["cls"])
        return written if short is None else {"anyOf": [short, written]}


def _words(section: type[Section]) -> dict[str, str]:
    """What each key means: the string below it in the source, in one line.

    Read here, and not when sections are imported, because most commands need no words. Raises TypeError for a key
    without any.
    """
    found = {name: words for item in reversed(section.__mro__) if item not in _READERS for name, words in _below(item)}
    found = {**dict(_below(Shipped)), **found} if issubclass(section, Shipped) else found
    fields = section.model_fields.items()
    missing = [name for name, _ in fields if name not in found]
    if missing:
        raise TypeError(f"{section.__name__}.{missing[0]} says nowhere what it means; write a string below it")
    return {field.alias or name: found[name] for name, field in fields}


def _below(section: type) -> Iterator[tuple[str, str]]:
    """Keys of a class itself, and the strings below them."""
    if not issubclass(section, Section):
        return
    (defined,) = ast.parse(dedent(inspect.getsource(section))).body
    for key, words in pairwise(getattr(defined, "body", ())):
        match key, words:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def _is_of_section(schema: Any) -> bool:
    """Whether validators stand before the keys of a section, and not before a value."""
    while "schema" in schema:
        schema = schema["schema"]
    return bool(schema["type"] == "model-fields")


def _shorthand(section: type) -> JsonSchemaValue | None:
    """What a section may be written as beside a mapping."""
    if not issubclass(section, Section):
        return None
    own = all("written_out" not in vars(item) for item in section.__mro__ if item not in _READERS)
    if issubclass(section, Choice) and section.words:
        return {"enum": [*section.words]} if own else {"anyOf": [{"enum": [*section.words]}, {"type": "string"}]}
    if not own:
        return {"not": {"type": "object"}, **_comment(section.example)}
    return None if section.short is None else {"type": ["string", "number"], **_comment(f"is `{section.short}`")}


def _comment(words: str) -> JsonSchemaValue:
    return {"$comment": words} if words else {}


def _plain(schema: Any) -> Any:
    """Without titles, which repeat keys, and without defaults that are written out in other words than a file's."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    keys = {
        key: value
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and not _told(value))
    }
    return {key: _plain(value) for key, value in keys.items()}


def _told(default: object) -> bool:
    return isinstance(default, (bool, int, float, str))
