"""What does nccl-tests' text table say?

Columns are named by the table's header, which differs between versions: older ones leave out `root` and `redop` where
they mean nothing and have `error`, a deviation, in place of `#wrong`, a count; newer ones add per-iteration statistics
and a timestamp. A log may hold several runs, one after the other, and lines of NCCL's own or of mpirun's and srun's
prefixes between them. A log with an error in it, or without its last line, is refused: what it holds cannot be trusted.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from calibrate.nccl_tests.run import Place, Run, Sample, version_of
from clustersim.errors import InputError, shown
from clustersim.units import Seconds

_PREFIX: Final = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:|\d+:(?=\s))")  # mpirun --tag-output, srun --label
_TEST: Final = re.compile(r"# Collective test starting: (\S+)")
_LIBRARY: Final = re.compile(r"nccl-library=(\d+)")
_VERSION: Final = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_START: Final = re.compile(r"# nThread \d+ nGpus \d+ ")
_ITERATIONS: Final = re.compile(r"(?<!warmup )(?<!agg )iters: (\d+)")
_PLACE: Final = re.compile(r"#\s+Rank +\d+ +(?:Group +(\d+) +)?Pid +\d+ on +(\S+) device +\d+ \[.*?\] (.+)")
_WRONG: Final = re.compile(r"# Out of bounds values\s*:\s*(\d+)")
_END: Final = "# Avg bus bandwidth"
_ERRORS: Final = re.compile(r"NCCL WARN|Test (?:NCCL |CUDA )?failure|# error:|Invalid number of GPUs")


Line = tuple[int, str]


def read_text(path: Path, text: str) -> tuple[Run, ...]:
    """All runs of a log; raise InputError that names the file and the line."""
    lines = [(number, _PREFIX.sub("", line)) for number, line in enumerate(text.splitlines(), start=1)]
    for number, line in lines:
        if _ERRORS.search(line):
            raise InputError(f"{path}: line {number}: the run had an error: {shown(line.strip())}")
    runs = tuple(_run(path, part) for part in _parts(path, lines))
    if not runs:
        raise InputError(f"{path}: has no run of nccl-tests: no line starts with '# nThread'")
    return runs


def _parts(path: Path, lines: Sequence[Line]) -> Iterator[list[Line]]:
    """The lines of each run, from the end of the one before to its own end."""
    part: list[Line] = []
    started = None
    for number, line in lines:
        if _START.match(line):
            _require_ended(path, started, number)
            started = number
        part.append((number, line))
        if started is not None and line.startswith(_END):
            yield part
            part, started = [], None
    _require_ended(path, started, len(lines))


def _require_ended(path: Path, started: int | None, number: int) -> None:
    if started is not None:
        raise InputError(
            f"{path}: line {number}: the run that starts in line {started} has no '{_END}' line; the log is truncated"
        )


def _run(path: Path, lines: Sequence[Line]) -> Run:
    started = next(number for number, line in lines if _START.match(line))
    library, version = _first(_LIBRARY, lines), _first(_VERSION, lines)
    found = (_PLACE.match(line) for _, line in lines)
    run = Run(
        file=path.name,
        where=f"{path}: line {started}",
        test=_first(_TEST, lines) or "",
        places=tuple(Place(int(place[1] or 0), place[2], place[3].strip()) for place in found if place),
        version=version_of(int(library)) if library else version or "",
        iterations=int(_first(_ITERATIONS, lines) or 1),
        samples=tuple(_samples(path, lines)),
        wrong=int(_first(_WRONG, lines) or 0),
    )
    if not run.samples:
        raise InputError(f"{run.where}: the run has no table")
    return run


def _first(pattern: re.Pattern[str], lines: Sequence[Line]) -> str | None:
    """What the pattern's group holds in the first line that has it."""
    return next((found[1] for _, line in lines if (found := pattern.search(line))), None)


def _samples(path: Path, lines: Sequence[Line]) -> Iterator[Sample]:
    columns: list[str] = []
    for number, line in lines:
        where, words = f"{path}: line {number}", line.split()
        if words[1:4] == ["size", "count", "type"]:
            columns = _columns(where, words[1:])
        elif words and words[0].isdigit() and columns:
            yield _sample(where, columns, words)


def _columns(where: str, words: list[str]) -> list[str]:
    if "cputime" in words:
        raise InputError(f"{where}: cputime is what launching takes, not the collective; run without -C")
    if words.count("time") != 2:
        raise InputError(f"{where}: {words.count('time')} columns are called time, not 2 (out-of-place, in-place)")
    return words


def _sample(where: str, columns: Sequence[str], words: Sequence[str]) -> Sample:
    expected = len(columns) + columns.count("timestamp")  # date and time of day
    if len(words) != expected:
        raise InputError(f"{where}: {len(words)} values under {expected} columns; the line is damaged or truncated")
    times, wrong = _places(columns, "time"), _places(columns, "#wrong")
    seconds = [_number(where, words[place]) for place in times]
    counts = [_number(where, words[place]) for place in wrong] or [None, None]
    return Sample(
        where=where,
        size=_whole(where, words[0]),
        count=_whole(where, words[1]),
        out_of_place=_seconds(seconds[0]),
        in_place=_seconds(seconds[1]),
        wrong=(counts[0], counts[1]),
    )


def _places(columns: Sequence[str], name: str) -> list[int]:
    return [place for place, column in enumerate(columns) if column == name]


def _seconds(microseconds: float | None) -> Seconds | None:
    return None if microseconds is None else microseconds * 1e-6


def _number(where: str, word: str) -> float | None:
    if word == "N/A":
        return None
    try:
        return float(word)
    except ValueError:
        raise InputError(f"{where}: {word!r} is not a number") from None


def _whole(where: str, word: str) -> int:
    if not word.isdigit():
        raise InputError(f"{where}: {word!r} is not a number of bytes or elements")
    return int(word)
