"""Which keys does a scenario file have? Renders the manual's reference page from the JSON schema.

One table per section: keys, allowed values, default, description. All text comes from the config models.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from clustersim.common.units import Dimension, format_bytes

_HEAD: Final = """\
# Keys of the scenario file

Written by `clustersim schema --markdown`; the words are those of the sections that read the file
(`clustersim/scenario`). [The scenario file](scenario.md) explains what keys do together, and has examples. Unknown keys
are refused with the nearest legal one. `--set layout.data.zero.stage=1` names a key by its path.
"""
_COLUMNS: Final = ("| key | values | left out | meaning |", "|---|---|---|---|")
_LEFT_OUT: Final = "; left out: "
_PIPE: Final = "\\|"
_TOP: Final = "the file"
_PREFIXES: Final = ("k", "K", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")

Schema = Mapping[str, Any]
Sections = Mapping[str, Schema]
"""Sections by the path of keys that leads to them."""


def render_key_reference(schema: Schema) -> str:
    """The Markdown page of a schema such as `scenario_schema`."""
    sections_by_path = _sections_by_path(schema)
    paragraphs = [
        _HEAD,
        *_units_table(),
        *(_section_table(path, schema, sections_by_path) for path in sections_by_path),
    ]
    return "\n".join(paragraphs)


def _units_table() -> Iterator[str]:
    """The table of units of quantities."""
    yield "A quantity is a string with its unit; G is 10⁹, Gi is 2³⁰, b a bit, B a byte:\n"
    yield "| quantity | units | for example |\n|---|---|---|"
    for dimension in Dimension:
        yield f"| {dimension.name.lower()} | {_format_units([*dimension.factors])} | `{dimension.example}` |"
    yield ""


def _format_units(units: list[str]) -> str:
    """Units as text; long lists are shortened to base units and the prefixes they accept."""
    base_units = [
        unit for unit in units if not any(unit == f"{prefix}{other}" for prefix in _PREFIXES for other in units)
    ]
    prefixes = [prefix for prefix in _PREFIXES if f"{prefix}{base_units[0]}" in units]
    is_short = len(units) < len(_PREFIXES)
    return _code_list(units) if is_short else f"{_code_list(base_units)}, and with {_code_list(prefixes)}"


def _path_of(section: Schema, sections_by_path: Sections) -> str | None:
    """The path of a section, if it is one; equal sections at different paths are different ones."""
    return next((path for path, other in sections_by_path.items() if other is section), None)


def _sections_by_path(schema: Schema) -> dict[str, Schema]:
    """Every section with keys, by the first path of keys that leads to it."""
    sections: dict[str, Schema] = {_TOP: schema}
    queue = [("", schema)]
    while queue:
        path, section = queue.pop(0)
        for key, value in section["properties"].items():
            for inner, name in _nested_sections(value, schema):
                inner_path = f"{path}{key}{name}"
                if _path_of(inner, sections) is None:
                    sections[inner_path] = inner
                    queue.append((f"{inner_path}.", inner))
    return {path: sections[path] for path in sorted(sections, key=lambda path: _sort_key(path, schema))}


def _sort_key(path: str, schema: Schema) -> tuple[int, ...]:
    """Sort key: sections in the order of the file, each followed by its nested sections."""
    top_keys = [*schema["properties"]]
    return (-1,) if path == _TOP else (top_keys.index(path.split(".")[0]),)


def _nested_sections(value: Schema, schema: Schema, name: str = "") -> Iterator[tuple[Schema, str]]:
    """Nested sections that a value may hold, each with the suffix of its path."""
    if "$ref" in value:
        yield from _nested_sections(_resolve_ref(value, schema), schema, name)
    for alternative in value.get("anyOf", ()):
        yield from _nested_sections(alternative, schema, name)
    if "items" in value:
        yield from _nested_sections(value["items"], schema, name)
    if isinstance(value.get("additionalProperties"), Mapping):
        yield from _nested_sections(value["additionalProperties"], schema, f"{name}.NAME")
    if value.get("properties"):
        yield value, name


def _resolve_ref(value: Schema, schema: Schema) -> Schema:
    target: Schema = schema["$defs"][value["$ref"].rsplit("/", 1)[-1]]
    return target


def _section_table(path: str, schema: Schema, sections_by_path: Sections) -> str:
    """A heading, the section's description, and a table row for each of its keys."""
    section = sections_by_path[path]
    lines = [f"## {path}", "", *_section_introduction(path, section, schema), *_COLUMNS]
    for key, value in section["properties"].items():
        cells = (
            f"`{key}`",
            _describe_allowed(value, schema, sections_by_path),
            *reversed(_meaning_and_default(key, value, section, schema)),
        )
        lines.append(f"| {' | '.join(cell.replace('|', _PIPE) for cell in cells)} |")
    return "\n".join([*lines, ""])


