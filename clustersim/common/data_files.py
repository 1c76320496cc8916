"""Packaged data files (accelerators, clusters, libraries, ...): where they are and how they are read.

In a checkout they are in `topologies/` next to the package; a wheel has them inside the package. Files are
parsed strictly: duplicate keys in one mapping are errors.
"""

import os
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from clustersim.common import input_files
from clustersim.common.errors import InputError, format_value, suggest_nearest

_PACKAGE = Path(__file__).parent.parent
_CATEGORY_NOUNS: Final = {
    "accelerators": "accelerator",
    "clusters": "cluster",
    "dispatchers": "dispatcher",
    "frameworks": "framework",
    "libraries": "library",
    "model_recipes": "file of recipes",
    "models": "file of models",
    "power": "power file",
    "prices": "price list",
    "recipes": "recipe",
    "reliability": "reliability preset",
    "scans": "file of scan kernels",
    "uncertainty": "uncertainty model",
    "records": "record",
}
_MAX_ALIAS_VALUES: Final = (
    100_000  # values that the aliases of a YAML file may add; hand-written files have some dozens
)
_MAX_YAML_VALUES: Final = 500_000  # keys and values of a YAML file, which is read at 200,000 a second
_MAX_CACHED_TEXT: Final = 50_000  # characters of a file whose content is cached; packaged files have up to 12,000
_CONSTRUCTION_ERRORS: Final = (ValueError, TypeError, LookupError, AttributeError)
"""What PyYAML raises for values that are not of their tag, such as `!!str [1]`."""
_SUFFIXES: Final = (".yaml", ".yml", ".json")


def category_folder(category: str) -> Path:
    """The folder of a category of data files: a key of `_CATEGORY_NOUNS`."""
    if category == "records":  # written and packaged by calibrate
        return _PACKAGE.parent / "calibrate" / category
    packaged = _PACKAGE / "_topologies" / category
    return packaged if packaged.is_dir() else _PACKAGE.parent / "topologies" / category


def list_names(category: str) -> list[str]:
    """Names of the packaged data files of a category, sorted; those in subfolders have the folder as a prefix."""
    folder = category_folder(category)
    paths = (path for path in folder.rglob("*") if path.suffix in _SUFFIXES)
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in paths)


def is_path(name: str) -> bool:
    """Whether a name is the path of a data file: it ends in .yaml, .yml or .json."""
    return name.endswith(_SUFFIXES)


def find_file(category: str, name: str) -> Path:
    """The path of a packaged data file, or of a given path that ends in .yaml, .yml or .json."""
    if is_path(name):
        return Path(name)
    path = _packaged_file(category_folder(category), name)
    if path is None:
        from clustersim.common.synonyms import find_name_synonym

        available = list_names(category)
        hint = find_name_synonym(category, name, available) or suggest_nearest(
            name, available, listed_by="clustersim presets"
        )
        raise InputError(f"there is no {_CATEGORY_NOUNS[category]} {name!r}; {hint}")
    return path


def _packaged_file(folder: Path, name: str) -> Path | None:
    """The file of a name in a folder; None without one. Names are compared as spelled, on any file system."""
    *folders, stem = name.split("/")
    for subfolder in folders:
        if subfolder not in _listed(folder):
            return None
        folder /= subfolder
    names = _listed(folder)
    return next((folder / f"{stem}{suffix}" for suffix in _SUFFIXES if f"{stem}{suffix}" in names), None)


