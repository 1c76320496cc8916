"""The map agrees with the country: its picture of the rooms, and the files that it tells to read first."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "DESIGN.md").read_text(encoding="utf-8")


def drawn() -> list[set[str]]:
    """Rooms of each row of the picture, from the top."""
    (picture,) = re.findall(r"```mermaid\n(.*?)```", DESIGN, re.DOTALL)
    rows = re.findall(r"subgraph (r\d+)\[\" \"\]\n +(.+)\n +end", picture)
    (order,) = re.findall(r"^ +(r0(?: --> r\d+)+)$", picture, re.MULTILINE)
    assert [name for name, _ in rows] == order.split(" --> ")
    return [set(rooms.split(" ~~~ ")) for _, rooms in rows]


def contracted() -> list[set[str]]:
    """The same of the contract that import-linter checks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {item["id"]: item for item in project["tool"]["importlinter"]["contracts"]}
    return [{room.strip(" ()") for room in re.split(r"[|:]", row)} for row in contracts["direction"]["layers"]]


def test_the_picture_has_the_rows_of_the_contract() -> None:
    assert drawn() == contracted()


def test_the_rooms_of_the_picture_are_the_packages_and_modules() -> None:
    package = ROOT / "clustersim"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")} | {item.stem for item in package.glob("*.py")}
    assert set().union(*drawn()) == rooms - {"__init__"}


def test_the_twenty_files_to_read_first_are_there_and_open_with_a_question() -> None:
    files = re.findall(r"^(\d+)\. `(\S+)`: .+$", DESIGN, re.MULTILINE)
    assert [int(number) for number, _ in files] == [*range(1, 21)]
    assert len({file for _, file in files}) == 20
    for _, file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert file.endswith(".yaml") or re.match(r'"""[^"]*?\?', text), file
