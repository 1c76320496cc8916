"""What in this package did others make? The build puts a software bill of materials into the wheel.

It lists plotly.js, which pages draw with and which is in the wheel, and the Python packages that clustersim runs with, in
the versions that it was tested with (`requirements/run.txt`, which has their hashes). It has neither a time nor a random
number, so that equal sources make equal wheels. References: CycloneDX 1.6 (ECMA-424); PEP 770, which says where wheels
have such files.
"""

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLOTLY = "clustersim/report/assets/plotly/plotly-cartesian.min.js"
NAME_OF_FILE = "clustersim.cdx.json"
_PINNED = re.compile(r"^([\w.-]+)==([^\s;]+)(?: ; ([^\\\n]+))?", re.MULTILINE)
_PLOTLY_VERSION = re.compile(r"plotly\.js \(cartesian - minified\) v([\d.]+)")


class BillOfMaterialsHook(BuildHookInterface[Any]):
    """Writes the bill of materials where hatchling takes it from."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's interface
        """Write the file before the wheel is built."""
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / NAME_OF_FILE
        core = self.metadata.core
        bill = bill_of_materials(Path(self.root), core.version, core.dependencies)
        file.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(file))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the file: it is in the wheel."""
        self._folder.cleanup()


def bill_of_materials(root: Path, version: str, dependencies: list[str]) -> dict[str, Any]:
    """The bill of materials of a checkout. dependencies: of the project, as in pyproject.toml."""
    packages = _packages((root / "requirements" / "run.txt").read_text(encoding="utf-8"))
    purls = {package["name"]: package["purl"] for package in packages}
    own, plotly = f"pkg:pypi/clustersim@{version}", _plotly(root / PLOTLY)
    direct = [purls[_canonical_name(re.split(r"[^\w.-]", requirement)[0])] for requirement in dependencies]
    application = {"type": "application", "bom-ref": own, "name": "clustersim", "version": version, "purl": own}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**application, "licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": [plotly, *packages],
        "dependencies": [{"ref": own, "dependsOn": [plotly["purl"], *direct]}],
    }


def _plotly(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    version = _PLOTLY_VERSION.search(content[:400].decode("utf-8"))
    if version is None:
        raise ValueError(f"{file}: does not begin with plotly.js's name and version")
    purl = f"pkg:npm/plotly.js-cartesian-dist-min@{version[1]}"
    return {
        "type": "library", "bom-ref": purl, "name": "plotly.js-cartesian-dist-min", "version": version[1], "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}],
        "licenses": [{"license": {"id": "MIT"}}],
    }  # fmt: skip


def _packages(requirements: str) -> list[dict[str, Any]]:
    """A component for each pinned requirement; those of some platforms only are optional."""
    return [
        {
            "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
            "scope": "optional" if marker else "required",
        }
        for name, version, marker in _PINNED.findall(requirements)
        for purl in [f"pkg:pypi/{_canonical_name(name)}@{version}"]
    ]  # fmt: skip


def _canonical_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
