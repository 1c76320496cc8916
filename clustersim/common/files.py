"""Atomic file output: a file is either written completely or not at all.

Writes to a temporary file in the same directory, which is then renamed (POSIX rename is atomic within a file
system). Failures are raised as OutputError. Pipes and devices are written directly.
"""

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from clustersim.common.errors import OutputError

_PARTIAL_NAME: Final = re.compile(r"\..{1,32}\.[0-9a-f]{16}\.part")
_LEFTOVER_SECONDS: Final = 86400.0


def read_first_text(candidates: Iterable[Path], max_bytes: int) -> str | None:
    """The text of the first file that exists, is not larger and can be read; None: there is none."""
    for candidate in candidates:
        try:
            if candidate.is_file() and candidate.stat().st_size <= max_bytes:
                return candidate.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
    return None


def first_file(candidates: Iterable[Path]) -> Path | None:
    """The first candidate that is a file; one that can be no path, such as an overlong name, is none."""
    return next(filter(os.path.isfile, candidates), None)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open `path` for writing bytes; it appears, complete, when the block ends without an error.

    Raises OutputError when the directory is missing or not writable, the path is a directory or the disk is full.
    """
    target = _resolve_target(path)
    replacement = (
        atomic_files([target]) if target.is_file() or not target.exists() else contextlib.nullcontext([target])
    )
    with as_output_error(path), replacement as (partial,), partial.open("wb") as file:
        yield file


@contextlib.contextmanager
def atomic_file_in(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file of a folder that holds several, as `atomic_file`; a link of that name is replaced, not followed.

    The user has named the folder only, in which others may have planted it.
    """
    with as_output_error(folder / name), atomic_files([folder / name]) as (partial,), partial.open("wb") as file:
        yield file


@contextlib.contextmanager
def atomic_files(targets: Sequence[Path]) -> Iterator[list[Path]]:
    """Temporary files for some files, empty and new, each with the mode of the file that it is to replace.

    All are renamed to their targets when the block ends without an error, else removed. Their names are random, so
    that processes, threads and containers that write one target at a time each write their own: the last wins, whole.
    They are created exclusively, so that no file and no link that somebody planted is written.
    """
    partial: dict[Path, Path] = {}  # by target, so that duplicates are written once
    try:
        for target in targets:
            if target not in partial:  # known before it is there, so that a signal in between leaves nothing
                partial[target] = target.with_name(f".{target.name[:32]}.{secrets.token_hex(8)}.part")
                _create_like(target, partial[target])
        yield [partial[target] for target in targets]
        for target, file in partial.items():
            file.replace(target)
    finally:
        for file in partial.values():
            file.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """Whether a path is named as temporary files are: another process is writing it, or was killed while it did."""
    return _PARTIAL_NAME.fullmatch(path.name) is not None


def is_old_leftover(path: Path) -> bool:
    """Whether a leftover is so old that no process writes it any more."""
    return is_leftover(path) and time.time() - path.lstat().st_mtime > _LEFTOVER_SECONDS


def _create_like(target: Path, partial: Path) -> None:
    """Create an empty file with the mode of the target, if that is a file."""
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        with contextlib.suppress(FileNotFoundError):
            mode = target.lstat().st_mode
            if stat.S_ISREG(mode):
                partial.chmod(stat.S_IMODE(mode))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def as_output_error(path: str | Path, caught: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Convert errors in the block into an OutputError about `path`. caught: the exception types to convert."""
    try:
        yield
    except caught as error:
        raise OutputError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from error


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, completely or not at all; raise OutputError if it cannot be written."""
    with atomic_file(path) as file:
        file.write(text.encode(errors="replace"))  # names may contain lone surrogates


def require_writable(path: str | Path) -> None:
    """Raise OutputError if `path` is not writable; creates nothing."""
    target = _resolve_target(path)
    checked = [target] if target.exists() else []
    checked += [target.parent] if target.is_file() or not target.exists() else []
    if not all(os.access(checked_path, os.W_OK) for checked_path in checked):
        raise OutputError(f"{path}: cannot be written (no permission)")


def _resolve_target(path: str | Path) -> Path:
    """The file that a symlink points to; pipes and devices under their own name, as those in /proc cannot be opened."""
    named = Path(path)
    with as_output_error(path, (OSError, ValueError)):  # a name that is too long, a NUL
        if named.is_dir():
            raise OutputError(f"{path}: is a directory; name a file in it")
        special = named.exists() and not named.is_file()
        target = named if special else Path(os.path.realpath(named))
        if not target.parent.is_dir():
            missing = target.parent if named.is_symlink() else named.parent
            raise OutputError(f"{path}: there is no directory {missing}; create it first")
    return target
