"""What does nccl-tests' text table contain?

Columns are named by the table's header, which differs between versions: older ones leave out `root` and
`redop` where they do not apply and have `error`, a deviation, in place of `#wrong`, a count; newer ones add
per-iteration statistics and a timestamp. A log may hold several runs, one after the other, behind prefixes of
mpirun, srun and log collectors, and behind any other that is before the first line of a run, too.

NCCL writes into the same stream (src/debug.cc: `host:pid:tid [0] NCCL INFO ...`, warnings with their time and
file before it), also in the middle of a table line: nccl-tests prints size and type, then runs, then prints
times. Such messages are taken out, and the two halves of a line joined. Warnings do not end a run (a missing
network card, a plugin that is not found). A failure of the test, or a log without its last line, is an error.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from calibrate.nccl_tests.run import NcclTestsRun, NcclTestsSample, TestedGpu, format_nccl_version
from clustersim.common.errors import InputError, format_value
from clustersim.common.units import Seconds

_PREFIX: Final = re.compile(
    r"^(?: *(?:\[[^\]\s]*\d+,\d+\](?:<std(?:out|err)>)?:"  # mpirun --tag-output, prterun's with its job name
    r"|\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}(?:<std(?:out|err)>)?:?"  # mpirun --timestamp-output
    r"|\d+:(?=\s)"  # srun --label
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?=\s)"  # of a log collector
    r"))+"
)
_NCCL_MESSAGE: Final = re.compile(  # messages of NCCL
    r"(?:\[[\d :.T-]+\] )?[A-Za-z][\w.-]*:\d+:\d+ \[-?\d+\] .*?\bNCCL (?:INFO|WARN|TRACE|CALL|VERSION|ABORT)\b.*"
)
_WARNING: Final = re.compile(r"\bNCCL WARN (.*)")
_TEST: Final = re.compile(r"# Collective test starting: (\S+)")
_LIBRARY: Final = re.compile(r"nccl-library=(\d+)")
_VERSION: Final = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_RUN_START: Final = re.compile(r"# nThread \d+ nGpus \d+ ")
_PREFIXED_START: Final = re.compile(r"(.{1,200}?)# nThread \d+ nGpus \d+ ")
_ITERATIONS: Final = re.compile(r"(?<!warmup )(?<!agg )iters: (\d+)")
_GPU_LINE: Final = re.compile(r"#\s+Rank +\d+ +(?:Group +(\d+) +)?Pid +\d+ on +(\S+) device +\d+ \[.*?\] (.+)")
_OUT_OF_BOUNDS: Final = re.compile(r"# Out of bounds values\s*:\s*(\d+)")
_RUN_END: Final = "# Avg bus bandwidth"
_ERRORS: Final = re.compile(r"Test (?:NCCL |CUDA )?failure|# error:|Invalid number of GPUs")


NumberedLine = tuple[int, str]


def read_text(path: Path, text: str) -> tuple[NcclTestsRun, ...]:
    """All runs of a log; raise InputError that names the file and the line."""
    lines = list(_joined_lines(text))
    for line_number, line in lines:
        if _ERRORS.search(line):
            raise InputError(f"{path}: line {line_number}: the run had an error: {format_value(line.strip())}")
    runs = tuple(_parse_run(path, run_lines) for run_lines in _split_runs(path, lines))
    if not runs:
        raise InputError(f"{path}: has no run of nccl-tests: no line starts with '# nThread'")
    return runs


def _joined_lines(text: str) -> Iterator[NumberedLine]:
    """Lines without prefixes; a message of NCCL inside a line becomes a line before it."""
    fragment, prefix = "", _run_prefix(text)
    for line_number, raw_line in enumerate(text.splitlines(), start=1):
        line = prefix.sub("", _PREFIX.sub("", raw_line).lstrip()).lstrip()
        message = _NCCL_MESSAGE.search(line)
        if message is not None:
            fragment += line[: message.start()] + " "
            yield line_number, message[0]
        elif line or not fragment.strip():
            yield line_number, (fragment + line).lstrip()
            fragment = ""


def _run_prefix(text: str) -> re.Pattern[str]:
    """What a launcher writes before each line of rank 0, by what is before a run's first: any numbers in it may differ.

    >>> _run_prefix("[0] node1: # nThread 1 nGpus 1 minBytes 8").sub("", "[3] node1:  8  2  float")
    ' 8  2  float'
    """
    first = next((match[1] for line in text.splitlines() if (match := _PREFIXED_START.match(line))), "")
    shown = _PREFIX.sub("", first).lstrip()
    return re.compile("^" + re.sub(r"\d+", r"\\d+", re.escape(shown))) if shown else re.compile(r"(?!)")


def _split_runs(path: Path, lines: Sequence[NumberedLine]) -> Iterator[list[NumberedLine]]:
    """The lines of each run, from the end of the previous run to its own end."""
    run_lines: list[NumberedLine] = []
    start_line = None
    for line_number, line in lines:
        if _RUN_START.match(line):
            _check_complete(path, start_line, line_number)
            start_line = line_number
        run_lines.append((line_number, line))
        if start_line is not None and line.startswith(_RUN_END):
            yield run_lines
            run_lines, start_line = [], None
    _check_complete(path, start_line, len(lines))


def _check_complete(path: Path, start_line: int | None, line_number: int) -> None:
    if start_line is not None:
        raise InputError(
            f"{path}: line {line_number}: the run that starts in line {start_line} has no '{_RUN_END}' line; the log "
            "is truncated"
        )


def _parse_run(path: Path, lines: Sequence[NumberedLine]) -> NcclTestsRun:
    start_line = next(line_number for line_number, line in lines if _RUN_START.match(line))
    library, version = _first_match(_LIBRARY, lines), _first_match(_VERSION, lines)
    gpu_matches = (_GPU_LINE.match(line) for _, line in lines)
    run = NcclTestsRun(
        file=path.name,
        location=f"{path}: line {start_line}",
        test=_first_match(_TEST, lines) or "",
        gpus=tuple(
            TestedGpu(int(gpu_match[1] or 0), gpu_match[2], gpu_match[3].strip())
            for gpu_match in gpu_matches
            if gpu_match
        ),
        version=format_nccl_version(int(library)) if library else version or "",
        iterations=int(_first_match(_ITERATIONS, lines) or 1),
        samples=tuple(_parse_samples(path, lines)),
        out_of_bounds_count=int(_first_match(_OUT_OF_BOUNDS, lines) or 0),
        warnings=tuple(warning[1].strip() for _, line in lines if (warning := _WARNING.search(line))),
    )
    if not run.samples:
        raise InputError(f"{run.location}: the run has no table")
    return run


def _first_match(pattern: re.Pattern[str], lines: Sequence[NumberedLine]) -> str | None:
    """The pattern's group in the first line that matches."""
    return next((match[1] for _, line in lines if (match := pattern.search(line))), None)


