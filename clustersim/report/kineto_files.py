"""Into which directory are Kineto traces written? One file for each rank, `rank-0.json` and so on.

Tools take all files of a directory for one run, so it must be new, or hold nothing but files that were written here:
those of an earlier run are replaced, and its other ranks' removed. All are written before the first takes its name:
where the disk is full, those of the earlier run stay, and none of two runs are mixed.
"""

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clustersim.errors import OutputError
from clustersim.report.files import require_writable
from clustersim.report.kineto import PRODUCER, write_kineto
from clustersim.report.trace import MOST_BYTES, SAMPLE, require_size, spans_of
from clustersim.report.trace_ranks import TraceRank, default_ranks, trace_ranks
from clustersim.units import Bytes

if TYPE_CHECKING:
    from clustersim.answer import Answer

_BEGINNING: Final = f'{{\n"producer": "{PRODUCER} '.encode()


def require_directory(path: str | Path) -> None:
    """Raise OutputError now if traces could not be written to `path` later; nothing is created."""
    folder = Path(path)
    try:
        if not folder.exists():
            require_writable(folder)
            return
        if not folder.is_dir():
            raise OutputError(f"{path}: is a file; name a directory for the traces")
        foreign = sorted(each.name for each in folder.iterdir() if not _ours(each))
    except (OSError, ValueError) as error:  # no permission; a name that is too long, a NUL
        raise OutputError(f"{path}: cannot be written ({getattr(error, 'strerror', error)})") from error
    if foreign:
        raise OutputError(
            f"{path}: holds {foreign[0]}, which is no trace that clustersim wrote; name an empty or a new directory"
        )
    require_writable(folder / _name(0))


def write_kineto_files(
    result: "Answer", path: str | Path, ranks: Sequence[int] | None = None, *, most: Bytes = MOST_BYTES
) -> int:
    """Write a file for each of some ranks, in a directory that is made if it is not there; return how many.

    ranks: by default as by `default_ranks`. Raises OutputError where the directory holds something else, cannot be
    written, or would have more than `most` bytes.
    """
    folder = Path(path)
    require_directory(folder)
    chosen = trace_ranks(result, default_ranks(result) if ranks is None else ranks)
    require_size(folder, _estimate(result, chosen), len(chosen), most)
    try:
        with _replaced(folder, [_name(rank.rank) for rank in chosen]) as partial:
            for rank in chosen:
                with partial[_name(rank.rank)].open("wb") as file:
                    write_kineto(result, rank, file)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error
    return len(chosen)


@contextlib.contextmanager
def _replaced(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Files to write, by the names that they take when the block ends without an error; then all others go.

    The directory stays the same one: it may be where the user is, or where a disk is mounted.
    """
    there = folder.exists()
    folder.mkdir(exist_ok=True)
    before = {each.name for each in folder.iterdir()}
    partial = {name: folder / f".{name}.{os.getpid()}.part" for name in names}
    try:
        yield partial
        for name in before - set(names):
            (folder / name).unlink()
        for name, file in partial.items():
            file.replace(folder / name)
        there = True
    finally:
        for file in partial.values():
            file.unlink(missing_ok=True)
        if not there:
            folder.rmdir()


def _name(rank: int) -> str:
    return f"rank-{rank}.json"


def _ours(path: Path) -> bool:
    """Whether a file begins as those written here do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def _estimate(result: "Answer", ranks: Sequence[TraceRank]) -> Bytes:
    """Bytes of all files, as large for each span as the beginning of the first rank."""
    file = io.BytesIO()
    kernels = write_kineto(result, ranks[0], file, most=SAMPLE)
    return file.tell() / max(1, kernels) * spans_of(result, [rank.rank for rank in ranks])
