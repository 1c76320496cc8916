"""Which model does a name of the Hugging Face hub, or a folder, stand for?"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from clustersim.common.data_files import read_mapping
from clustersim.common.errors import InputError
from clustersim.interop.import_result import ImportContext

_GPT2: Final = {"gpt2": "gpt2-small"}


def hub_model(name: str, source: str, context: ImportContext) -> Any:
    """The `model` section of a model's name: a folder with its config.json, or a preset; None: the user sets it."""
    if any(key == "model" or key.startswith("model.") for key in context.overridden):
        return None
    folder = None if context.directory is None or "\0" in name else context.directory / name
    if folder is not None and (folder / "config.json").is_file():
        return {"path": str(folder / "config.json")}
    wanted = name.rstrip("/").rpartition("/")[2].casefold()
    for form, entry in _table().items():
        match = re.fullmatch(form, wanted)
        if match is not None and "model" in entry:
            return {"name": wanted, **entry["model"]}
        if match is not None:
            preset = _filled(entry["preset"], match)
            return _GPT2.get(preset, preset)
    raise InputError(
        f"{source}: the model {name} is not here; give its config.json, such as --set model.path=config.json, or a "
        "preset, such as --set model=llama3-8b"
    )


def _filled(preset: str, match: re.Match[str]) -> str:
    """A preset's name with the groups of a match in the places of their numbers."""
    return re.sub(r"\{(\d)\}", lambda number: match[int(number[1])] or "", preset)


@cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = read_mapping(Path(__file__).with_name("hub_models.yaml"))["names"]
    return table
