"""A journal keeps what it can check: damaged lines are left out and named, and what they held is calculated again."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.common.journal import Journal

ENTRIES: list[dict[str, Any]] = [{"run": {"number": n, "wall": 1.0 / (n + 1), "name": "é\n"}} for n in range(20)]


def write(path: Path) -> list[bytes]:
    with Journal.open_or_resume(path, "calculation", {"seed": 1}, []) as journal:
        for entry in ENTRIES:
            journal.append(entry)
    return path.read_bytes().splitlines(keepends=True)


def read(path: Path) -> list[dict[str, Any]]:
    with Journal.open_or_resume(path, "calculation", {"seed": 1}, []) as journal:
        return journal.entries


def test_entries_return_and_lines_are_json(tmp_path: Path) -> None:
    lines = write(tmp_path / "runs")
    assert read(tmp_path / "runs") == ENTRIES
    assert [json.loads(line)["run"] for line in lines[1:]] == [entry["run"] for entry in ENTRIES]


@pytest.mark.parametrize("lost", [1, 5, 40])
def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path, lost: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "runs"
    content = b"".join(write(path))
    path.write_bytes(content[:-lost] if lost > 1 else content[:-2])
    with caplog.at_level(logging.WARNING):
        assert read(path) == ENTRIES[:-1]
    assert "1 damaged or incomplete lines (21) are left out" in caplog.text
    caplog.clear()
    assert read(path) == ENTRIES[:-1]  # it was repaired
    assert not caplog.text


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_damaged_no_entry_is_changed(tmp_path: Path, seed: int) -> None:
    """Bytes changed, dropped or inserted anywhere behind the first line."""
    path, source = tmp_path / "runs", random.Random(seed)
    first, *rest = write(path)
    damaged = bytearray(b"".join(rest))
    for _ in range(source.randint(1, 5)):
        place = source.randrange(len(damaged))
        match source.randrange(3):
            case 0:
                damaged[place] = source.randrange(256)
            case 1:
                del damaged[place : place + source.randint(1, 100)]
            case 2:
                damaged[place:place] = source.randbytes(source.randint(1, 30))
    path.write_bytes(first + damaged)
    entries = read(path)
    assert all(entry in ENTRIES for entry in entries)


def test_another_calculation_and_a_damaged_first_line_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    first, *rest = write(path)
    with (
        pytest.raises(InputError, match="is of another calculation"),
        Journal.open_or_resume(path, "calculation", {"seed": 2}, []),
    ):
        pass
    for damaged in (b"\x00" * 40, b"{}\n", first[:-9] + b"\n", b"[" * 100_000):
        path.write_bytes(damaged + b"".join(rest))
        with pytest.raises(InputError, match="first line, which says what calculation it is of, is damaged"):
            read(path)
