"""How is the table of all spans written? As CSV, or as Parquet or Arrow if pyarrow is installed.

For analysis in data frames. `COLUMNS` documents each column. A row is identified by its rank, its task
(index in the rank's program) and its operation (index in the pass, empty for the task itself); the cause of
a span is identified in the same way. If the cause ran on a rank of another class, that rank is its
simulated representative.

Written rank by rank, so a large table is never in memory at once; except for Arrow, whose ranks share
dictionaries, and for `span_rows`, the same table in memory. Missing values are empty cells in CSV and null in
the others, where texts are dictionary encoded. Arrow files are in Arrow's IPC file format (Feather version 2).
Parquet and Arrow need an extra: `pip install 'clustersim[table]'`.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from clustersim.common.errors import InputError
from clustersim.common.table import (
    Column,
    Columns,
    ColumnType,
    Table,
    Values,
    arrow_batch,
    arrow_schema,
    import_table_library,
    is_missing,
)
from clustersim.parallel.mesh import BASE_AXES, PIPELINE
from clustersim.program.task import Stream
from clustersim.report.export.rank_selection import TraceRank, count_spans, describe_trace_ranks
from clustersim.report.export.span_descriptions import STREAM_LABELS, action_of_task
from clustersim.report.export.span_table import SpanTable, TraceExport
from clustersim.results.simulation_result import SimulationResult

INTEGER, NUMBER, TEXT = ColumnType
COLUMNS: Final[Mapping[str, Column]] = {
    "rank": Column(INTEGER, "global rank"),
    "simulated_rank": Column(INTEGER, "the rank that was simulated for it: itself, or one with provably equal times"),
    "stage": Column(INTEGER, "pipeline rank"),
    **{axis.name: Column(INTEGER, f"coordinate on the {axis.label} axis, if the layout has it") for axis in BASE_AXES},
    "stream": Column(TEXT, "which of the rank's streams"),
    "kind": Column(
        TEXT, "pass, kernel, communication, overlap (a kernel and communication), collective, send or receive"
    ),
    "category": Column(TEXT, "category, as labelled and coloured on the page"),
    "name": Column(TEXT, "name"),
    "step": Column(INTEGER, "the step it belongs to, from 0"),
    "task": Column(INTEGER, "index in the rank's program"),
    "operation": Column(INTEGER, "index in the pass; empty for the task itself"),
    "microbatch": Column(INTEGER, "through all steps, from 0"),
    "chunk": Column(INTEGER, "model chunk of the stage, from 0"),
    "queued": Column(NUMBER, "seconds: it reached the head of its stream"),
    "ready": Column(NUMBER, "seconds: all its dependencies on its own rank had ended"),
    "start": Column(NUMBER, "seconds"),
    "end": Column(NUMBER, "seconds"),
    "waited": Column(NUMBER, "seconds inside a pass in which it waited for other ranks"),
    "slowed": Column(NUMBER, "seconds by which concurrent communication slowed its kernels"),
    "contended": Column(NUMBER, "seconds by which link contention slowed its communication"),
    "bytes": Column(NUMBER, "payload of communication, as nccl-tests count it"),
    "memory_bytes": Column(NUMBER, "read and written in device memory by kernels"),
    "flop": Column(NUMBER, "FLOP of kernels, as executed"),
    "shape": Column(TEXT, "shape of a kernel"),
    "algorithm": Column(TEXT, "of communication"),
    "bottleneck": Column(TEXT, "resource that limits it"),
    "provenance": Column(TEXT, "provenance of its duration"),
    "predecessor_rank": Column(INTEGER, "rank of the critical predecessor, whose end allowed the start"),
    "predecessor_task": Column(INTEGER, "task of the critical predecessor"),
}
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n")
MAX_ROWS: Final = 5_000_000
"""Maximum number of rows in memory: 1.5 GB."""
_TASK_COLUMNS: Final = ("ready", "waited", "slowed", "contended")  # of tasks only
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
        try:
            import_table_library("pyarrow")
        except InputError as error:
            raise InputError(f"--spans {path}: {error}; a name that ends in .csv gives one without it") from error
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
    columns |= {name: getattr(spans, name) for name in ("queued", "start", "end", "task", "operation")}
    columns["category"] = _to_array([label.category.label for label in spans.descriptions])[spans.description]
    columns["stream"] = _to_array([STREAM_LABELS[stream] for stream in Stream])[spans.stream]
    columns["predecessor_rank"] = np.where(cause < 0, -1, predecessor_rank)
    columns["predecessor_task"] = np.where(cause < 0, -1, trace.task[cause])
    return {name: columns[name] for name in COLUMNS}


def span_rows(result: SimulationResult, ranks: Sequence[int]) -> Table:
    """All spans of some ranks in memory. Raises InputError for more than `MAX_ROWS` of them."""
    export = TraceExport(result, describe_trace_ranks(result, ranks))
    row_count = count_spans(result, ranks)
    if row_count > MAX_ROWS:
        raise InputError(
            f"{row_count:,} spans of {len(ranks):,} ranks are too many, at most {MAX_ROWS:,}; name fewer ranks, or "
            "write them to a file (clustersim run --spans)"
        )
    return Table.concatenate(COLUMNS, (build_columns(result, *rank_and_spans) for rank_and_spans in export))


def write_csv(batches: Iterable[Columns], file: IO[bytes]) -> None:
    """Comma-separated values in UTF-8 with a header row; missing values are empty cells."""
    text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="", write_through=False)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for batch in batches:
        cells = {name: values.astype(object) for name, values in batch.items()}
        for name, values in batch.items():
            cells[name][is_missing(COLUMNS[name], values)] = ""
            if COLUMNS[name].type is TEXT:
                cells[name] = np.array([_without_formula(str(cell)) for cell in cells[name]], dtype=object)
        writer.writerows(zip(*(column.tolist() for column in cells.values()), strict=True))
    text.flush()
    text.detach()


def _without_formula(text: str) -> str:
    """A cell that spreadsheets do not take for a formula (OWASP, CSV injection).

    >>> _without_formula("=cmd()"), _without_formula("ring")
    ("'=cmd()", 'ring')
    """
    neutral = f"'{text}" if text.startswith(_FORMULA_STARTS) else text
    return neutral.replace("\r", "\\r")  # which Python 3.11 does not quote


def write_parquet(batches: Iterable[Columns], file: IO[bytes]) -> None:
    """A row group for each rank."""
    parquet, schema = import_table_library("pyarrow.parquet"), arrow_schema(COLUMNS)
    with parquet.ParquetWriter(file, schema) as writer:
        for batch in batches:
            writer.write_batch(arrow_batch(schema, COLUMNS, batch))


def write_arrow(batches: Iterable[Columns], file: IO[bytes]) -> None:
    """A record batch for each rank."""
    arrow, schema = import_table_library("pyarrow"), arrow_schema(COLUMNS)
    table = arrow.Table.from_batches([arrow_batch(schema, COLUMNS, batch) for batch in batches], schema)
    options = arrow.ipc.IpcWriteOptions(unify_dictionaries=True)
    with arrow.ipc.new_file(file, schema, options=options) as writer:
        writer.write_table(table)


def _to_array(values: list[Any]) -> Values:
    """Numbers as float64, texts as objects."""
    return np.array(values, dtype=object if isinstance(values[0], str) else np.float64)


_WRITERS: Final = {".csv": write_csv, ".parquet": write_parquet, ".arrow": write_arrow}
