"""How is the table of all spans written? As CSV, or as Parquet or Arrow where pyarrow is installed.

Rank by rank, so a large table never stands in memory as a whole; but for Arrow's, whose ranks share dictionaries. In
CSV, nothing is an empty cell; in the others it is null, and words are dictionaries. Arrow files are Arrow's IPC file
format (Feather version 2).
Parquet and Arrow need an extra: `pip install 'clustersim[table]'`.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.errors import InputError
from clustersim.report.files import atomic_file
from clustersim.report.span_table import COLUMNS, INTEGER, NUMBER, Columns, Values, rows_of
from clustersim.report.trace import MOST_BYTES, require_size, spans_of
from clustersim.report.trace_ranks import TraceRank, default_ranks, trace_ranks
from clustersim.units import Bytes

if TYPE_CHECKING:
    from clustersim.answer import Answer

SUFFIXES: Final = (".csv", ".parquet", ".arrow")
_SAMPLE: Final = 2000  # rows


def require_table(path: str | Path) -> None:
    """Raise InputError for a name whose end is no format, or one whose extra is not installed."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise InputError(f"--spans {path}: name a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if suffix != ".csv":
        _library()


def write_spans(
    result: "Answer", path: str | Path, ranks: Sequence[int] | None = None, *, most: Bytes = MOST_BYTES
) -> int:
    """Write all spans of some ranks as a table, in the format that the name ends in; return of how many ranks.

    ranks: by default as by `default_ranks`. Raises InputError as `require_table` does, OutputError where `path` cannot
    be written or would be larger than `most` bytes.
    """
    require_table(path)
    write = {".csv": write_csv, ".parquet": write_parquet, ".arrow": write_arrow}[Path(path).suffix]
    chosen = trace_ranks(result, default_ranks(result) if ranks is None else ranks)
    rows = spans_of(result, [rank.rank for rank in chosen])
    require_size(path, _bytes_of_row(result, chosen, write) * rows, len(chosen), most)
    with atomic_file(path) as file:
        write(rows_of(result, chosen), file)
    return len(chosen)


def write_csv(parts: Iterable[Columns], file: IO[bytes]) -> None:
    """Rows of comma-separated values in UTF-8, below a row of names; what is nothing is an empty cell."""
    text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="", write_through=False)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for part in parts:
        writer.writerows(zip(*(_cells(COLUMNS[name][0], values) for name, values in part.items()), strict=True))
    text.flush()
    text.detach()


def write_parquet(parts: Iterable[Columns], file: IO[bytes]) -> None:
    """A row group for each rank."""
    arrow = _library()
    from pyarrow import parquet

    with parquet.ParquetWriter(file, _schema(arrow)) as writer:
        for part in parts:
            writer.write_batch(_batch(arrow, part))


def write_arrow(parts: Iterable[Columns], file: IO[bytes]) -> None:
    """A record batch for each rank."""
    arrow = _library()
    table = arrow.Table.from_batches([_batch(arrow, part) for part in parts], _schema(arrow))
    options = arrow.ipc.IpcWriteOptions(unify_dictionaries=True)
    with arrow.ipc.new_file(file, _schema(arrow), options=options) as writer:
        writer.write_table(table)


def _bytes_of_row(result: "Answer", ranks: Sequence[TraceRank], write: Any) -> float:
    """As many as those at the beginning of the first rank take."""
    first = next(rows_of(result, ranks[:1]))
    sample = {name: values[:_SAMPLE] for name, values in first.items()}
    file = io.BytesIO()
    write([sample], file)
    return file.tell() / max(1, len(sample["rank"]))


def _cells(kind: str, values: Values) -> list[Any]:
    """Values of a column as CSV has them."""
    cells: list[Any] = values.tolist()
    if kind == INTEGER and (values < 0).any():
        return ["" if cell < 0 else cell for cell in cells]
    if kind == NUMBER and np.isnan(values).any():
        return ["" if cell != cell else cell for cell in cells]  # noqa: PLR0124 - NaN alone differs from itself
    return cells


def _library() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InputError(
            "a table as Parquet or Arrow needs the extra 'table': pip install 'clustersim[table]'; "
            "a name that ends in .csv gives one without it"
        ) from error
    return pyarrow


def _schema(arrow: Any) -> Any:
    types = {INTEGER: arrow.int64(), NUMBER: arrow.float64()}
    words = arrow.dictionary(arrow.int32(), arrow.string())
    return arrow.schema(
        [
            arrow.field(name, types.get(kind, words), metadata={"meaning": said})
            for name, (kind, said) in COLUMNS.items()
        ]
    )


def _batch(arrow: Any, part: Columns) -> Any:
    columns = [_column(arrow, COLUMNS[name][0], values) for name, values in part.items()]
    return arrow.record_batch(columns, schema=_schema(arrow))


def _column(arrow: Any, kind: str, values: Values) -> Any:
    if kind == INTEGER:
        return arrow.array(values, arrow.int64(), mask=values < 0)
    if kind == NUMBER:
        return arrow.array(values, arrow.float64(), mask=np.isnan(values))
    return arrow.array(values, arrow.string(), mask=values == "").dictionary_encode()
