"""The JSON Schema (draft 2020-12) of scenario files for editors, generated from the config models.

Editors complete keys and check structure and enumerated words. Values with their own parser (quantities with
units, rates, fractions) are accepted by the schema and checked on loading.
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

from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.config_reader import ConfigModel, OneOfConfig, PresetOrPathConfig, ValueParser

_BASE_MODELS: Final = (ConfigModel, PresetOrPathConfig, OneOfConfig)
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def scenario_schema() -> dict[str, Any]:
    """The JSON schema of a scenario file."""
    generated = ScenarioConfig.model_json_schema(schema_generator=_ConfigSchemaGenerator)
    return {"$schema": _DIALECT, "title": "clustersim scenario", **_strip_schema(generated)}


def dotted_keys() -> tuple[str, ...]:
    """Every key of a scenario file that can be set by itself, such as `layout.tp`, in the file's order.

    Keys inside lists and user-defined keys are excluded.
    """
    return tuple(_iter_dotted_keys(ScenarioConfig, ""))


def _iter_dotted_keys(model: type[ConfigModel], prefix: str) -> Iterator[str]:
    for key, annotation in model.key_types().items():
        value_types = [value_type for value_type in _value_types(annotation) if value_type is not NoneType]
        nested_models = [
            value_type
            for value_type in value_types
            if isinstance(value_type, type) and issubclass(value_type, ConfigModel)
        ]
        if len(nested_models) < len(value_types) or any(
            _shorthand_schema(nested_model) is not None for nested_model in nested_models
        ):
            yield f"{prefix}{key}"
        for section_model in nested_models:
            yield from _iter_dotted_keys(section_model, f"{prefix}{key}.")


def _value_types(annotation: object) -> Iterator[object]:
    """The types that a value may have: annotations and unions unwrapped."""
    if get_origin(annotation) in {Annotated, Union, UnionType}:
        for inner in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
            yield from _value_types(inner)
    else:
        yield annotation


class _ConfigSchemaGenerator(GenerateJsonSchema):
    """Generates schemas of config models as users write them: with shorthands, and parsed values left open."""

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """The schema of a value that a validator parses first."""
        parser = schema["function"]["function"]
        if isinstance(parser, ValueParser):
            examples = {"examples": [*parser.examples]} if parser.examples else {}
            type_schema = self.generate_inner(TypeAdapter(parser.schema_type).core_schema)
            return {**type_schema, "$comment": parser.allowed, **examples}
        if "json_schema_input_schema" in schema:
            return self.generate_inner(schema["json_schema_input_schema"])
        return self.generate_inner(schema["schema"]) if _is_model_validator(schema) else {}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """The schema of a config model, or of its shorthand."""
        mapping_schema = super().model_schema(schema)
        descriptions = _key_descriptions(schema["cls"])
        for key, value in mapping_schema["properties"].items():
            value["description"] = descriptions[key]
        if issubclass(schema["cls"], OneOfConfig):
            mapping_schema |= {"minProperties": 1, "maxProperties": 1}
        shorthand = _shorthand_schema(schema["cls"])
        return mapping_schema if shorthand is None else {"anyOf": [shorthand, mapping_schema]}


def _key_descriptions(model: type[ConfigModel]) -> dict[str, str]:
    """Description of each key: the docstring below it in the source, on one line.

    Parsed here and not at import, because most commands do not need it. Raises TypeError for a key without a
    docstring.
    """
    descriptions = {
        name: description
        for base in reversed(model.__mro__)
        if base not in _BASE_MODELS
        for name, description in _field_docstrings(base)
    }
    descriptions = (
        {**dict(_field_docstrings(PresetOrPathConfig)), **descriptions}
        if issubclass(model, PresetOrPathConfig)
        else descriptions
    )
    fields = model.model_fields.items()
    missing = [name for name, _ in fields if name not in descriptions]
    if missing:
        raise TypeError(f"{model.__name__}.{missing[0]} says nowhere what it means; write a string below it")
    return {field.alias or name: descriptions[name] for name, field in fields}


def _field_docstrings(model: type) -> Iterator[tuple[str, str]]:
    """The fields that a class itself defines, with their docstrings."""
    if not issubclass(model, ConfigModel):
        return
    (class_node,) = ast.parse(dedent(inspect.getsource(model))).body
    for statement, next_statement in pairwise(getattr(class_node, "body", ())):
        match statement, next_statement:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def _is_model_validator(schema: Any) -> bool:
    """Whether a before-validator applies to the fields of a config model, and not to a value."""
    while "schema" in schema:
        schema = schema["schema"]
    return bool(schema["type"] == "model-fields")


def _shorthand_schema(model: type) -> JsonSchemaValue | None:
    """Schema of the shorthand of a config model; None if it has none."""
    if not issubclass(model, ConfigModel):
        return None
    uses_default_expansion = all(
        "expand_shorthand" not in vars(base) for base in model.__mro__ if base not in _BASE_MODELS
    )
    if issubclass(model, OneOfConfig) and model.shorthands:
        return (
            {"enum": [*model.shorthands]}
            if uses_default_expansion
            else {"anyOf": [{"enum": [*model.shorthands]}, {"type": "string"}]}
        )
    if not uses_default_expansion:
        return {"not": {"type": "object"}, **_schema_comment(model.example)}
    return (
        None
        if model.shorthand_key is None
        else {"type": ["string", "number"], **_schema_comment(f"is `{model.shorthand_key}`")}
    )


def _schema_comment(text: str) -> JsonSchemaValue:
    return {"$comment": text} if text else {}


def _strip_schema(schema: Any) -> Any:
    """Remove titles, which repeat keys, and defaults that are not scalars as a file would have them."""
    if isinstance(schema, list):
        return [_strip_schema(element) for element in schema]
    if not isinstance(schema, Mapping):
        return schema
    keys = {
        key: value
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and not _is_scalar(value))
    }
    return {key: _strip_schema(value) for key, value in keys.items()}


def _is_scalar(default: object) -> bool:
    return isinstance(default, (bool, int, float, str))
