"""What does nccl-tests' text table say?

Columns are named by the table's header, which differs between versions: older ones leave out `root` and `redop` where
they mean nothing and have `error`, a deviation, in place of `#wrong`, a count; newer ones add per-iteration statistics
and a timestamp. A log may hold several runs, one after the other, behind prefixes of mpirun, srun and log collectors.

NCCL writes into the same stream (src/debug.cc: `host:pid:tid [0] NCCL INFO ...`, warnings with their time and file
before it), also in the middle of a row: nccl-tests prints size and type, then runs, then prints times. Such lines are
taken out, and the halves of a row put together. Warnings do not end a run (a network card that is not there, a plugin
that is not found): what does is a failure of the test, or a log without its last line. That is refused.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from calibrate.nccl_tests.run import Place, Run, Sample, version_of
from clustersim.common.errors import InputError, format_value
from clustersim.common.units import Seconds

_PREFIX: Final = re.compile(
    r"^(?: *(?:\[[^\]\s]*\d+,\d+\](?:<std(?:out|err)>)?:"  # mpirun --tag-output, prterun's with its job's name
    r"|\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}(?:<std(?:out|err)>)?:?"  # mpirun --timestamp-output
    r"|\d+:(?=\s)"  # srun --label
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?=\s)"  # of a log collector
    r"))+"
)
_OWN: Final = re.compile(  # what NCCL writes
    r"(?:\[[\d :.T-]+\] )?[A-Za-z][\w.-]*:\d+:\d+ \[-?\d+\] .*?\bNCCL (?:INFO|WARN|TRACE|CALL|VERSION|ABORT)\b.*"
)
_WARNING: Final = re.compile(r"\bNCCL WARN (.*)")
_TEST: Final = re.compile(r"# Collective test starting: (\S+)")
_LIBRARY: Final = re.compile(r"nccl-library=(\d+)")
_VERSION: Final = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_START: Final = re.compile(r"# nThread \d+ nGpus \d+ ")
_ITERATIONS: Final = re.compile(r"(?<!warmup )(?<!agg )iters: (\d+)")
_PLACE: Final = re.compile(r"#\s+Rank +\d+ +(?:Group +(\d+) +)?Pid +\d+ on +(\S+) device +\d+ \[.*?\] (.+)")
_WRONG: Final = re.compile(r"# Out of bounds values\s*:\s*(\d+)")
_END: Final = "# Avg bus bandwidth"
_ERRORS: Final = re.compile(r"Test (?:NCCL |CUDA )?failure|# error:|Invalid number of GPUs")


Line = tuple[int, str]


def read_text(path: Path, text: str) -> tuple[Run, ...]:
    """All runs of a log; raise InputError that names the file and the line."""
    lines = list(_whole_lines(text))
    for number, line in lines:
        if _ERRORS.search(line):
            raise InputError(f"{path}: line {number}: the run had an error: {format_value(line.strip())}")
    runs = tuple(_run(path, part) for part in _parts(path, lines))
    if not runs:
        raise InputError(f"{path}: has no run of nccl-tests: no line starts with '# nThread'")
    return runs


def _whole_lines(text: str) -> Iterator[Line]:
    """Lines without prefixes; what NCCL wrote into one is a line before it."""
    begun = ""
    for number, given in enumerate(text.splitlines(), start=1):
        line = _PREFIX.sub("", given).lstrip()
        own = _OWN.search(line)
        if own is not None:
            begun += line[: own.start()] + " "
            yield number, own[0]
        elif line or not begun.strip():
            yield number, (begun + line).lstrip()
            begun = ""


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
        warnings=tuple(warned[1].strip() for _, line in lines if (warned := _WARNING.search(line))),
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
        type=words[2],
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
