"""How is what happened written to files? In one of several formats, unless it would fill a disk.

The size is estimated from a sample before anything is written: a trace of every rank of a large cluster would fill a
disk, and no viewer opens it. Ranks are by default those of `default_ranks`; how many were written is returned.
OutputError is raised where a path cannot be written, or would have more than `most` bytes.

Kineto's traces are a file for each rank, `rank-0.json` and so on, in a directory. Tools take all of its files for one
run, so it must be new, or hold nothing but files that were written here: those of an earlier run are replaced, and its
other ranks' removed. All are written before the first takes its name: where the disk is full, those of the earlier run
stay, and none of two runs are mixed.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

import numpy as np

from clustersim.common.errors import OutputError
from clustersim.common.files import as_output_error, atomic_file, atomic_files, require_writable
from clustersim.common.units import Bytes, format_bytes
from clustersim.report.export.kineto import PRODUCER, write_kineto
from clustersim.report.export.perfetto import require_trace, write_perfetto
from clustersim.report.export.rank_selection import default_ranks, trace_ranks
from clustersim.report.export.span_table import Export
from clustersim.report.export.table import columns_of, require_table
from clustersim.results.simulation_result import SimulationResult

MOST_BYTES: Final = 2**30
MANY_SPANS: Final = 100_000
"""Writing so many takes seconds."""
_SAMPLE: Final = 200
"""Passes and messages from which the size of a file is estimated."""
_BEGINNING: Final = f'{{\n"producer": "{PRODUCER} '.encode()
Ranks = Sequence[int] | None
Writer = Callable[[Export, IO[bytes]], None]


def write_trace(result: SimulationResult, path: str | Path, ranks: Ranks = None, *, most: Bytes = MOST_BYTES) -> int:
    """Write a trace for Perfetto of some ranks; raise InputError as `require_trace` does."""
    require_trace(path)
    return _write(result, path, ranks, most, write_perfetto)


def write_spans(result: SimulationResult, path: str | Path, ranks: Ranks = None, *, most: Bytes = MOST_BYTES) -> int:
    """Write all spans of some ranks in the format that the name ends in; raise InputError as `require_table` does."""
    table = require_table(path)

    def write(export: Export, file: IO[bytes]) -> None:
        table((columns_of(result, *item) for item in export), file)

    return _write(result, path, ranks, most, write)


def write_kineto_files(
    result: SimulationResult, path: str | Path, ranks: Ranks = None, *, most: Bytes = MOST_BYTES
) -> int:
    """Write a file for each of some ranks; raise OutputError where the directory holds something else.

    It stays the same one: it may be where the user is, or where a disk is mounted.
    """
    require_directory(path)
    export, folder = _export(result, path, ranks, most, _first_file), Path(path)
    targets = [folder / _name(rank.rank) for rank in export.ranks]
    with as_output_error(path), contextlib.ExitStack() as undone:
        if not folder.exists():
            folder.mkdir()
            undone.callback(folder.rmdir)
        others = set(folder.iterdir()) - set(targets)
        with atomic_files(targets) as files:
            for (rank, spans), name in zip(export, files, strict=True):
                with name.open("wb") as file:
                    write_kineto(result, rank, spans, file)
            for other in others:
                other.unlink()
        undone.pop_all()
    return len(export.ranks)


def require_directory(path: str | Path) -> None:
    """Raise OutputError now if Kineto's traces could not be written to `path` later; nothing is created."""
    folder = Path(path)
    with as_output_error(path, (OSError, ValueError)):  # no permission; a name that is too long, a NUL
        there = folder.exists()
        if there and not folder.is_dir():
            raise OutputError(f"{path}: is a file; name a directory for the traces")
        foreign = sorted(item.name for item in folder.iterdir() if not _ours(item)) if there else []
    if foreign:
        raise OutputError(
            f"{path}: holds {foreign[0]}, which is no trace that clustersim wrote; name an empty or a new directory"
        )
    require_writable(folder / _name(0) if there else folder)


def spans_of(result: SimulationResult, ranks: Ranks = None) -> int:
    """How many spans traces of some ranks have: passes, the operations in them, and what is sent and received."""
    sizes = [len(program.tasks) + program.operation_offsets[-1] for program in result.program.programs]
    chosen = default_ranks(result) if ranks is None else ranks
    return int(np.array(sizes)[result.program.program_index[list(chosen)]].sum())


def _write(result: SimulationResult, path: str | Path, ranks: Ranks, most: Bytes, write: Writer) -> int:
    export = _export(result, path, ranks, most, write)
    with atomic_file(path) as file:
        write(export, file)
    return len(export.ranks)


def _first_file(export: Export, file: IO[bytes]) -> None:
    rank, spans = next(iter(export))
    write_kineto(export.result, rank, spans, file)


def _export(result: SimulationResult, path: str | Path, ranks: Ranks, most: Bytes, write: Writer) -> Export:
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


def _name(rank: int) -> str:
    return f"rank-{rank}.json"


def _ours(path: Path) -> bool:
    """Whether a file begins as those written here do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING
