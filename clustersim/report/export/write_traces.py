"""How are traces written to files? In one of several formats, unless they would be too large.

The size is estimated from a sample before anything is written: a trace of every rank of a large cluster
would fill a disk, and no viewer opens it. Ranks default to `default_ranks`; functions return how many ranks
were written. OutputError is raised if a path cannot be written, or would exceed `max_bytes`.

Kineto traces are one file for each rank, `rank-0.json` and so on, in a directory. Tools read all its files
as one run, so it must be new, or contain only files written by clustersim: files of an earlier run are
replaced, and those of its other ranks removed. All are written before the first is renamed into place: if
the disk is full, those of the earlier run remain, and files of two runs never mix.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from clustersim.common.errors import OutputError
from clustersim.common.files import (
    as_output_error,
    atomic_file,
    atomic_files,
    is_leftover,
    is_old_leftover,
    require_writable,
)
from clustersim.common.units import Bytes, format_bytes
from clustersim.report.export.kineto import PRODUCER, write_kineto
from clustersim.report.export.perfetto import require_perfetto, write_perfetto
from clustersim.report.export.rank_selection import count_spans, default_ranks, describe_trace_ranks
from clustersim.report.export.span_table import TraceExport
from clustersim.report.export.table import build_columns, table_writer
from clustersim.results.simulation_result import SimulationResult

MAX_FILE_BYTES: Final = 2**30
LARGE_SPAN_COUNT: Final = 100_000
"""From this many spans on, writing takes seconds."""
_SAMPLE_TASKS: Final = 200
"""Number of tasks (passes and messages) from which the file size is estimated."""
_FILE_PREFIX: Final = f'{{\n"producer": "{PRODUCER} '.encode()
RankSelection = Sequence[int] | None
ExportWriter = Callable[[TraceExport, IO[bytes]], None]


def write_perfetto_file(
    result: SimulationResult, path: str | Path, ranks: RankSelection = None, *, max_bytes: Bytes = MAX_FILE_BYTES
) -> int:
    """Write a Perfetto trace of some ranks; raises InputError as `require_perfetto` does."""
    require_perfetto(path)
    return _write_single_file(result, path, ranks, max_bytes, write_perfetto)


def write_table_file(
    result: SimulationResult, path: str | Path, ranks: RankSelection = None, *, max_bytes: Bytes = MAX_FILE_BYTES
) -> int:
    """Write all spans of some ranks in the format of the file's suffix; raises InputError as `table_writer` does."""
    write_table = table_writer(path)

    def write(export: TraceExport, file: IO[bytes]) -> None:
        write_table((build_columns(result, *rank_and_spans) for rank_and_spans in export), file)

    return _write_single_file(result, path, ranks, max_bytes, write)


def write_kineto_files(
    result: SimulationResult, path: str | Path, ranks: RankSelection = None, *, max_bytes: Bytes = MAX_FILE_BYTES
) -> int:
    """Write one file for each of some ranks; raises OutputError if the directory contains unrelated files.

    The directory itself is never replaced: it may be the user's working directory, or a mount point.
    """
    require_kineto_directory(path)
    export, folder = _prepare_export(result, path, ranks, max_bytes, _write_first_rank), Path(path)
    targets = [folder / _file_name(rank.rank) for rank in export.ranks]
    with as_output_error(path), contextlib.ExitStack() as cleanup:
        if not folder.exists():
            cleanup.callback(_remove_if_empty, folder)
            folder.mkdir()
        stale_files = {file for file in folder.iterdir() if not is_leftover(file) or is_old_leftover(file)} - {*targets}
        with atomic_files(targets) as files:
            for (rank, spans), name in zip(export, files, strict=True):
                with name.open("wb") as file:
                    write_kineto(result, rank, spans, file)
            for stale in stale_files:
                stale.unlink()
        cleanup.pop_all()
    return len(export.ranks)


def require_kineto_directory(path: str | Path) -> None:
    """Raise OutputError now if Kineto traces could not be written to `path` later; nothing is created."""
    folder = Path(path)
    with as_output_error(path, (OSError, ValueError)):  # no permission; a name that is too long, or contains a NUL
        exists = folder.exists()
        if exists and not folder.is_dir():
            raise OutputError(f"{path}: is a file; name a directory for the traces")
        unrelated = sorted(entry.name for entry in folder.iterdir() if not _is_kineto_export(entry)) if exists else []
    if unrelated:
        raise OutputError(
            f"{path}: holds {unrelated[0]}, which is no trace that clustersim wrote; name an empty or a new directory"
        )
    require_writable(folder / _file_name(0) if exists else folder)


def _write_single_file(
    result: SimulationResult, path: str | Path, ranks: RankSelection, max_bytes: Bytes, write: ExportWriter
) -> int:
    export = _prepare_export(result, path, ranks, max_bytes, write)
    with atomic_file(path) as file:
        write(export, file)
    return len(export.ranks)


def _write_first_rank(export: TraceExport, file: IO[bytes]) -> None:
    rank, spans = next(iter(export))
    write_kineto(export.result, rank, spans, file)


def _prepare_export(
    result: SimulationResult, path: str | Path, ranks: RankSelection, max_bytes: Bytes, write: ExportWriter
) -> TraceExport:
    """Ranks to export; raises OutputError if the estimated size exceeds `max_bytes`.

    The estimate assumes the bytes per span of the first rank's beginning.
    """
    export = TraceExport(result, describe_trace_ranks(result, default_ranks(result) if ranks is None else ranks))
    sample, file = replace(export, ranks=export.ranks[:1], max_tasks=_SAMPLE_TASKS), io.BytesIO()
    write(sample, file)
    (_, sampled), count = next(iter(sample)), len(export.ranks)
    estimated_bytes = file.tell() / max(1, len(sampled)) * count_spans(result, [rank.rank for rank in export.ranks])
    if estimated_bytes > max_bytes:
        raise OutputError(
            f"{path}: all operations on {count:,} rank{'s' if count > 1 else ''} would be about "
            f"{format_bytes(estimated_bytes)}, "
            f"above {format_bytes(max_bytes)}; choose fewer ranks (--ranks 0, --ranks slowest:2), give fewer "
            "microbatches "
            "(training.global_batch) or fewer steps, or write it all the same (--force)"
        )
    return export


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _file_name(rank: int) -> str:
    return f"rank-{rank}.json"


def _is_kineto_export(path: Path) -> bool:
    """Whether a file starts as those written by clustersim do, or is what a killed process left of one."""
    if is_leftover(path):
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_FILE_PREFIX)) == _FILE_PREFIX
