"""No file, whatever it holds, makes a command print a traceback, exit with another status than 0, 2, 3, or not end."""

import contextlib
import io
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustersim.cli import main

from .doors import Door, all_doors
from .mutations import mutate_content, mutate_text

TIME_LIMIT = 60  # seconds; 10 where the machine has nothing else to do
SAMPLE, MANY = 4, 250


class Unfinished(BaseException):
    """A command did not end in time."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def expire(*_: object) -> None:
        raise Unfinished

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(TIME_LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def variant(door: Door, seed: int) -> str:
    """A hostile variant of a door's file; half of them change what is parsed, half the text."""
    source = random.Random(f"{door.name} {seed}")
    if door.form != "text" and seed % 2:
        return mutate_content(door.text, source, is_json=door.form == "json")
    return mutate_text(door.text, source)


def run_command(arguments: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, str, str]:
    """Exit status, standard output and standard error of a command in this process."""
    printed, errors = io.StringIO(), io.StringIO()
    with monkeypatch.context() as patch, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["clustersim", *arguments])
        with time_limit(), pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code or 0, printed.getvalue(), errors.getvalue()


def require_orderly(door: Door, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the door's command on a text; fail unless it ends with a sentence or a result."""
    status, printed, errors = run_command(door.write(folder, text), folder, monkeypatch)
    assert status in (0, 2, 3), errors
    assert status != 2 or errors.strip(), printed
    assert "Traceback" not in errors
    assert not (set(errors + printed) & {"\x1b", "\x07", "\x00", "\u202e"})


@pytest.mark.parametrize("name", all_doors())
def test_the_file_itself_is_accepted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = all_doors()[name]
    status, _, errors = run_command(door.write(tmp_path, door.text), tmp_path, monkeypatch)
    assert status in (0, 3), errors  # 3: it does not fit in memory


@pytest.mark.parametrize("name", all_doors())
def test_a_sample_of_hostile_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = all_doors()[name]
    for seed in range(SAMPLE):
        require_orderly(door, variant(door, seed), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("trace", 125),
        ("failures", 33),
        ("validate-reliability", 3),
        ("validate-reliability", 10221),
        ("script", 27),
        ("framework", 10016),
        ("nvidia-smi", 10087),
        ("accelerate", 13),
        ("axolotl", 30002),
        ("llama-factory", 30010),
    ],
)
def test_hostile_files_that_once_went_wrong(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = all_doors()[name]
    require_orderly(door, variant(door, seed), tmp_path, monkeypatch)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", all_doors())
def test_thousands_of_hostile_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = all_doors()[name]
    for seed in range(SAMPLE, MANY):
        require_orderly(door, variant(door, seed), tmp_path, monkeypatch)
