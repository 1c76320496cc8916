"""An append-only journal of results, so that an interrupted calculation can be resumed.

One file of JSON lines, each flushed to disk when it is added. Its first line is a fingerprint of the
calculation: its inputs, the contents of the files that it reads, and the version of this package. Each line has a
checksum. One that does not have it any more, as the last of a process that was killed, is left out, which is said:
what it held is calculated again.
"""

import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Final

from clustersim.common.errors import InputError, OutputError
from clustersim.common.files import atomic_file_in
from clustersim.common.input_files import MAX_TRACE_BYTES, parse_json, read_bytes

MAX_JOURNAL_BYTES: Final = MAX_TRACE_BYTES
_CHECKSUM_KEY: Final = ',"crc32":'  # the last key of a line, of the JSON without it
_MAX_LINES_SHOWN: Final = 5
_LOGGER: Final = logging.getLogger(__name__)


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
            with atomic_file_in(path.parent, path.name) as file:  # without a truncated line
                file.writelines(_line_of(entry).encode() for entry in [{kind: fingerprint}, *entries])
            lines = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        with lines:
            yield cls(entries, lines, path)

    def append(self, entry: dict[str, Any]) -> None:
        """Append an entry and flush it to disk."""
        if self._lines is not None:
            self._lines.write(_line_of(entry))
            self._lines.flush()
            os.fsync(self._lines.fileno())


def _fingerprint(inputs: Mapping[str, Any]) -> str:
    return sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return sha256(read_bytes(path)).hexdigest()


def _read_entries(path: Path, kind: str, fingerprint: str) -> list[dict[str, Any]]:
    """The entries after the first line; raise InputError if that identifies another calculation."""
    first, *lines = read_bytes(path, MAX_JOURNAL_BYTES).split(b"\n")
    identity = _parse_line(first)
    if identity is None:
        raise InputError(f"{path}: its first line, which says what {kind} it is of, is damaged; name another folder")
    if identity.get(kind) != fingerprint:
        differs = "what it was asked for, or a file that it reads, differs"
        raise InputError(f"{path}: is of another {kind} ({differs}); name another folder")
    parsed = [(number, _parse_line(line)) for number, line in enumerate(lines, start=2) if line]
    damaged = [number for number, entry in parsed if entry is None]
    if damaged:
        listed = ", ".join(map(str, damaged[:_MAX_LINES_SHOWN])) + ", ..." * (len(damaged) > _MAX_LINES_SHOWN)
        _LOGGER.warning(
            "%s: %d damaged or incomplete lines (%s) are left out; what they held is calculated again",
            path, len(damaged), listed,
        )  # fmt: skip
    return [entry for _, entry in parsed if entry is not None]


def _line_of(entry: dict[str, Any]) -> str:
    text = json.dumps(entry, separators=(",", ":"))
    return f'{text[:-1]}{_CHECKSUM_KEY}"{zlib.crc32(text.encode()):08x}"}}\n'


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None where its checksum differs."""
    body, separator, checksum = line.rpartition(_CHECKSUM_KEY.encode())
    text = body + b"}"
    if not separator or checksum != f'"{zlib.crc32(text):08x}"}}'.encode():
        return None
    content: dict[str, Any] = parse_json(text)
    return content