def _parse_samples(path: Path, lines: Sequence[NumberedLine]) -> Iterator[NcclTestsSample]:
    columns: list[str] = []
    for line_number, line in lines:
        location, fields = f"{path}: line {line_number}", line.split()
        if fields[1:4] == ["size", "count", "type"]:
            columns = _check_columns(location, fields[1:])
        elif fields and fields[0].isdecimal() and columns:
            yield _parse_sample(location, columns, fields)


def _check_columns(location: str, names: list[str]) -> list[str]:
    if "cputime" in names:
        raise InputError(f"{location}: cputime is what launching takes, not the collective; run without -C")
    if names.count("time") != 2:
        raise InputError(f"{location}: {names.count('time')} columns are called time, not 2 (out-of-place, in-place)")
    if names.count("#wrong") not in (0, 2):  # none: older versions, which have `error`
        raise InputError(f"{location}: {names.count('#wrong')} columns are called #wrong, not 2, one for each time")
    return names


def _parse_sample(location: str, columns: Sequence[str], fields: Sequence[str]) -> NcclTestsSample:
    expected = len(columns) + columns.count("timestamp")  # a timestamp is two fields: date and time of day
    if len(fields) != expected:
        raise InputError(f"{location}: {len(fields)} values under {expected} columns; the line is damaged or truncated")
    time_columns, wrong_columns = _column_indices(columns, "time"), _column_indices(columns, "#wrong")
    seconds = [_parse_float(location, fields[column]) for column in time_columns]
    counts = [_parse_float(location, fields[column]) for column in wrong_columns] or [None, None]
    return NcclTestsSample(
        location=location,
        size=_parse_int(location, fields[0]),
        count=_parse_int(location, fields[1]),
        type=fields[2],
        out_of_place=_to_seconds(seconds[0]),
        in_place=_to_seconds(seconds[1]),
        wrong_counts=(counts[0], counts[1]),
    )


def _column_indices(columns: Sequence[str], name: str) -> list[int]:
    return [index for index, column in enumerate(columns) if column == name]


def _to_seconds(microseconds: float | None) -> Seconds | None:
    return None if microseconds is None else microseconds * 1e-6


def _parse_float(location: str, text: str) -> float | None:
    if text == "N/A":
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{location}: {text!r} is not a number") from None


def _parse_int(location: str, text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"{location}: {text!r} is not a number of bytes or elements")
    return int(text)
