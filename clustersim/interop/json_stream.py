"""How is a JSON file of gigabytes read in bounded memory?

A file whose top level is an object is read chunk by chunk: the elements of one long array are yielded one
after the other, all other keys are kept. Control characters in strings, which profilers leave in names, are
accepted; gzip is recognized by the file's name.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from clustersim.common.errors import InputError

CHUNK_CHARACTERS: Final = 2**20
_MAX_VALUE_CHARACTERS: Final = 2**28  # what is longer is no value: the rest of a broken file is not read for it
_WHITESPACE: Final = " \t\r\n"
_DELIMITERS: Final = tuple(f"{_WHITESPACE},]}}:")
_decode = json.JSONDecoder(strict=False).raw_decode
ReadProgress = Callable[[int], None]
"""Called with the number of bytes that have been read of the (compressed) file."""


def no_progress(_: int) -> None:
    """Report nothing."""


class JsonObjectStream:
    """The top-level object of a JSON file; `elements` yields the array `array_key`, `others` has all other keys.

    others: complete once `elements` is exhausted; has_array: whether the array was there.
    """

    def __init__(self, file: Path, array_key: str, progress: ReadProgress = no_progress) -> None:
        self.file, self.others, self.has_array = file, dict[str, Any](), False
        self._array_key, self._progress = array_key, progress

    def elements(self, opened: IO[bytes] | None = None) -> Iterator[Any]:
        """The elements of the array, in order. opened: the file's content, else it is opened.

        Raises InputError that names the file.
        """
        try:
            with self.file.open("rb") if opened is None else opened as raw:
                is_compressed = opened is None and self.file.suffix == ".gz"
                binary = gzip.GzipFile(fileobj=raw) if is_compressed else raw
                text = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
                yield from self._parse(_TextWindow(text, lambda: self._progress(raw.tell())))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{self.file}: is not valid gzip, or truncated: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{self.file}: cannot be read ({reason})") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.file}: is not valid JSON, or truncated: {error}") from error

    def _parse(self, window: "_TextWindow") -> Iterator[Any]:
        if window.peek() != "{":
            window.value()
            return
        separator = window.take("{")
        while window.peek() != "}":
            key = window.value() if separator in ("{", ",") else window.fail("expected a comma")
            window.take(":")
            if key == self._array_key and window.peek() == "[":
                self.has_array = True
                yield from window.array()
            else:
                self.others[str(key)] = window.value()
            separator = window.take(",") if window.peek() == "," else ""


class _TextWindow:
    """The part of a text that has been read and not yet parsed."""

    def __init__(self, source: io.TextIOBase, on_read: Callable[[], None]) -> None:
        self._source, self._on_read = source, on_read
        self._text, self._position, self._is_complete = "", 0, False

    def peek(self) -> str:
        """The next character that is no space, which is not taken; raises ValueError at the end."""
        while True:
            text, position, end = self._text, self._position, len(self._text)
            while position < end and text[position] in _WHITESPACE:
                position += 1
            self._position = position
            if position < end:
                return text[position]
            if not self._read(CHUNK_CHARACTERS):
                self.fail("unexpected end")

    def take(self, expected: str) -> str:
        """Take this character."""
        if self.peek() != expected:
            self.fail(f"expected {expected!r}")
        self._position += 1
        return expected

    def value(self) -> Any:
        """The next value."""
        self.peek()
        size = CHUNK_CHARACTERS
        while True:
            try:
                value, position = _decode(self._text, self._position)
            except json.JSONDecodeError:
                if len(self._text) > _MAX_VALUE_CHARACTERS or not self._read(size):
                    raise
                size *= 2
                continue
            is_ended = self._text[position : position + 1] in _DELIMITERS
            if not is_ended and isinstance(value, (int, float)) and self._read(size):
                continue  # a number may go on in the next chunk
            self._position = position
            return value

    def array(self) -> Iterator[Any]:
        """The elements of an array, in order."""
        self.take("[")
        if self.peek() == "]":
            self._position += 1
            return
        while True:
            yield self.value()
            if self.peek() == "]":
                self._position += 1
                return
            self.take(",")

    def fail(self, problem: str) -> Any:
        """Raise ValueError."""
        excerpt = self._text[self._position : self._position + 20]
        raise ValueError(f"{problem} at {excerpt!r}" if excerpt else f"{problem} at the end")

    def _read(self, size: int) -> bool:
        """Read more text behind what is left; return whether there was any."""
        chunk = "" if self._is_complete else self._source.read(size)
        self._is_complete = not chunk
        self._text, self._position = self._text[self._position :] + chunk, 0
        self._on_read()
        return bool(chunk)
