"""Which keys does a scenario file have, for readers? The page of the manual, made from the schema.

A table for each section: keys, legal values, what holds where a key is left out, meaning. Nothing is said here that the
sections do not say.
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


def reference(schema: Schema) -> str:
    """The page, in Markdown, of a schema such as `scenario_schema`."""
    places = _places(schema)
    shown = {id(section): path for path, section in places.items()}
    parts = [_HEAD, *_units(), *(_table(path, section, schema, shown) for path, section in places.items())]
    return "\n".join(parts)


def _units() -> Iterator[str]:
    """Units of quantities."""
    yield "A quantity is a string with its unit; G is 10⁹, Gi is 2³⁰, b a bit, B a byte:\n"
    yield "| quantity | units | for example |\n|---|---|---|"
    for dimension in Dimension:
        yield f"| {dimension.name.lower()} | {_multiples([*dimension.factors])} | `{dimension.example}` |"
    yield ""


def _multiples(units: list[str]) -> str:
    """Few units by name, of many those that others are multiples of."""
    plain = [unit for unit in units if not any(unit == f"{prefix}{other}" for prefix in _PREFIXES for other in units)]
    found = [prefix for prefix in _PREFIXES if f"{prefix}{plain[0]}" in units]
    few = len(units) < len(_PREFIXES)
    return _words(units) if few else f"{_words(plain)}, and with {_words(found)}"


def _places(schema: Schema) -> dict[str, Schema]:
    """Every section that has keys, by the path of keys where it comes first."""
    found: dict[str, Schema] = {_TOP: schema}
    queue = [("", schema)]
    while queue:
        path, section = queue.pop(0)
        for key, value in section["properties"].items():
            for inner, name in _sections(value, schema):
                below = f"{path}{key}{name}"
                if not any(inner is item for item in found.values()):
                    found[below] = inner
                    queue.append((f"{below}.", inner))
    return {path: found[path] for path in sorted(found, key=lambda path: _rank(path, schema))}


def _rank(path: str, schema: Schema) -> tuple[int, ...]:
    """Sections come in the order of the file, each followed by those inside."""
    order = [*schema["properties"]]
    return (-1,) if path == _TOP else (order.index(path.split(".")[0]),)


def _sections(value: Schema, schema: Schema, name: str = "") -> Iterator[tuple[Schema, str]]:
    """Sections with keys that a value may be, and what stands in their path behind the key."""
    if "$ref" in value:
        yield from _sections(_resolved(value, schema), schema, name)
    for item in value.get("anyOf", ()):
        yield from _sections(item, schema, name)
    if "items" in value:
        yield from _sections(value["items"], schema, name)
    if isinstance(value.get("additionalProperties"), Mapping):
        yield from _sections(value["additionalProperties"], schema, f"{name}.NAME")
    if value.get("properties"):
        yield value, name


def _resolved(value: Schema, schema: Schema) -> Schema:
    found: Schema = schema["$defs"][value["$ref"].rsplit("/", 1)[-1]]
    return found


def _table(path: str, section: Schema, schema: Schema, shown: Mapping[int, str]) -> str:
    """A heading, what the section is, and a row for each of its keys."""
    lines = [f"## {path}", "", *_introduction(path, section, schema), *_COLUMNS]
    for key, value in section["properties"].items():
        cells = (f"`{key}`", _legal(value, schema, shown), *reversed(_meaning(key, value, section, schema)))
        lines.append(f"| {' | '.join(cell.replace('|', _PIPE) for cell in cells)} |")
    return "\n".join([*lines, ""])


def _introduction(path: str, section: Schema, schema: Schema) -> Iterator[str]:
    """What the section's own words say, without its key, and what may be written in place of a mapping."""
    description = section.get("description", "").split("\n\n")[0]
    if path != _TOP and description:
        yield from (f"{' '.join(description.split())}", "")
    if "maxProperties" in section:
        yield from ("One key at a time.", "")
    for item in _whole(section, schema):
        if "enum" in item:
            yield from (f"A word alone: {_words(item['enum'])}.", "")
        elif "$comment" in item:
            alone = "A word or a number alone " if item["$comment"].startswith("is ") else "Also written: "
            yield from (f"{alone}{item['$comment']}.", "")


def _whole(section: Schema, schema: Schema) -> Iterator[Schema]:
    """What may stand in a section's place."""
    for item in schema["$defs"].values():
        parts = item.get("anyOf", ())
        if any(part is section for part in parts):
            for other in (part for part in parts if part is not section):
                yield from other.get("anyOf", [other])


def _meaning(key: str, value: Schema, section: Schema, schema: Schema) -> tuple[str, str]:
    """What a key means, and what holds without it."""
    meaning, _, told = value["description"].partition(_LEFT_OUT)
    if told:
        return meaning, told
    if key in section.get("required", ()):
        return meaning, "needed"
    if "default" in value:
        return meaning, _default(value)
    if "maxProperties" in section:
        return meaning, "another one"
    return meaning, "its keys' own" if [*_sections(value, schema)] else "nothing"


def _default(value: Schema) -> str:
    default = value["default"]
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if "size" in value.get("$comment", ""):
        return f"`{format_bytes(default)}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _legal(value: Schema, schema: Schema, shown: Mapping[int, str]) -> str:
    """The legal values in words."""
    if "$ref" in value:
        return _legal(_resolved(value, schema), schema, shown)
    if "enum" in value:
        return _words(value["enum"])
    comment = value.get("$comment", "").removeprefix("is ")
    if comment and id(value) not in shown and "not" not in value and value.get("type") != ["string", "number"]:
        links = dict.fromkeys(_link(shown[id(item)]) for item, _ in _sections(value, schema))
        examples = (
            [f"such as {', '.join(f'`{element}`' for element in value['examples'])}"] if "examples" in value else []
        )
        return ", ".join([comment, *examples, *(f"see {link}" for link in links)])
    if "anyOf" in value:
        texts = dict.fromkeys(filter(None, (_legal(entry, schema, shown) for entry in value["anyOf"])))
        return ", or ".join(texts)
    return _of_type(value, schema, shown)


def _of_type(value: Schema, schema: Schema, shown: Mapping[int, str]) -> str:
    match value.get("type"):
        case "integer" | "number":
            return _numbers(value)
        case "array":
            return f"a list: {_legal(value['items'], schema, shown)}"
        case "object":
            return _mapping(value, schema, shown)
        case other:
            return {"boolean": "`true`, `false`", "string": "a name"}.get(str(other), "")


def _mapping(value: Schema, schema: Schema, shown: Mapping[int, str]) -> str:
    inner = value.get("additionalProperties")
    if id(value) in shown:
        return f"see {_link(shown[id(value)])}"
    if isinstance(inner, Mapping):
        return f"by name: {_legal(inner, schema, shown)}"
    return "no options" if inner is False else "a mapping"


def _numbers(value: Schema) -> str:
    least, most = value.get("minimum", value.get("exclusiveMinimum")), value.get("maximum")
    if least is None:
        return "a number"
    words = f"{'above ' if 'exclusiveMinimum' in value else ''}{_plain(least)}"
    return words if most is None else f"{words} to {_plain(most)}"


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,g}"


def _words(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _link(path: str) -> str:
    return f"[{path}](#{path.lower().replace('.', '').replace(' ', '-')})"