def _listed(folder: Path) -> Collection[str]:
    """Names of what a folder holds; none where it is no folder."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else ()


def resolve_relative(base: Path, path: str) -> Path:
    """A path relative to the folder `base` if it exists there, else relative to the working directory."""
    candidate = base / path
    return candidate if os.path.exists(candidate) else Path(path)  # noqa: PTH110 - false also for what can be no path


def display_name(path: Path) -> str:
    """How messages refer to a data file: its name if it is packaged, else its path.

    >>> display_name(find_file("clusters", "dgx-h100")), display_name(Path("my/cluster.yaml"))
    ('cluster dgx-h100', 'my/cluster.yaml')
    """
    noun = _CATEGORY_NOUNS.get(path.parent.name)
    return f"{noun} {path.stem}" if noun and path.parent == category_folder(path.parent.name) else str(path)


def portable_name(path: Path) -> str:
    """A name that locates a data file from any folder: its name if it is packaged, else its absolute path.

    >>> portable_name(find_file("clusters", "dgx-h100"))
    'dgx-h100'
    """
    return (
        path.stem
        if path.parent.name in _CATEGORY_NOUNS and path.parent == category_folder(path.parent.name)
        else str(path.resolve())
    )


def read_text(path: Path) -> str:
    """Read a text file; raise InputError that names it."""
    return "\n".join(input_files.read_text(path, display_name(path)).replace("\r\n", "\n").split("\r"))


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file that holds one mapping; raise InputError that names the file."""
    return parse_mapping(path, read_text(path))


def parse_mapping(path: Path, text: str) -> dict[str, Any]:
    """Parse the text of a YAML or JSON file that holds one mapping; raise InputError that names the file."""
    file = display_name(path)
    if not text.strip():
        raise InputError(f"{file}: is empty")
    try:
        content = _parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        kind = (
            "a list" if isinstance(content, list) else "a text" if isinstance(content, str) else format_value(content)
        )
        raise InputError(f"{file}: holds {kind}, not a mapping of keys to values")
    return content


def parse_yaml(text: str) -> Any:
    """Parse YAML text; raise InputError if it is invalid or has duplicate keys."""
    try:
        return _copy_containers(_load_short_yaml(text)) if len(text) <= _MAX_CACHED_TEXT else _load_yaml(text)
    except (yaml.YAMLError, *_CONSTRUCTION_ERRORS) as error:
        reason = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")
        raise InputError(_tab_message(text, error) or f"is not valid YAML: {reason}") from error


def _copy_containers(value: Any) -> Any:
    """A copy that shares no mapping and no list with the original."""
    if isinstance(value, dict):
        return {key: _copy_containers(item) for key, item in value.items()}
    return [_copy_containers(item) for item in value] if isinstance(value, list) else value


@lru_cache(maxsize=64)
def _load_short_yaml(text: str) -> Any:
    """Cached by the text, since a simulation reads the same few files many times; callers get copies."""
    return _load_yaml(text)


def _load_yaml(text: str) -> Any:
    _reject_runaway_nodes(text)
    return yaml.load(text, Loader=_StrictLoader)


def _reject_runaway_nodes(text: str) -> None:
    """Raise InputError for nestings, numbers and counts beyond any file, before nodes are made of them.

    Events are read one by one, without recursion; making nodes recurses in C, where a deep nesting ends the process.
    """
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_BASE_LOADER)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent) and _is_long_number(event):
            raise InputError(
                f"{_line_of(event)}: a number has {len(event.value):,} digits; {input_files.MAX_DIGITS} are the most"
            )
        if depth > input_files.MAX_DEPTH:
            raise InputError(
                f"{_line_of(event)}: lists or mappings are more than {input_files.MAX_DEPTH} deep inside each other"
            )
        if count > _MAX_YAML_VALUES:
            raise InputError(f"has more than {_MAX_YAML_VALUES:,} keys and values; write a file of this size as JSON")


def _line_of(event: yaml.Event) -> str:
    return "line ?" if event.start_mark is None else f"line {event.start_mark.line + 1}"


def _is_long_number(event: yaml.ScalarEvent) -> bool:
    """Whether a scalar becomes a number, plain or by its tag, of more digits than any file needs."""
    return (not event.style or event.tag is not None) and input_files.is_long_number(event.value)