def _section_introduction(path: str, section: Schema, schema: Schema) -> Iterator[str]:
    """The section's description, and the shorthands that may replace its mapping."""
    description = section.get("description", "").split("\n\n")[0]
    if path != _TOP and description:
        yield from (f"{' '.join(description.split())}", "")
    if "maxProperties" in section:
        yield from ("One key at a time.", "")
    for shorthand_schema in _shorthand_schemas(section, schema):
        if "enum" in shorthand_schema:
            yield from (f"A word alone: {_code_list(shorthand_schema['enum'])}.", "")
        elif "$comment" in shorthand_schema:
            lead = "A word or a number alone " if shorthand_schema["$comment"].startswith("is ") else "Also written: "
            yield from (f"{lead}{shorthand_schema['$comment']}.", "")


def _shorthand_schemas(section: Schema, schema: Schema) -> Iterator[Schema]:
    """Schemas of the shorthands that may replace a section's mapping."""
    for definition in schema["$defs"].values():
        alternatives = definition.get("anyOf", ())
        if any(alternative is section for alternative in alternatives):
            for other in (alternative for alternative in alternatives if alternative is not section):
                yield from other.get("anyOf", [other])


def _meaning_and_default(key: str, value: Schema, section: Schema, schema: Schema) -> tuple[str, str]:
    """The description of a key and its default, as text."""
    meaning, _, default_text = value["description"].partition(_LEFT_OUT)
    if default_text:
        return meaning, default_text
    if key in section.get("required", ()):
        return meaning, "needed"
    if "default" in value:
        return meaning, _format_default(value)
    if "maxProperties" in section:
        return meaning, "another one"
    return meaning, "its keys' own" if [*_nested_sections(value, schema)] else "nothing"


def _format_default(value: Schema) -> str:
    default = value["default"]
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if "size" in value.get("$comment", ""):
        return f"`{format_bytes(default)}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _describe_allowed(value: Schema, schema: Schema, sections_by_path: Sections) -> str:
    """The allowed values as text."""
    if "$ref" in value:
        return _describe_allowed(_resolve_ref(value, schema), schema, sections_by_path)
    if "enum" in value:
        return _code_list(value["enum"])
    comment = value.get("$comment", "").removeprefix("is ")
    if (
        comment
        and _path_of(value, sections_by_path) is None
        and "not" not in value
        and value.get("type") != ["string", "number"]
    ):
        paths = (_path_of(section, sections_by_path) for section, _ in _nested_sections(value, schema))
        links = dict.fromkeys(_section_link(path) for path in paths if path is not None)
        examples = (
            [f"such as {', '.join(f'`{example}`' for example in value['examples'])}"] if "examples" in value else []
        )
        return ", ".join([comment, *examples, *(f"see {link}" for link in links)])
    if "anyOf" in value:
        texts = dict.fromkeys(
            filter(None, (_describe_allowed(alternative, schema, sections_by_path) for alternative in value["anyOf"]))
        )
        return ", or ".join(texts)
    return _describe_type(value, schema, sections_by_path)


def _describe_type(value: Schema, schema: Schema, sections_by_path: Sections) -> str:
    match value.get("type"):
        case "integer" | "number":
            return _describe_number_range(value)
        case "array":
            return f"a list: {_describe_allowed(value['items'], schema, sections_by_path)}"
        case "object":
            return _describe_mapping(value, schema, sections_by_path)
        case other:
            return {"boolean": "`true`, `false`", "string": "a name"}.get(str(other), "")


def _describe_mapping(value: Schema, schema: Schema, sections_by_path: Sections) -> str:
    inner = value.get("additionalProperties")
    if (path := _path_of(value, sections_by_path)) is not None:
        return f"see {_section_link(path)}"
    if isinstance(inner, Mapping):
        return f"by name: {_describe_allowed(inner, schema, sections_by_path)}"
    return "no options" if inner is False else "a mapping"


def _describe_number_range(value: Schema) -> str:
    minimum, maximum = value.get("minimum", value.get("exclusiveMinimum")), value.get("maximum")
    if minimum is None:
        return "a number"
    lower_text = f"{'above ' if 'exclusiveMinimum' in value else ''}{_format_number(minimum)}"
    return lower_text if maximum is None else f"{lower_text} to {_format_number(maximum)}"


def _format_number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _code_list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _section_link(path: str) -> str:
    return f"[{path}](#{path.lower().replace('.', '').replace(' ', '-')})"
