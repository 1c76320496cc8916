"""Where are the data files that clustersim ships, and how is a data file read?

In a checkout the shipped ones lie in `topologies/` beside the package; a wheel carries them inside the package. Files
are read strictly: a key that stands twice in one mapping is refused, since only one of its values could count.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from clustersim.common.errors import InputError, nearest, shown

_PACKAGE = Path(__file__).parent
_ONE_OF: Final = {
    "accelerators": "accelerator",
    "clusters": "cluster",
    "dispatchers": "dispatcher",
    "experience": "experience",
    "frameworks": "framework",
    "libraries": "library",
    "power": "power file",
    "prices": "price list",
    "recipes": "recipe",
    "reliability": "reliability preset",
    "records": "record",
}
_MOST_REPEATED: Final = 100_000  # values that the aliases of a YAML file may add; a file by hand has some dozens
_ENDINGS: Final = (".yaml", ".yml", ".json")


def shelf(name: str) -> Path:
    """The folder of one shelf: a name of `_ONE_OF`."""
    if name == "records":  # calibration writes them, and carries them in its own package
        return _PACKAGE.parent / "calibrate" / name
    inside = _PACKAGE / "_topologies" / name
    return inside if inside.is_dir() else _PACKAGE.parent / "topologies" / name


def names(shelf_name: str) -> list[str]:
    """Names of what is shipped on a shelf, sorted; what lies in a folder of it has that before its name."""
    folder = shelf(shelf_name)
    found = (path for path in folder.rglob("*") if path.suffix in _ENDINGS)
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in found)


def is_path(name: str) -> bool:
    """Whether a name is the path of a data file: it ends in .yaml, .yml or .json."""
    return name.endswith(_ENDINGS)


def find(shelf_name: str, name: str) -> Path:
    """The file of a shipped name, or of a path that ends in .yaml, .yml or .json."""
    if is_path(name):
        return Path(name)
    known = names(shelf_name)
    if name not in known:
        raise InputError(f"there is no {_ONE_OF[shelf_name]} {name!r}; {nearest(name, known)}")
    return next(path for path in map((shelf(shelf_name) / name).with_suffix, _ENDINGS) if path.exists())


def beside(base: Path, path: str) -> Path:
    """A path as seen from `base`, or from the working directory if there is nothing."""
    near = base / path
    return near if os.path.exists(near) else Path(path)  # noqa: PTH110 - false also for what can be no path


def described(path: Path) -> str:
    """What messages call a data file: its name if it is shipped, else its path.

    >>> described(find("clusters", "dgx-h100")), described(Path("my/cluster.yaml"))
    ('cluster dgx-h100', 'my/cluster.yaml')
    """
    kind = _ONE_OF.get(path.parent.name)
    return f"{kind} {path.stem}" if kind and path.parent == shelf(path.parent.name) else str(path)


def named(path: Path) -> str:
    """What finds a data file from anywhere: its name if it is shipped, else its whole path.

    >>> named(find("clusters", "dgx-h100"))
    'dgx-h100'
    """
    return path.stem if path.parent.name in _ONE_OF and path.parent == shelf(path.parent.name) else str(path.resolve())


def read_text(path: Path) -> str:
    """Read a text file; raise InputError that names it."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{described(path)}: cannot be read (not UTF-8 text)") from error
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise InputError(f"{described(path)}: cannot be read ({getattr(error, 'strerror', error)})") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file that holds one mapping; raise InputError that names the file."""
    return mapping_of(path, read_text(path))


def mapping_of(path: Path, text: str) -> dict[str, Any]:
    """The mapping that a YAML or JSON file holds as text; raise InputError that names the file."""
    file = described(path)
    if not text.strip():
        raise InputError(f"{file}: is empty")
    try:
        content = _read_json(text) if path.suffix == ".json" else read_yaml(text)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "a text" if isinstance(content, str) else shown(content)
        raise InputError(f"{file}: holds {kind}, not a mapping of keys to values")
    return content


def read_yaml(text: str) -> Any:
    """The value of a YAML text; raise InputError if it is not valid or gives a key twice."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")
        raise InputError(f"is not valid YAML: {reason}") from error


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not valid JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise InputError(f"{twice} is given twice in one mapping; keep one")
    return mapping


class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The fast safe loader, which refuses keys that stand twice in one mapping and aliases that run away."""

    def get_single_node(self) -> yaml.Node | None:
        """The whole text; checked before `<<` merges mappings, whose keys may come again."""
        root: yaml.Node | None = super().get_single_node()
        if root is not None:
            _refuse_runaway(root)
        seen: set[int] = set()
        waiting = [] if root is None else [("", root)]
        while waiting:
            place, node = waiting.pop()
            if id(node) not in seen:  # an alias is the same node again
                seen.add(id(node))
                _refuse_twice(place, node)
                waiting.extend(_inside(place, node))
        return root


def _refuse_runaway(root: yaml.Node) -> None:
    """Refuse aliases that contain themselves, or that stand for more values than any file needs."""
    sizes: dict[int, int] = {}  # values in each node, aliases written out; 0 while the node is still open
    waiting = [root]
    while waiting:
        node = waiting[-1]
        parts = list(_parts(node))
        if id(node) not in sizes:
            sizes[id(node)] = 0
            if any(sizes.get(id(part)) == 0 for part in parts):
                raise InputError(f"line {node.start_mark.line + 1}: an alias stands for something that contains it")
            waiting.extend(part for part in parts if id(part) not in sizes)
        else:
            sizes[id(node)] = 1 + sum(sizes[id(part)] for part in parts)
            waiting.pop()
    if sizes[id(root)] - len(sizes) > _MOST_REPEATED:
        raise InputError(f"its aliases stand for more than {_MOST_REPEATED:,} values; write fewer of them")


def _parts(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        yield from (part for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _refuse_twice(place: str, node: yaml.Node) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        name, line = (key.tag, str(key.value)), key.start_mark.line + 1
        if name in lines:
            where = f"line {line}" if lines[name] == line else f"lines {lines[name]} and {line}"
            raise InputError(f"{_join(place, key)} is given twice, in {where}; keep one")
        lines[name] = line


def _inside(place: str, node: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((_join(place, key), value) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from ((f"{place}[{number}]", value) for number, value in enumerate(node.value))


def _join(place: str, key: yaml.Node) -> str:
    return f"{place}.{key.value}" if place else str(key.value)