def _tab_message(text: str, error: Exception) -> str:
    """What to say where the line of a YAML error, or the one above it, is indented with a tab; empty otherwise."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    lines = text.splitlines()
    for number in () if mark is None else (mark.line, mark.line - 1):
        if 0 <= number < len(lines) and "\t" in lines[number][: -len(lines[number].lstrip())]:
            return f"line {number + 1} is indented with a tab; YAML allows spaces only, so replace tabs by spaces"
    return ""


def _parse_json(text: str) -> Any:
    return input_files.parse_json(text, pairs=_dict_of_unique_keys)


def _dict_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InputError(f"{duplicate} is given twice in one mapping; keep one")
    return mapping


_BASE_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the fast one, where PyYAML has libyaml


class _StrictLoader(_BASE_LOADER):  # type: ignore[misc, valid-type]
    """The safe loader, which also rejects duplicate keys in a mapping and exponential or recursive aliases.

    Its values are those of JSON: a date is a text, and tags for bytes, sets and pairs are unknown.
    """

    def get_single_node(self) -> yaml.Node | None:
        """The document's root node, checked before `<<` merges mappings, whose keys may repeat legally."""
        root: yaml.Node | None = super().get_single_node()
        if root is not None:
            _reject_runaway_aliases(root)
        seen: set[yaml.Node] = set()
        pending = [] if root is None else [("", root)]
        while pending:
            key_path, node = pending.pop()
            if node not in seen:  # aliases repeat the same node
                seen.add(node)
                _reject_duplicate_keys(key_path, node)
                pending.extend(_children_with_paths(key_path, node))
        return root


def _construct_number(loader: Any, node: yaml.ScalarNode) -> Any:
    """What a scalar's tag says it is; raise InputError where it is not, as in `!!int ''`."""
    try:
        return _BASE_LOADER.yaml_constructors[node.tag](loader, node)
    except (ValueError, LookupError, OverflowError) as error:
        raise InputError(
            f"line {node.start_mark.line + 1}: {format_value(node.value)} is no {node.tag.rpartition(':')[2]}"
        ) from error


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _BASE_LOADER.yaml_implicit_resolvers.items()
}
_StrictLoader.yaml_constructors = {
    tag: constructor
    for tag, constructor in _BASE_LOADER.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] not in ("timestamp", "binary", "set", "omap", "pairs")
} | {f"tag:yaml.org,2002:{kind}": _construct_number for kind in ("int", "float", "bool")}


def _reject_runaway_aliases(root: yaml.Node) -> None:
    """Raise InputError for aliases that contain themselves, or that expand to more values than any file needs."""
    sizes: dict[yaml.Node, int] = {}  # values in each node, aliases written out; 0 while the node is still open
    depths: dict[yaml.Node, int] = {}
    pending = [root]
    while pending:
        node = pending[-1]
        children = list(_child_nodes(node))
        if node not in sizes:
            sizes[node] = 0
            if any(sizes.get(child) == 0 for child in children):
                raise InputError(f"line {node.start_mark.line + 1}: an alias stands for something that contains it")
            pending.extend(child for child in children if child not in sizes)
        else:
            sizes[node] = 1 + sum(sizes[child] for child in children)
            depths[node] = 1 + max((depths[child] for child in children), default=-1)
            pending.pop()
    if sizes[root] - len(sizes) > _MAX_ALIAS_VALUES:
        raise InputError(f"its aliases stand for more than {_MAX_ALIAS_VALUES:,} values; write fewer of them")
    if depths[root] > input_files.MAX_DEPTH:
        raise InputError(f"its aliases nest lists or mappings more than {input_files.MAX_DEPTH} deep")


def _child_nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        yield from (child for pair in node.value for child in pair)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _reject_duplicate_keys(key_path: str, node: yaml.Node) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        name, line = (key.tag, str(key.value)), key.start_mark.line + 1
        if name in lines:
            where = f"line {line}" if lines[name] == line else f"lines {lines[name]} and {line}"
            raise InputError(f"{_join_key_path(key_path, key)} is given twice, in {where}; keep one")
        lines[name] = line


def _children_with_paths(key_path: str, node: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((_join_key_path(key_path, key), value) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from ((f"{key_path}[{index}]", value) for index, value in enumerate(node.value))


def _join_key_path(key_path: str, key: yaml.Node) -> str:
    return f"{key_path}.{key.value}" if key_path else str(key.value)
