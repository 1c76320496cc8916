"""Which model does a name of the Hugging Face hub, or a folder, stand for?"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from clustersim.common.data_files import read_mapping
from clustersim.common.errors import InputError
from clustersim.common.files import first_file
from clustersim.common.synonyms import similar_preset
from clustersim.interop.import_result import ImportContext
from clustersim.model.presets import all_presets

_TABLE: Final = Path(__file__).with_name("hub_models.yaml")
_MAX_NAME: Final = 200


@dataclass(frozen=True, slots=True)
class HubModel:
    """The `model` section that a name stands for. section: None: the user sets it; remark: what it leaves out."""

    section: Any
    remark: str | None = None


def hub_model(name: str, source: str, context: ImportContext) -> HubModel:
    """The model of a name: a folder with its config.json, or a preset; raises InputError that says what to pass."""
    if any(key == "model" or key.startswith("model.") for key in context.overridden):
        return HubModel(None)
    path = _config_next_to(name, context.directory)
    if path is not None:
        return HubModel({"path": str(path)})
    preset = find_preset(name, "names")
    if preset is not None:
        return HubModel(preset)
    text_preset = find_preset(name, "text_models")
    if text_preset is not None:
        return HubModel(text_preset, f"{name}: its text model is simulated, without the encoder of images")
    raise InputError(f"{source}: {_unknown_model(name)}")


def find_preset(name: str, section: str) -> str | None:
    """The preset of a hub's name; None without one. section: of the table, names or text_models."""
    table = _table()
    wanted = _last_part(name).casefold()
    ignored = "|".join(table["ignored_words"].split())
    core = re.sub(rf"([-_](?:{ignored}|\d{{4}}|rope-\d+k))+$", "", wanted)
    for form, preset in table[section].items():
        match = re.fullmatch(form, core) or re.fullmatch(form, wanted)
        if match is not None:
            return _filled(preset, match)
    return None


def _last_part(name: str) -> str:
    """A name without its organisation; of a folder in the hub's cache the repository's."""
    cached = re.search(r"models--[\w.-]+--([\w.-]+)/", name)
    return cached[1] if cached else name[:_MAX_NAME].rstrip("/").rpartition("/")[2]


def _config_next_to(name: str, directory: Path | None) -> Path | None:
    """The config.json of a folder that a file names: relative to its own folder, or by the name's last part there."""
    if directory is None or "\0" in name:
        return None
    last = _last_part(name)
    candidates = (directory / name / "config.json", directory / last / "config.json", directory / f"{last}.json")
    return first_file(candidates) if last else None


def _unknown_model(name: str) -> str:
    last = _last_part(name) or "MODEL"
    similar = similar_preset(name, all_presets())
    preset = similar or "llama3-8b"
    like = f"such as the similar --set model={preset}" if similar else f"such as --set model={preset}"
    return (
        f"the model {name} is no packaged one; save its config.json as {last}/config.json next to this file, or give "
        f"it with --set model.path=config.json, or name a preset with its dimensions, {like} (clustersim presets)"
    )


def _filled(preset: str, match: re.Match[str]) -> str:
    """A preset's name with the groups of a match in the places of their numbers."""
    return re.sub(r"\{(\d)\}", lambda number: match[int(number[1])] or "", preset)


@cache
def _table() -> Mapping[str, Any]:
    return read_mapping(_TABLE)
