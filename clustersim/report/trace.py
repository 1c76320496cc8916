"""How is a whole step written for a trace viewer? Every simulated rank, its passes, and the operations inside them.

Nobody reads a trace of every rank of a large cluster, and it would fill a disk: of more than `MOST_RANKS` those are
written that the page shows. The size is estimated from a sample of passes before anything is written.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import numpy as np

from clustersim.errors import OutputError
from clustersim.program.task import Stream
from clustersim.report.answer_timeline import shown_ranks, shown_rows_of, timeline_of
from clustersim.report.chrome import write_chrome
from clustersim.report.files import atomic_file
from clustersim.report.operations import Operations
from clustersim.report.perfetto import write_perfetto
from clustersim.report.slices import Slice, slices
from clustersim.report.view import Timeline
from clustersim.units import Bytes, format_bytes

if TYPE_CHECKING:
    from clustersim.result import Result

MOST_BYTES: Final = 2**30
MOST_RANKS: Final = 64
MANY_SPANS: Final = 100_000
"""Writing so many takes seconds."""
_SAMPLE: Final = 200  # spans
Writer = Callable[[Timeline, Iterable[Slice], IO[bytes]], None]


def write_trace(result: "Result", path: str | Path) -> int:
    """Write Chrome JSON if `path` ends in .json, else Perfetto; return of how many ranks.

    Raises InputError where the extra for Perfetto is missing, OutputError where `path` cannot be written or the trace
    would be larger than `MOST_BYTES`.
    """
    write = write_chrome if Path(path).suffix == ".json" else write_perfetto
    ranks = _ranks(result)
    size = _estimate(result, ranks, write)
    if size > MOST_BYTES:
        raise OutputError(
            f"{path}: the trace of all operations on {len(ranks):,} simulated ranks would be about "
            f"{format_bytes(size)}, above {format_bytes(MOST_BYTES)}; give fewer microbatches"
            " (training.global_batch) or fewer steps, or simulate one rank of each kind (cost.symmetry: auto)"
        )
    timeline, pieces = _slices(result, ranks)
    with atomic_file(path) as file:
        write(timeline, pieces, file)
    return len(ranks)


def spans_of(result: "Result") -> int:
    """About how many spans `write_trace` writes: blocks, what is in them and what is sent, not what is received."""
    blocks, received = (np.count_nonzero(result.trace.stream == each) for each in (Stream.COMPUTE, Stream.RECEIVE))
    return round((result.spans + blocks - received) * len(_ranks(result)) / result.simulated_ranks)


def _ranks(result: "Result") -> list[int]:
    """The ranks that are written."""
    ranks: list[int] = result.trace.simulated_ranks.tolist()
    return ranks if len(ranks) <= MOST_RANKS else shown_ranks(result)


def _slices(result: "Result", ranks: Sequence[int]) -> tuple[Timeline, Iterable[Slice]]:
    timeline = timeline_of(result, ranks)
    return timeline, slices(timeline, Operations(result, shown_rows_of(result, ranks)))


def _estimate(result: "Result", ranks: Sequence[int], write: Writer) -> Bytes:
    """Bytes of the whole trace, as large for each slice as the beginning of the first rank."""
    timeline, pieces = _slices(result, ranks[:1])
    sample = list(islice(pieces, _SAMPLE))
    file = io.BytesIO()
    write(timeline, sample, file)
    sampled = sum(1 + len(piece.inside) for piece in sample)
    return file.tell() / max(1, sampled) * spans_of(result)
