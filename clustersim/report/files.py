"""How is an answer written so that a file is either whole or not there?

Into a temporary file in the same directory, which then takes the name in one step (POSIX rename is atomic within a
file system). Whatever goes wrong is one sentence. Pipes and devices cannot be half there and are written directly.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from clustersim.errors import OutputError


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open `path` for writing bytes; it appears, whole, when the block ends without an error.

    Raises OutputError when the directory is missing or not writable, the path is a directory or the disk is full.
    """
    target = Path(os.path.realpath(path))
    try:
        _refuse_impossible(Path(path), target)
        special = target.exists() and not target.is_file()
        with target.open("wb") if special else _whole(target) as file:
            yield file
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[IO[bytes]]:
    partial = target.with_name(f".{target.name[:64]}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, wholly or not at all; raise OutputError if it cannot be written."""
    with atomic_file(path) as file:
        file.write(text.encode())


def require_writable(path: str | Path) -> None:
    """Raise OutputError now if `path` could not be written later; nothing is created."""
    target = Path(os.path.realpath(path))
    _refuse_impossible(Path(path), target)
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise OutputError(f"{path}: cannot be written (no permission)")


def _refuse_impossible(path: Path, target: Path) -> None:
    if target.is_dir():
        raise OutputError(f"{path}: is a directory; name a file in it")
    if not target.parent.is_dir():
        raise OutputError(f"{path}: there is no directory {path.parent}; create it first")
