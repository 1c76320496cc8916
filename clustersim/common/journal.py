"""How is what is found out kept as it comes, so that nothing is lost when a calculation is killed?

One file to which lines of JSON are added and written to the disk. Its first line tells the calculation from others: by
what was asked for, by what the files have that it reads, and by the version of this package. A line that was cut off is
dropped.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from clustersim.common.errors import InputError, OutputError
from clustersim.common.files import write_text_atomically


class Kept:
    """Lines of a calculation. known: those from before; path: of the file, None: it is kept nowhere."""

    def __init__(self, known: list[dict[str, Any]], lines: IO[str] | None = None, path: Path | None = None) -> None:
        self.known, self.path = known, path
        self._lines = lines

    @classmethod
    @contextmanager
    def opened(cls, path: Path | None, what: str, told: Mapping[str, Any], files: Iterable[Path]) -> Iterator["Kept"]:
        """Begin, or go on with what a file has; raise InputError where that is another calculation.

        what: the key of the first line, a word for the calculation; told: what tells it from others; files: those that
        it reads.
        """
        if path is None:
            yield cls([])
            return
        try:
            name = _name({**told, "version": version("clustersim"), "files": [*map(_content_of, files)]})
            path.parent.mkdir(parents=True, exist_ok=True)
            known = _read(path, what, name) if path.exists() else []
            whole = "".join(f"{json.dumps(item, separators=(',', ':'))}\n" for item in [{what: name}, *known])
            write_text_atomically(path, whole)  # without a line that was cut off
            lines = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        with lines:
            yield cls(known, lines, path)

    def add(self, content: dict[str, Any]) -> None:
        """Keep a line."""
        if self._lines is not None:
            self._lines.write(json.dumps(content, separators=(",", ":")) + "\n")
            self._lines.flush()
            os.fsync(self._lines.fileno())


def _name(told: Mapping[str, Any]) -> str:
    return sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def _content_of(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _read(path: Path, what: str, name: str) -> list[dict[str, Any]]:
    """The lines behind the first; raise InputError where that names another calculation."""
    lines = path.read_text(encoding="utf-8").splitlines()
    whole = [content for content in map(_content, lines) if content is not None]
    if not whole or whole[0].get(what) != name:
        differs = "what it was asked for, or a file that it reads, differs"
        raise InputError(f"{path}: is of another {what} ({differs}); name another folder")
    return whole[1:]


def _content(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
