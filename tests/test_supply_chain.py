"""What is installed is what was tested, by its hash, and the wheel says of what it consists."""

import hashlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[1]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES: Final = {path.name: path.read_text() for path in sorted((ROOT / "requirements").glob("*.txt"))}
OF_THE_MACHINE: Final = {"torch"}  # its builds differ, as do NVIDIA's libraries with it


def canonical_name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def pinned_versions(text: str) -> dict[str, str]:
    return {canonical_name(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)}


def extra(name: str) -> set[str]:
    return set(map(canonical_name, PROJECT["project"]["optional-dependencies"][name]))


NEEDED: Final = {
    "build.txt": {*map(canonical_name, PROJECT["build-system"]["requires"]), "editables"},
    "run.txt": set(map(canonical_name, PROJECT["project"]["dependencies"])),
    "test.txt": {
        *map(canonical_name, PROJECT["project"]["dependencies"]),
        *extra("test"), *extra("trace"), *extra("calibrate"),
    } - OF_THE_MACHINE,
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_requirements_pin_what_was_tested_with_hashes(name: str) -> None:
    pins, tested = pinned_versions(FILES[name]), pinned_versions((ROOT / "constraints.txt").read_text())
    assert pins.keys() >= NEEDED[name]
    assert pins == {package: tested[package] for package in pins}
    entries = re.findall(
        r"^[\w.-]+==[^\n]*\\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", FILES[name], re.MULTILINE
    )
    assert len(entries) == len(pins)
    assert "--only-binary :all:" in FILES[name]  # building others would need packages without hashes


def test_all_requirements_are_known() -> None:
    assert FILES.keys() == NEEDED.keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def bill(wheel: zipfile.ZipFile) -> dict[str, Any]:
    """The wheel's bill of materials."""
    (name,) = (name for name in wheel.namelist() if ".dist-info/sboms/" in name)
    content: dict[str, Any] = json.loads(wheel.read(name))
    return content


def test_the_wheel_lists_every_package_that_it_runs_with(bill: dict[str, Any]) -> None:
    components = {component["purl"]: component for component in bill["components"]}
    packages = {f"pkg:pypi/{name}@{version}" for name, version in pinned_versions(FILES["run.txt"]).items()}
    assert {purl for purl in components if purl.startswith("pkg:pypi/")} == packages
    assert all(component["bom-ref"] == purl for purl, component in components.items())
    (own,) = bill["dependencies"]
    assert set(own["dependsOn"]) <= components.keys()
    direct = {re.split("[/@]", purl)[-2] for purl in own["dependsOn"] if purl.startswith("pkg:pypi/")}
    assert direct == NEEDED["run.txt"]


def test_the_wheel_lists_the_script_that_it_ships_with_its_hash(wheel: zipfile.ZipFile, bill: dict[str, Any]) -> None:
    (script,) = (component for component in bill["components"] if component["purl"].startswith("pkg:npm/"))
    (shipped,) = (name for name in wheel.namelist() if "plotly" in name and name.endswith(".js"))
    assert [entry["content"] for entry in script["hashes"]] == [hashlib.sha256(wheel.read(shipped)).hexdigest()]
    notice = (ROOT / "clustersim/report/assets/plotly/NOTICE").read_text()
    assert f"version {script['version']}\n" in notice
    assert script["hashes"][0]["content"] in notice


def test_the_bill_is_cyclonedx_and_reproducible(bill: dict[str, Any]) -> None:
    """Fields that CycloneDX 1.6 requires; no time and no serial number, which would differ between equal wheels."""
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert bill["metadata"].keys() == {"component"}
    assert bill["metadata"]["component"]["version"] == PROJECT["project"]["version"]
    assert "serialNumber" not in bill
    for component in [bill["metadata"]["component"], *bill["components"]]:
        assert {"type", "name", "version", "purl", "bom-ref"} <= component.keys()
