"""Documents for people stay short, and the files and modules that they name exist."""

import re
from pathlib import Path

import pytest
import yaml

from clustersim.common.renamed_keys import RENAMED_KEYS, SCENARIO

ROOT = Path(__file__).parents[1]
MAX_WORDS = 3_000
DOCUMENTS = ("DESIGN.md", "docs/models.md", "docs/validation.md", "tests/benchmarks/README.md", "CONTRIBUTING.md")
FOLDERS = (ROOT, ROOT / "clustersim", ROOT / "clustersim" / "engine", ROOT / "topologies", ROOT / "tests")
"""Folders that paths of the documents are relative to."""
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")


@pytest.mark.parametrize("document", ["DESIGN.md", "CHANGELOG.md"])
def test_reference_documents_are_short(document: str) -> None:
    assert len((ROOT / document).read_text(encoding="utf-8").split()) <= MAX_WORDS


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_paths_exist(document: str) -> None:
    """Files, packages (`cost/roofline`), names in them (`parallel/mesh.MESHES`), several at once (`hardware/{a,b}`)."""
    text = (ROOT / document).read_text(encoding="utf-8")
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    missing = {path for path in PATH.findall(_expand_braces(plain)) if not _exists(path)}
    assert not missing


def _expand_braces(text: str) -> str:
    """`a/{b,c}` as `a/b` and `a/c`."""
    return re.sub(
        r"`([\w./-]*)\{([\w,]+)\}([\w./-]*)`",
        lambda match: " ".join(f"`{match[1]}{item}{match[3]}`" for item in match[2].split(",")),
        text,
    )


def _exists(path: str) -> bool:
    module, _, name = path.rpartition(".")
    return any(
        (folder / path).exists()
        or (folder / f"{path}.py").is_file()
        or (bool(module) and (folder / f"{module}.py").is_file() and name in (folder / f"{module}.py").read_text())
        for folder in FOLDERS
    )


def test_renamed_keys_are_those_that_are_refused() -> None:
    """The table has full old and new paths, the code the old key's path with its other keys as now spelled."""
    text = (ROOT / "docs" / "renamed_keys.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^## Keys of scenario files\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^\| `(\S+)` \| `(\S+)` \|$", table, re.MULTILINE)
    refused = [(old_path.replace("*", "NAME"), new_key) for old_path, new_key in RENAMED_KEYS[SCENARIO].items()]
    assert [(old.rpartition(".")[2], new) for old, new in listed] == [
        (old.rpartition(".")[2], ".".join([*old.split(".")[:-1], new])) for old, new in refused
    ]


def test_launch_times_are_those_of_the_frameworks() -> None:
    hosts = {
        name: yaml.safe_load((ROOT / "topologies" / "frameworks" / f"{name}.yaml").read_text())["host"]
        for name in ("megatron", "nemo", "pytorch", "megatron-2021", "megatron-2022")
    }
    ((dense, dense_backward),) = {
        (hosts[name]["launch"], hosts[name]["backward_launch"]) for name in ("megatron", "nemo", "pytorch")
    }
    (moe,) = {hosts[name]["moe_launch"] for name in ("megatron", "nemo")}
    ((forward, backward),) = {
        (hosts[name]["launch"], hosts[name]["backward_launch"]) for name in ("megatron-2021", "megatron-2022")
    }
    text = " ".join((ROOT / "docs" / "models.md").read_text(encoding="utf-8").replace("µs", "us").split())
    assert f"Dense models have {dense} per forward and {dense_backward} per backward kernel" in text
    assert f"{hosts['pytorch']['compiled_launch']} in compiled layers" in text
    assert f"MoE models {moe}" in text
    assert f"Megatron until 2023 {forward.removesuffix(' us')} and {backward}" in text
