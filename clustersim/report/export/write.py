"""How is what happened written to files? In one of several formats, unless it would fill a disk.

The size is estimated from a sample before anything is written: a trace of every rank of a large cluster would fill a
disk, and no viewer opens it.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import numpy as np

from clustersim.errors import OutputError
from clustersim.report.export.folder import rank_files, require_directory
from clustersim.report.export.kineto import write_kineto
from clustersim.report.export.perfetto import require_trace, write_perfetto
from clustersim.report.export.ranks import default_ranks, trace_ranks
from clustersim.report.export.spans import Export
from clustersim.report.export.table import require_table, table_writer
from clustersim.report.files import atomic_file
from clustersim.units import Bytes, format_bytes

if TYPE_CHECKING:
    from clustersim.answer import Answer

MOST_BYTES: Final = 2**30
MANY_SPANS: Final = 100_000
"""Writing so many takes seconds."""
_SAMPLE: Final = 200
"""Passes and messages from which the size of a file is estimated."""
Writer = Callable[[Export, IO[bytes]], None]


def write_trace(
    result: "Answer", path: str | Path, ranks: Sequence[int] | None = None, *, most: Bytes = MOST_BYTES
) -> int:
    """Write a trace for Perfetto of some ranks; return of how many.

    ranks: by default as by `default_ranks`. Raises InputError as `require_trace` does, OutputError where `path` cannot
    be written or the trace would be larger than `most` bytes.
    """
    require_trace(path)
    return _write(result, path, ranks, most, write_perfetto)


def write_spans(
    result: "Answer", path: str | Path, ranks: Sequence[int] | None = None, *, most: Bytes = MOST_BYTES
) -> int:
    """Write all spans of some ranks as a table, in the format that the name ends in; return of how many ranks.

    ranks: by default as by `default_ranks`. Raises InputError as `require_table` does, OutputError where `path` cannot
    be written or would be larger than `most` bytes.
    """
    require_table(path)
    return _write(result, path, ranks, most, table_writer(path))


def write_kineto_files(
    result: "Answer", path: str | Path, ranks: Sequence[int] | None = None, *, most: Bytes = MOST_BYTES
) -> int:
    """Write a file for each of some ranks, in a directory that is made if it is not there; return how many.

    ranks: by default as by `default_ranks`. Raises OutputError where the directory holds something else, cannot be
    written, or would have more than `most` bytes.
    """
    require_directory(path)
    export = _export(result, path, ranks, most, _first_file)
    with rank_files(Path(path), [rank.rank for rank in export.ranks]) as files:
        for rank, spans in export:
            with files[rank.rank].open("wb") as file:
                write_kineto(result, rank, spans, file)
    return len(export.ranks)


def spans_of(result: "Answer", ranks: Sequence[int] | None = None) -> int:
    """How many spans traces of some ranks have: passes, the operations in them, and what is sent and received."""
    sizes = [len(program.tasks) + program.operations_before[-1] for program in result.program.programs]
    chosen = default_ranks(result) if ranks is None else ranks
    return int(np.array(sizes)[result.program.kind[list(chosen)]].sum())


def _write(result: "Answer", path: str | Path, ranks: Sequence[int] | None, most: Bytes, write: Writer) -> int:
    """Write one file, and return of how many ranks."""
    export = _export(result, path, ranks, most, write)
    with atomic_file(path) as file:
        write(export, file)
    return len(export.ranks)


def _first_file(export: Export, file: IO[bytes]) -> None:
    rank, spans = next(iter(export))
    write_kineto(export.result, rank, spans, file)


def _export(result: "Answer", path: str | Path, ranks: Sequence[int] | None, most: Bytes, write: Writer) -> Export:
    """What is to be written; raise OutputError where it would have more bytes than `most`.

    For each span it would have as many as the beginning of the first rank has.
    """
    export = Export(result, trace_ranks(result, default_ranks(result) if ranks is None else ranks))
    sample, file = replace(export, ranks=export.ranks[:1], most=_SAMPLE), io.BytesIO()
    write(sample, file)
    (_, sampled), count = next(iter(sample)), len(export.ranks)
    size = file.tell() / max(1, len(sampled)) * spans_of(result, [rank.rank for rank in export.ranks])
    if size > most:
        raise OutputError(
            f"{path}: all operations on {count:,} rank{'s' if count > 1 else ''} would be about {format_bytes(size)}, "
            f"above {format_bytes(most)}; choose fewer ranks (--ranks 0, --ranks slowest:2), give fewer microbatches "
            "(training.global_batch) or fewer steps, or write it all the same (--force)"
        )
    return export
