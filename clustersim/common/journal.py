"""An append-only journal of results, so that an interrupted calculation can be resumed.

One file of JSON lines, each flushed to disk when it is added. Its first line is a fingerprint of the
calculation: its inputs, the contents of the files that it reads, and the version of this package. A truncated
last line is dropped.
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
    """Results of a calculation. entries: those of earlier runs; path: of the file, None: nothing is stored."""

    def __init__(self, entries: list[dict[str, Any]], lines: IO[str] | None = None, path: Path | None = None) -> None:
        self.entries, self.path = entries, path
        self._lines = lines

    @classmethod
    @contextmanager
    def open_or_resume(
        cls, path: Path | None, kind: str, inputs: Mapping[str, Any], files: Iterable[Path]
    ) -> Iterator["Journal"]:
        """Start a journal, or resume the one in a file; raise InputError if that belongs to another calculation.

        kind: key of the first line, a noun for the calculation; inputs: what identifies it besides the files that it
        reads.
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
            text = "".join(f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in [{kind: fingerprint}, *entries])
            write_text_atomically(path, text)  # without a truncated line
            lines = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        with lines:
            yield cls(entries, lines, path)

    def append(self, entry: dict[str, Any]) -> None:
        """Append an entry and flush it to disk."""
        if self._lines is not None:
            self._lines.write(json.dumps(entry, separators=(",", ":")) + "\n")
            self._lines.flush()
            os.fsync(self._lines.fileno())


def _fingerprint(inputs: Mapping[str, Any]) -> str:
    return sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _read_entries(path: Path, kind: str, fingerprint: str) -> list[dict[str, Any]]:
    """The entries after the first line; raise InputError if that identifies another calculation."""
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
