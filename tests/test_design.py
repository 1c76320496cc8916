"""DESIGN.md matches the code: packages and their diagram, the files to read first, strategies, laws, the glossary."""

import re
import tomllib
from pathlib import Path

from tests.benchmarks.engine import CASES

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


def design_section(heading: str) -> str:
    """The text below a heading, up to the next heading of any level."""
    (text,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", DESIGN, re.MULTILINE | re.DOTALL)
    return str(text)


def test_every_law_file_is_listed_once() -> None:
    listed = re.findall(r"^- `(test_\w+\.py)`: ", design_section("Laws"), re.MULTILINE)
    assert listed == sorted(path.name for path in (ROOT / "tests" / "laws").glob("test_*.py"))


def test_execution_strategies_name_existing_modules_laws_and_benchmarks() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", design_section("Execution strategies"), re.MULTILINE)
    strategies = rows[1:]  # below the header
    assert len(strategies) == 6
    for strategy, _, laws, benchmarks in strategies:
        assert all((ROOT / "clustersim" / "engine" / path).is_file() for path in re.findall(r"`(.+?)`", strategy))
        assert all((ROOT / "tests" / "laws" / law).is_file() for law in re.findall(r"`(.+?)`", laws))
        names = re.findall(r"`(.+?)`", benchmarks)
        assert names
        assert all(name in CASES or (ROOT / "tests" / "benchmarks" / f"{name}.py").is_file() for name in names)


def test_every_package_has_one_question() -> None:
    listed = re.findall(r"^- `(\w+)`: .*\?(?: \(.+\))?$", design_section("Packages"), re.MULTILINE)
    assert sorted(listed) == sorted(set().union(*diagram_rows()))


def test_the_glossary_is_alphabetical() -> None:
    terms = re.findall(r"^- \*\*(.+?)\*\*: ", design_section("Glossary"), re.MULTILINE)
    assert len(terms) > 10
    assert terms == sorted(terms)
