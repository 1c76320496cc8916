"""How is the table of all spans written? As CSV, or as Parquet or Arrow if pyarrow is installed.

For analysis in data frames. `COLUMNS` documents each column. A row is identified by its rank, its task
(index in the rank's program) and its operation (index in the pass, empty for the task itself); the cause of
a span is identified in the same way. If the cause ran on a rank of another class, that rank is its
simulated representative.

Written rank by rank, so a large table is never in memory at once; except for Arrow, whose ranks share
dictionaries. Missing values are empty cells in CSV and null in the others, where texts are dictionary
encoded. Arrow files are in Arrow's IPC file format (Feather version 2).
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
from clustersim.report.export.span_descriptions import STREAM_LABELS, action_of_task
from clustersim.report.export.span_table import SpanTable
from clustersim.results.simulation_result import SimulationResult

Values = NDArray[Any]
Columns = dict[str, Values]
INTEGER, NUMBER, TEXT = "integer", "number", "word"
COLUMNS: Final[Mapping[str, tuple[str, str]]] = {
    "rank": (INTEGER, "global rank"),
    "simulated_rank": (INTEGER, "the rank that was simulated for it: itself, or one with provably equal times"),
    "stage": (INTEGER, "pipeline rank"),
    **{axis.name: (INTEGER, f"coordinate on the {axis.label} axis, if the layout has it") for axis in BASE_AXES},
    "stream": (TEXT, "which of the rank's streams"),
    "kind": (TEXT, "pass, kernel, communication, overlap (a kernel and communication), collective, send or receive"),
    "category": (TEXT, "category, as labelled and coloured on the page"),
    "name": (TEXT, "name"),
    "step": (INTEGER, "the step it belongs to, from 0"),
    "task": (INTEGER, "index in the rank's program"),
    "operation": (INTEGER, "index in the pass; empty for the task itself"),
    "microbatch": (INTEGER, "through all steps, from 0"),
    "chunk": (INTEGER, "model chunk of the stage, from 0"),
    "queued": (NUMBER, "seconds: it reached the head of its stream"),
    "ready": (NUMBER, "seconds: all its dependencies on its own rank had ended"),
    "start": (NUMBER, "seconds"),
    "end": (NUMBER, "seconds"),
    "waited": (NUMBER, "seconds inside a pass in which it waited for other ranks"),
    "slowed": (NUMBER, "seconds by which concurrent communication slowed its kernels"),
    "contended": (NUMBER, "seconds by which link contention slowed its communication"),
    "bytes": (NUMBER, "payload of communication, as nccl-tests count it"),
    "memory_bytes": (NUMBER, "read and written in device memory by kernels"),
    "flop": (NUMBER, "FLOP of kernels, as executed"),
    "shape": (TEXT, "shape of a kernel"),
    "algorithm": (TEXT, "of communication"),
    "bottleneck": (TEXT, "resource that limits it"),
    "provenance": (TEXT, "provenance of its duration"),
    "predecessor_rank": (INTEGER, "rank of the critical predecessor, whose end allowed the start"),
    "predecessor_task": (INTEGER, "task of the critical predecessor"),
}
_TASK_COLUMNS: Final = ("queued", "ready", "waited", "slowed", "contended")  # of tasks only
_DESCRIPTION_COLUMNS: Final = (
    "kind",
    "name",
    "bytes",
    "memory_bytes",
    "flop",
    "shape",
    "algorithm",
    "bottleneck",
    "provenance",
)


def table_writer(path: str | Path) -> Callable[[Iterable[Columns], IO[bytes]], None]:
    """Function that writes a table in the format of the file's suffix.

    Raises InputError for an unknown suffix, or if the format's extra is not installed.
    """
    suffix = Path(path).suffix
    if suffix not in _WRITERS:
        *other_suffixes, last_suffix = _WRITERS
        raise InputError(f"--spans {path}: name a file that ends in {', '.join(other_suffixes)} or {last_suffix}")
    if suffix != ".csv":
        _load_pyarrow()
    return _WRITERS[suffix]


def build_columns(result: SimulationResult, rank: TraceRank, spans: SpanTable) -> Columns:
    """Columns of a rank's spans, by start; integers below 0, NaN and empty texts are missing values."""
    spans = spans.select(np.lexsort((spans.operation, spans.task, spans.start)))
    trace, cause = spans.trace, spans.task_column(spans.trace.critical_predecessor, -1)
    actions, placement = [action_of_task(task) for task in spans.program.tasks], result.scenario.placement
    predecessor_rank = np.where(trace.rank[cause] == rank.representative, rank.rank, trace.rank[cause])
    rank_columns = {axis.name: rank.coordinates.get(axis.name, -1) for axis in BASE_AXES}
    rank_columns |= {"rank": rank.rank, "simulated_rank": rank.representative, "stage": rank.coordinates[PIPELINE.name]}
    task_columns = {
        "step": spans.program.step_indices(result.scenario.steps),
        "microbatch": np.array([-1 if action is None else action.microbatch for action in actions]),
        "chunk": np.array([-1 if action is None else placement.chunk_index(action.stage) for action in actions]),
    }
    columns: Columns = {name: np.full(len(spans), value) for name, value in rank_columns.items()}
    columns |= {name: spans.task_column(getattr(trace, name), np.nan) for name in _TASK_COLUMNS}
    columns |= {name: column[spans.task] for name, column in task_columns.items()}
    columns |= {
        name: _to_array([getattr(description, name) for description in spans.descriptions])[spans.description]
        for name in _DESCRIPTION_COLUMNS
    }
    columns |= {name: getattr(spans, name) for name in ("start", "end", "task", "operation")}
    columns["category"] = _to_array([label.category.label for label in spans.descriptions])[spans.description]
    columns["stream"] = _to_array([STREAM_LABELS[stream] for stream in Stream])[spans.stream]
    columns["predecessor_rank"] = np.where(cause < 0, -1, predecessor_rank)
    columns["predecessor_task"] = np.where(cause < 0, -1, trace.task[cause])
    return {name: columns[name] for name in COLUMNS}


