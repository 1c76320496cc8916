"""How is the table of all spans written? As CSV, or as Parquet or Arrow where pyarrow is installed.

For those who would rather ask a data frame than look at a picture. `COLUMNS` says what each column holds. A row is
named by its rank, its task (the place in the rank's program) and its operation (the place in the pass, empty for the
task itself); the cause of a span is named in the same way. Where the cause ran on a rank of another class, that rank is
the simulated one which stands for it.

Rank by rank, so a large table never stands in memory as a whole; but for Arrow's, whose ranks share dictionaries. In
CSV, nothing is an empty cell; in the others it is null, and words are dictionaries. Arrow files are Arrow's IPC file
format (Feather version 2).
Parquet and Arrow need an extra: `pip install 'clustersim[table]'`.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.common.errors import InputError
from clustersim.parallel.mesh import BASE_AXES, PIPELINE
from clustersim.program.task import Stream
from clustersim.report.export.rank_selection import TraceRank
from clustersim.report.export.span_descriptions import STREAM_NAMES, action_of
from clustersim.report.export.span_table import Spans
from clustersim.results.simulation_result import SimulationResult

Values = NDArray[Any]
Columns = dict[str, Values]
INTEGER, NUMBER, WORD = "integer", "number", "word"
COLUMNS: Final[Mapping[str, tuple[str, str]]] = {
    "rank": (INTEGER, "global rank"),
    "simulated_rank": (INTEGER, "the rank that was simulated for it: itself, or one with provably equal times"),
    "stage": (INTEGER, "pipeline rank"),
    **{axis.name: (INTEGER, f"coordinate on the {axis.label} axis, if the layout has it") for axis in BASE_AXES},
    "stream": (WORD, "which of the rank's streams"),
    "kind": (WORD, "pass, kernel, exchange, overlap (a kernel and an exchange), collective, send or receive"),
    "category": (WORD, "what the page calls and colours it"),
    "name": (WORD, "what it is called"),
    "step": (INTEGER, "the step it belongs to, from 0"),
    "task": (INTEGER, "place in the rank's program"),
    "operation": (INTEGER, "place in the pass; empty for the task itself"),
    "microbatch": (INTEGER, "through all steps, from 0"),
    "chunk": (INTEGER, "model chunk of the stage, from 0"),
    "queued": (NUMBER, "seconds: the stream turned to it"),
    "ready": (NUMBER, "seconds: all that it waits for on its own rank had ended"),
    "start": (NUMBER, "seconds"),
    "end": (NUMBER, "seconds"),
    "waited": (NUMBER, "seconds inside a pass in which it waited for other ranks"),
    "slowed": (NUMBER, "seconds by which communication beside it made its kernels longer"),
    "contended": (NUMBER, "seconds by which sharing links made its exchanges longer"),
    "bytes": (NUMBER, "payload of communication, as nccl-tests count it"),
    "memory_bytes": (NUMBER, "read and written in device memory by kernels"),
    "flop": (NUMBER, "FLOP of kernels, as executed"),
    "shape": (WORD, "what a kernel computes"),
    "algorithm": (WORD, "of communication"),
    "bound": (WORD, "what limits it"),
    "provenance": (WORD, "where its duration comes from"),
    "cause_rank": (INTEGER, "rank of the span whose end allowed the start"),
    "cause_task": (INTEGER, "task of the span whose end allowed the start"),
}
_TIMES: Final = ("queued", "ready", "waited", "slowed", "contended")  # of tasks alone
_SAID: Final = ("kind", "name", "bytes", "memory_bytes", "flop", "shape", "algorithm", "bound", "provenance")


def require_table(path: str | Path) -> Callable[[Iterable[Columns], IO[bytes]], None]:
    """What writes a table in the format that the name ends in.

    Raises InputError for a name whose end is no format, or one whose extra is not installed.
    """
    suffix = Path(path).suffix
    if suffix not in _WRITERS:
        *others, last = _WRITERS
        raise InputError(f"--spans {path}: name a file that ends in {', '.join(others)} or {last}")
    if suffix != ".csv":
        _library()
    return _WRITERS[suffix]


def columns_of(result: SimulationResult, rank: TraceRank, spans: Spans) -> Columns:
    """All rows of a rank by start; integers below 0, numbers that are NaN and empty words stand for nothing."""
    spans = spans.some(np.lexsort((spans.operation, spans.task, spans.start)))
    trace, cause = spans.trace, spans.of_tasks(spans.trace.critical_predecessor, -1)
    actions, placement = [action_of(task) for task in spans.program.tasks], result.scenario.placement
    there = np.where(trace.rank[cause] == rank.simulated, rank.rank, trace.rank[cause])
    of_rank = {axis.name: rank.coordinates.get(axis.name, -1) for axis in BASE_AXES}
    of_rank |= {"rank": rank.rank, "simulated_rank": rank.simulated, "stage": rank.coordinates[PIPELINE.name]}
    of_task = {
        "step": spans.program.step_indices(result.scenario.steps),
        "microbatch": np.array([-1 if action is None else action.microbatch for action in actions]),
        "chunk": np.array([-1 if item is None else placement.chunk_index(item.stage) for item in actions]),
    }
    found: Columns = {name: np.full(len(spans), number) for name, number in of_rank.items()}
    found |= {name: spans.of_tasks(getattr(trace, name), np.nan) for name in _TIMES}
    found |= {name: column[spans.task] for name, column in of_task.items()}
    found |= {name: _array([getattr(element, name) for element in spans.labels])[spans.label] for name in _SAID}
    found |= {name: getattr(spans, name) for name in ("start", "end", "task", "operation")}
    found["category"] = _array([label.category.label for label in spans.labels])[spans.label]
    found["stream"] = _array([STREAM_NAMES[stream] for stream in Stream])[spans.stream]
    found["cause_rank"] = np.where(cause < 0, -1, there)
    found["cause_task"] = np.where(cause < 0, -1, trace.task[cause])
    return {name: found[name] for name in COLUMNS}


def write_csv(parts: Iterable[Columns], file: IO[bytes]) -> None:
    """Rows of comma-separated values in UTF-8, below a row of names; what is nothing is an empty cell."""
    text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="", write_through=False)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for part in parts:
        cells = {name: values.astype(object) for name, values in part.items()}
        for name, values in part.items():
            cells[name][_nothing(COLUMNS[name][0], values)] = ""
        writer.writerows(zip(*(column.tolist() for column in cells.values()), strict=True))
    text.flush()
    text.detach()


def write_parquet(parts: Iterable[Columns], file: IO[bytes]) -> None:
    """A row group for each rank."""
    schema = _schema()
    from pyarrow import parquet

    with parquet.ParquetWriter(file, schema) as writer:
        for part in parts:
            writer.write_batch(_batch(schema, part))


def write_arrow(parts: Iterable[Columns], file: IO[bytes]) -> None:
    """A record batch for each rank."""
    arrow, schema = _library(), _schema()
    table = arrow.Table.from_batches([_batch(schema, part) for part in parts], schema)
    options = arrow.ipc.IpcWriteOptions(unify_dictionaries=True)
    with arrow.ipc.new_file(file, schema, options=options) as writer:
        writer.write_table(table)


def _nothing(kind: str, values: Values) -> Values:
    """[n] where a column says nothing."""
    return np.asarray(values < 0 if kind == INTEGER else np.isnan(values) if kind == NUMBER else values == "")


def _library() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InputError(
            "a table as Parquet or Arrow needs the extra 'table': pip install 'clustersim[table]'; "
            "a name that ends in .csv gives one without it"
        ) from error
    return pyarrow


def _schema() -> Any:
    arrow = _library()
    types = {INTEGER: arrow.int64(), NUMBER: arrow.float64(), WORD: arrow.dictionary(arrow.int32(), arrow.string())}
    fields = (arrow.field(name, types[kind], metadata={"meaning": said}) for name, (kind, said) in COLUMNS.items())
    return arrow.schema(fields)


def _batch(schema: Any, part: Columns) -> Any:
    """A record batch; of words, arrays are given to be coded, so that each batch has a dictionary of its own."""
    arrow, columns = _library(), []
    for field in schema:
        kind, values = COLUMNS[field.name][0], part[field.name]
        column = arrow.array(values, arrow.string() if kind == WORD else field.type, mask=_nothing(kind, values))
        columns.append(column.dictionary_encode() if kind == WORD else column)
    return arrow.record_batch(columns, schema=schema)


def _array(values: list[Any]) -> Values:
    """Numbers as numbers, words as objects."""
    return np.array(values, dtype=object if isinstance(values[0], str) else np.float64)


_WRITERS: Final = {".csv": write_csv, ".parquet": write_parquet, ".arrow": write_arrow}
