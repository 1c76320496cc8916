"""How is a file read that may be anything? Every file that a user names comes through here, before any parser.

A file may be endless (a device), never answer (a pipe that nobody writes to), expand to a thousand times its size
(gzip) or hold numbers and nestings that parsers spend minutes, all memory or the stack on. Each is refused in one
sentence. The bounds are far above what real files need: the largest packaged table has 300 kB, the graph of a cluster
of 100,000 GPUs 30 MB, the trace of a profiled step some 100 MB.
"""

import csv
import io
import json
import os
import re
import select
import stat
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from clustersim.common.errors import InputError

MAX_TEXT_BYTES: Final = 128 * 10**6  # of a file written by hand or by this program
MAX_TRACE_BYTES: Final = 8 * 10**9  # of a profiler's trace, expanded
MAX_DEPTH: Final = 64  # lists and mappings inside each other; hand-written files have some ten
MAX_DIGITS: Final = 100  # of a number
_MAX_EXPANSION: Final = 200  # bytes from one compressed byte; JSON of profilers has up to 30, zeros 1,032
_FREE_EXPANSION_BYTES: Final = 10**7  # not counted against that: short files may be one repeated line
_MAX_QUOTED: Final = 24  # characters of a cell
_MAX_WORD: Final = 8
NUMBER_ALPHABET: Final = "-+0-9.eE_x% "
"""Characters of numbers, as `quote_cell` takes them."""
_PIPE_SECONDS: Final = 5.0  # that a pipe may be silent
_CHUNK_BYTES: Final = 1 << 20
_LONG_NUMBER: Final = re.compile(rf"[-+]?[0-9][0-9a-fA-FxXoObB_:.]{{{MAX_DIGITS},}}(?:[eE][-+]?[0-9]+)?")
_LONG_DIGITS: Final = re.compile(rf"(?<!\w)[0-9]{{{MAX_DIGITS + 1}}}")
_DEEP_KEY: Final = re.compile(rf"""(?<![\w"'-])(?:["'\w-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH},}}+""")
_LONG_JSON_NUMBER: Final = re.compile(rf"(?:^|[:,\[\s])-?[0-9]{{{MAX_DIGITS + 1}}}".encode())


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES, name: str = "") -> bytes:
    """The content of a file or pipe; raise InputError that names it (as `name`, if given)."""
    label = name or str(path)
    try:
        return _read(path, max_bytes, label)
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise InputError(f"{label}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def read_text(path: Path, name: str = "", *, encoding: str = "utf-8", any_digits: bool = False) -> str:
    """The text of a file or pipe, its line ends as they are; raise InputError that names it.

    any_digits: whether numbers may be of any length, as in tables whose rows are judged one by one.
    """
    try:
        text = read_bytes(path, MAX_TEXT_BYTES, name).decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{name or path}: cannot be read (not UTF-8 text)") from error
    if not any_digits and (match := _LONG_DIGITS.search(text)):
        line = text.count("\n", 0, match.start()) + 1
        raise InputError(f"{name or path}: line {line}: a number has more than {MAX_DIGITS} digits")
    return text


def expand_gzip(data: bytes, label: str) -> bytes:
    """The content of gzip data of one or several members; raise InputError where it is invalid or a bomb.

    Counted before it is kept: a bomb takes time, but no memory.
    """
    limit, size = min(MAX_TRACE_BYTES, _FREE_EXPANSION_BYTES + _MAX_EXPANSION * len(data)), 0
    for chunk in _expanded_chunks(data, label):
        size += len(chunk)
        if size > limit:
            raise InputError(
                f"{label}: expands to more than {limit / 1e6:,.0f} MB, {size / len(data):,.0f} times its size, which "
                "no trace does"
            )
    return b"".join(_expanded_chunks(data, label))


def _expanded_chunks(data: bytes, label: str) -> Iterator[bytes]:
    rest = data
    try:
        while rest.strip(b"\0"):  # files may be padded with zeros
            member = zlib.decompressobj(zlib.MAX_WBITS | 16)
            for start in range(0, len(rest), _CHUNK_BYTES):
                piece = rest[start : start + _CHUNK_BYTES]
                while piece and not member.eof:
                    yield member.decompress(piece, _CHUNK_BYTES)
                    piece = member.unconsumed_tail
                if member.eof:
                    rest = member.unused_data + rest[start + _CHUNK_BYTES :]
                    break
            if not member.eof:
                raise InputError(f"{label}: is not valid gzip, or truncated: it ends within a member")
    except zlib.error as error:
        raise InputError(f"{label}: is not valid gzip, or truncated: {error}") from error


def quote_cell(text: str, alphabet: str) -> str:
    """A cell of a file, for an error message, where its characters are of a format or a short word; else its length.

    The file may be any that a scenario names, so its content is not repeated to whoever reads the message.

    >>> quote_cell("1.5x", "0-9.x"), quote_cell("root:x:0:0", "0-9.x")
    ("'1.5x'", 'a text of 10 characters')
    """
    is_shown = re.fullmatch(f"[{alphabet}]{{0,{_MAX_QUOTED}}}|[a-z]{{1,{_MAX_WORD}}}", text) is not None
    return f"'{text}'" if is_shown else f"a text of {len(text):,} characters"


def parse_json(
    text: str | bytes,
    *,
    strict: bool = True,
    max_depth: int | None = MAX_DEPTH,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parse JSON; raise InputError without the name of the file where it is invalid, too deep or has endless numbers.

    strict: whether control characters inside texts are errors; max_depth: None where the caller reads known keys only,
    of content too large to walk; pairs: makes mappings of their pairs.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if _LONG_JSON_NUMBER.search(data):
        raise InputError(f"is not valid JSON: a number has more than {MAX_DIGITS} digits")
    try:
        content = json.loads(text, strict=strict, object_pairs_hook=pairs)
    except RecursionError:
        raise InputError(f"has lists or mappings more than {MAX_DEPTH} deep inside each other") from None
    except UnicodeDecodeError as error:
        raise InputError("cannot be read (not UTF-8 text)") from error
    except ValueError as error:
        raise InputError(f"is not valid JSON, or truncated: {error}") from error
    if max_depth is not None:
        require_depth(content, max_depth)
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raise InputError without the name of the file where it is invalid or too deep."""
    if _DEEP_KEY.search(text):  # its parser takes as much memory as the square of a dotted key
        raise InputError(f"is not TOML of a job: a key has more than {MAX_DEPTH} parts")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not TOML: {error}") from error


def parse_csv(text: str) -> list[tuple[int, list[str]]]:
    """The rows of a CSV file, each with the number of its last line; raise InputError without the name of the file.

    A byte order mark is no part of the first cell.
    """
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        return [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise InputError(f"is not a CSV table ({error})") from error


def parse_table(text: str) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The columns of a CSV file with a header, and its rows by column, each with the number of its last line.

    Cells that a row lacks are empty. Raises InputError without the name of the file.
    """
    (_, columns), *rows = [row for row in parse_csv(text) if row[1]] or [(0, [])]
    for line, cells in rows:
        if len(cells) > len(columns):
            raise InputError(f"line {line} has more cells than the header has columns")
    padded = ((line, cells + [""] * (len(columns) - len(cells))) for line, cells in rows)
    return columns, [(line, dict(zip(columns, cells, strict=True))) for line, cells in padded]


def require_depth(content: Any, max_depth: int) -> None:
    """Raise InputError for content with more lists or mappings inside each other."""
    level = [content]
    for _ in range(max_depth + 1):
        level = [item for value in level for item in _items(value) if isinstance(item, (dict, list))]
        if not level:
            return
    raise InputError(f"has lists or mappings more than {max_depth} deep inside each other")


def is_long_number(text: str) -> bool:
    """Whether a text without quotes is a number of more digits than any file needs."""
    return len(text) > MAX_DIGITS and _LONG_NUMBER.fullmatch(text.strip()) is not None


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _read(path: Path, max_bytes: int, label: str) -> bytes:
    status = path.stat()
    if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        if str(path) == os.devnull:
            return b""
        raise InputError(f"{label}: cannot be read (it is a device, not a file)")
    if stat.S_ISFIFO(status.st_mode):
        return _read_pipe(path, max_bytes, label)
    if status.st_size > max_bytes:
        raise InputError(_too_large(label, max_bytes))
    with path.open("rb") as file:
        return _join_within(iter(partial(file.read, max(status.st_size + 1, _CHUNK_BYTES)), b""), max_bytes, label)


def _read_pipe(path: Path, max_bytes: int, label: str) -> bytes:
    """All that is written to a pipe, as in `clustersim check <(command)`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return _join_within(_pipe_chunks(descriptor, label), max_bytes, label)
    finally:
        os.close(descriptor)


def _pipe_chunks(descriptor: int, label: str) -> Iterator[bytes]:
    while select.select([descriptor], [], [], _PIPE_SECONDS)[0]:
        chunk = os.read(descriptor, _CHUNK_BYTES)
        if not chunk:
            return
        yield chunk
    raise InputError(f"{label}: cannot be read (nothing came through this pipe for {_PIPE_SECONDS:.0f} s)")


def _join_within(chunks: Iterable[bytes], max_bytes: int, label: str) -> bytes:
    """All chunks; raise InputError where they are too much: files of /proc and pipes have no size."""
    kept: list[bytes] = []
    size = 0
    for chunk in chunks:
        kept.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            raise InputError(_too_large(label, max_bytes))
    return b"".join(kept)


def _too_large(label: str, max_bytes: int) -> str:
    return f"{label}: cannot be read (it is larger than {max_bytes / 1e6:,.0f} MB, which no such file is)"
