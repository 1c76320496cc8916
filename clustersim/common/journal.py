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


class Journal:
    """Lines of a calculation. known: those from before; path: of the file, None: it is kept nowhere."""

    def __init__(self, entries: list[dict[str, Any]], lines: IO[str] | None = None, path: Path | None = None) -> None:
        self.entries, self.path = entries, path
        self._lines = lines

    @classmethod
    @contextmanager
    def open_or_resume(
        cls, path: Path | None, kind: str, inputs: Mapping[str, Any], files: Iterable[Path]
    ) -> Iterator["Journal"]:
        """Begin, or go on with what a file has; raise InputError where that is another calculation.

        what: the key of the first line, a word for the calculation; told: what tells it from others; files: those that
        it reads.
        """
        if path is None:
            yield cls([])
            return
        try:
            fingerprint = _fingerprint(
                {**inputs, "version": version("clustersim"), "files": [*map(_file_digest, files)]}
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            entries = _read_entries(path, kind, fingerprint) if path.exists() else []
            text = "".join(f"{json.dumps(item, separators=(',', ':'))}\n" for item in [{kind: fingerprint}, *entries])
            write_text_atomically(path, text)  # without a line that was cut off
            lines = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        with lines:
            yield cls(entries, lines, path)

    def append(self, entry: dict[str, Any]) -> None:
        """Keep a line."""
        if self._lines is not None:
            self._lines.write(json.dumps(entry, separators=(",", ":")) + "\n")
            self._lines.flush()
            os.fsync(self._lines.fileno())


def _fingerprint(inputs: Mapping[str, Any]) -> str:
    return sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _read_entries(path: Path, kind: str, fingerprint: str) -> list[dict[str, Any]]:
    """The lines behind the first; raise InputError where that names another calculation."""
    lines = path.read_text(encoding="utf-8").splitlines()
    complete = [content for content in map(_parse_line, lines) if content is not None]
    if not complete or complete[0].get(kind) != fingerprint:
        differs = "what it was asked for, or a file that it reads, differs"
        raise InputError(f"{path}: is of another {kind} ({differs}); name another folder")
    return complete[1:]


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
