"""DESIGN.md matches the code: its package diagram, and the files that it lists to read first."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "DESIGN.md").read_text(encoding="utf-8")


def diagram_rows() -> list[set[str]]:
    """Packages of each row of the diagram, from the top."""
    (diagram,) = re.findall(r"```mermaid\n(.*?)```", DESIGN, re.DOTALL)
    rows = re.findall(r"subgraph (r\d+)\[\" \"\]\n +(.+)\n +end", diagram)
    (order,) = re.findall(r"^ +(r0(?: --> r\d+)+)$", diagram, re.MULTILINE)
    assert [name for name, _ in rows] == order.split(" --> ")
    return [set(packages.split(" ~~~ ")) for _, packages in rows]


def contract_rows() -> list[set[str]]:
    """The same from the contract that import-linter checks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {item["id"]: item for item in project["tool"]["importlinter"]["contracts"]}
    return [
        {package.strip(" ()") for package in re.split(r"[|:]", layer)} for layer in contracts["direction"]["layers"]
    ]


def test_the_diagram_matches_the_import_contract() -> None:
    assert diagram_rows() == contract_rows()


def test_the_packages_of_the_diagram_exist() -> None:
    package = ROOT / "clustersim"
    packages = {path.parent.name for path in package.glob("*/__init__.py")} | {
        item.stem for item in package.glob("*.py")
    }
    assert set().union(*diagram_rows()) == packages - {"__init__"}


def test_the_twenty_files_to_read_first_exist_and_start_with_a_question() -> None:
    files = re.findall(r"^(\d+)\. `(\S+)`: .+$", DESIGN, re.MULTILINE)
    assert [int(position) for position, _ in files] == [*range(1, 21)]
    assert len({file for _, file in files}) == 20
    for _, file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert file.endswith(".yaml") or re.match(r'"""[^"]*?\?', text), file
