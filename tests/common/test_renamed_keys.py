"""Renamed keys of data files are refused with their new names, at any depth and in lists."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.collectives.library import ALGORITHMS
from clustersim.collectives.library_files import load_library
from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import flatten_keys
from clustersim.common.renamed_keys import (
    COLLECTIVE_ALGORITHM,
    RENAMED_KEYS,
    find_renamed_key,
    reject_renamed_algorithm,
    renamed_key_message,
)
from clustersim.hardware.accelerator import load_accelerator
from clustersim.hardware.cluster import Cluster, load_cluster
from clustersim.model.framework_files import load_framework
from clustersim.model.recipe_files import load_recipe


def _load_cluster(name_or_path: str) -> Cluster:
    return load_cluster(name_or_path, 8)


LOADERS = {
    "accelerators": (load_accelerator, "gb200"),
    "frameworks": (load_framework, "megatron"),
    "recipes": (load_recipe, "fp8-rowwise"),
    "libraries": (load_library, "nccl"),
    "clusters": (_load_cluster, "dgx-h100"),
}
FILES = pytest.mark.parametrize("category", LOADERS)


def _packaged(category: str, name: str) -> dict[str, Any]:
    return data_files.read_mapping(data_files.find_file(category, name))


def _keys(content: object) -> set[str]:
    """All keys of a file, at any depth."""
    if isinstance(content, dict):
        return {*map(str, content)} | {key for value in content.values() for key in _keys(value)}
    return {key for value in content for key in _keys(value)} if isinstance(content, list) else set()


def _with_key(path: str, value: object) -> Any:
    """A mapping with the key at a path; `*` stands for a name."""
    for key in reversed(path.replace("*", "name").split(".")):
        value = {key: value}
    return value


@FILES
def test_packaged_files_use_the_new_keys(category: str) -> None:
    folders = (category, *(["dispatchers"] if category == "libraries" else []))
    contents = [_packaged(folder, name) for folder in folders for name in data_files.list_names(folder)]
    for content in contents:
        assert find_renamed_key(category, content) is None
    assert {*RENAMED_KEYS[category].values()} <= set().union(*map(_keys, contents))


@FILES
def test_every_old_key_is_refused_with_its_new_name(category: str) -> None:
    for old_path, new_key in RENAMED_KEYS[category].items():
        dotted = old_path.replace("*", "name")
        assert find_renamed_key(category, _with_key(old_path, 1)) == (dotted, f"is called {new_key} since 0.3")


@FILES
def test_a_users_file_with_an_old_key_is_refused(category: str, tmp_path: Path) -> None:
    load, name = LOADERS[category]
    old_path, new_key = next(iter(RENAMED_KEYS[category].items()))
    section, _, _ = old_path.partition(".")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**_packaged(category, name), section: _with_key(old_path, 1)[section]}))
    with pytest.raises(InputError, match=rf"mine.yaml: {old_path}: is called {new_key} since 0.3$"):
        load(str(path))


def test_an_old_key_in_a_list_is_refused() -> None:
    content = {"variants": [{"algorithm": "ring"}, {"capped": True}]}
    assert find_renamed_key("libraries", content) == ("variants.1.capped", "is called ll_limited since 0.3")


@pytest.mark.parametrize(("old_name", "new_name"), RENAMED_KEYS[COLLECTIVE_ALGORITHM].items())
def test_an_old_algorithm_is_refused_with_its_new_name(old_name: str, new_name: str, tmp_path: Path) -> None:
    assert new_name in ALGORITHMS
    with pytest.raises(InputError, match=f"^{old_name} is called {new_name} since 0.3$"):
        reject_renamed_algorithm(old_name)
    for changed in (
        {"variants": [{"algorithm": old_name}]},
        {"networks": {"any": {"efficiency": 1, "unsupported": [old_name]}}},
    ):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(_packaged("libraries", "nccl") | changed))
        with pytest.raises(InputError, match=f"{old_name} is called {new_name} since 0.3$"):
            load_library(str(path))


def test_other_keys_are_not_renamed() -> None:
    for location in (["efficiency"], ["efficiency", "matmul", "tiles"], ["share"], []):
        assert renamed_key_message("accelerators", location) is None
    assert "efficiency.memory" not in flatten_keys(_packaged("accelerators", "gb200"))


def test_an_old_key_of_an_override_is_refused_with_its_new_name() -> None:
    with pytest.raises(InputError, match=r"node.host_memory.update: is called optimizer_fraction since 0.3$"):
        load_cluster("dgx-h100", 8, {"node.host_memory.update": 0.5})