def write_csv(batches: Iterable[Columns], file: IO[bytes]) -> None:
    """Comma-separated values in UTF-8 with a header row; missing values are empty cells."""
    text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="", write_through=False)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for batch in batches:
        cells = {name: values.astype(object) for name, values in batch.items()}
        for name, values in batch.items():
            cells[name][_is_missing(COLUMNS[name][0], values)] = ""
        writer.writerows(zip(*(column.tolist() for column in cells.values()), strict=True))
    text.flush()
    text.detach()


def write_parquet(batches: Iterable[Columns], file: IO[bytes]) -> None:
    """A row group for each rank."""
    schema = _schema()
    from pyarrow import parquet

    with parquet.ParquetWriter(file, schema) as writer:
        for batch in batches:
            writer.write_batch(_record_batch(schema, batch))


def write_arrow(batches: Iterable[Columns], file: IO[bytes]) -> None:
    """A record batch for each rank."""
    arrow, schema = _load_pyarrow(), _schema()
    table = arrow.Table.from_batches([_record_batch(schema, batch) for batch in batches], schema)
    options = arrow.ipc.IpcWriteOptions(unify_dictionaries=True)
    with arrow.ipc.new_file(file, schema, options=options) as writer:
        writer.write_table(table)


def _is_missing(kind: str, values: Values) -> Values:
    """[n] where a column's value is missing."""
    return np.asarray(values < 0 if kind == INTEGER else np.isnan(values) if kind == NUMBER else values == "")


def _load_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InputError(
            "a table as Parquet or Arrow needs the extra 'table': pip install 'clustersim[table]'; "
            "a name that ends in .csv gives one without it"
        ) from error
    return pyarrow


def _schema() -> Any:
    arrow = _load_pyarrow()
    types = {INTEGER: arrow.int64(), NUMBER: arrow.float64(), TEXT: arrow.dictionary(arrow.int32(), arrow.string())}
    fields = (
        arrow.field(name, types[kind], metadata={"meaning": meaning}) for name, (kind, meaning) in COLUMNS.items()
    )
    return arrow.schema(fields)


def _record_batch(schema: Any, columns: Columns) -> Any:
    """A record batch; texts are encoded by batch, so that each batch has a dictionary of its own."""
    arrow, arrays = _load_pyarrow(), []
    for field in schema:
        kind, values = COLUMNS[field.name][0], columns[field.name]
        array = arrow.array(values, arrow.string() if kind == TEXT else field.type, mask=_is_missing(kind, values))
        arrays.append(array.dictionary_encode() if kind == TEXT else array)
    return arrow.record_batch(arrays, schema=schema)


def _to_array(values: list[Any]) -> Values:
    """Numbers as float64, texts as objects."""
    return np.array(values, dtype=object if isinstance(values[0], str) else np.float64)


_WRITERS: Final = {".csv": write_csv, ".parquet": write_parquet, ".arrow": write_arrow}
