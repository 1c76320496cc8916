"""How are whole steps written for other tools? Ranks, their passes, and the operations inside them.

The size is estimated from a sample of passes before anything is written: a trace of every rank of a large cluster would
fill a disk, and no viewer opens it.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import numpy as np

from clustersim.errors import OutputError
from clustersim.program.task import Compute
from clustersim.report.chrome import write_chrome
from clustersim.report.files import atomic_file
from clustersim.report.perfetto import write_perfetto
from clustersim.report.trace_content import Content, content_of
from clustersim.report.trace_ranks import TraceRank, default_ranks, trace_ranks
from clustersim.units import Bytes, format_bytes

if TYPE_CHECKING:
    from clustersim.answer import Answer

MOST_BYTES: Final = 2**30
MANY_SPANS: Final = 100_000
"""Writing so many takes seconds."""
SAMPLE: Final = 200
"""Passes and messages from which the size of a file is estimated."""
Writer = Callable[[Content, IO[bytes]], None]


def write_trace(
    result: "Answer", path: str | Path, ranks: Sequence[int] | None = None, *, most: Bytes = MOST_BYTES
) -> int:
    """Write Chrome JSON if `path` ends in .json, else Perfetto, of some ranks; return of how many.

    ranks: by default as by `default_ranks`. Raises InputError where the extra for Perfetto is missing, OutputError
    where `path` cannot be written or the trace would be larger than `most` bytes.
    """
    write = write_chrome if Path(path).suffix == ".json" else write_perfetto
    chosen = trace_ranks(result, default_ranks(result) if ranks is None else ranks)
    size = _estimate(result, chosen, write)
    require_size(path, size, len(chosen), most)
    with atomic_file(path) as file:
        write(content_of(result, chosen), file)
    return len(chosen)


def spans_of(result: "Answer", ranks: Sequence[int] | None = None) -> int:
    """How many spans traces of some ranks have: passes, the operations in them, and what is sent and received."""
    sizes = [
        sum(1 + len(task.block.operations) if isinstance(task, Compute) else 1 for task in program.tasks)
        for program in result.program.programs
    ]
    chosen = default_ranks(result) if ranks is None else ranks
    return int(np.array(sizes)[result.program.kind[list(chosen)]].sum())


def require_size(path: str | Path, size: Bytes, ranks: int, most: Bytes) -> None:
    """Raise OutputError where a file, or a directory of them, would have more bytes than `most`."""
    if size > most:
        raise OutputError(
            f"{path}: all operations on {ranks:,} rank{'s' if ranks > 1 else ''} would be about {format_bytes(size)}, "
            f"above {format_bytes(most)}; choose fewer ranks (--ranks 0, --ranks slowest:2), give fewer microbatches "
            "(training.global_batch) or fewer steps, or write it all the same (--force)"
        )


def _estimate(result: "Answer", ranks: tuple[TraceRank, ...], write: Writer) -> Bytes:
    """Bytes of the whole trace, as large for each slice as the beginning of the first rank."""
    content = content_of(result, ranks[:1])
    sample = list(islice(content.pieces, SAMPLE))
    file = io.BytesIO()
    write(replace(content, pieces=sample, counters=()), file)
    sampled = sum(1 + len(piece.inside or ()) for piece in sample)
    return file.tell() / max(1, sampled) * spans_of(result, [rank.rank for rank in ranks])
