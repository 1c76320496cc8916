"""Where are the data files that clustersim ships, and how is one read?

In a checkout they lie in `topologies/` beside the package; a wheel carries them inside the package.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from clustersim.errors import InputError, nearest

_PACKAGE = Path(__file__).parent


def shelf(name: str) -> Path:
    """The folder of one shelf (`accelerators`, `clusters`, `libraries`)."""
    inside = _PACKAGE / "_topologies" / name
    return inside if inside.is_dir() else _PACKAGE.parent / "topologies" / name


def names(shelf_name: str) -> list[str]:
    """Names of what is shipped on a shelf, sorted."""
    return sorted(path.stem for path in shelf(shelf_name).glob("*.yaml"))


def find(shelf_name: str, name: str) -> Path:
    """The file of a shipped name, or of a path that ends in .yaml, .yml or .json."""
    if name.endswith((".yaml", ".yml", ".json")):
        return Path(name)
    path = shelf(shelf_name) / f"{name}.yaml"
    if not path.is_file():
        raise InputError(f"there is no {shelf_name.removesuffix('s')} {name!r}; {nearest(name, names(shelf_name))}")
    return path


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file that holds one mapping; raise InputError that names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: cannot be read ({reason})") from error
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        content = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=loader)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        kind, reason = "JSON" if path.suffix == ".json" else "YAML", " ".join(str(error).split())
        raise InputError(f"{path}: is not valid {kind}: {reason}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, not a mapping of keys to values")
    return content
