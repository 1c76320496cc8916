"""Into which directory are Kineto traces written? One file for each rank, `rank-0.json` and so on.

Tools take all files of a directory for one run, so it must be new, or hold nothing but files that were written here:
those of an earlier run are replaced, and its other ranks' removed. All are written before the first takes its name:
where the disk is full, those of the earlier run stay, and none of two runs are mixed.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from clustersim.errors import OutputError
from clustersim.report.export.kineto import PRODUCER
from clustersim.report.files import require_writable

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


@contextlib.contextmanager
def rank_files(folder: Path, ranks: Sequence[int]) -> Iterator[dict[int, Path]]:
    """Files to write, by ranks, that take their names when the block ends without an error; then all others go.

    The directory stays the same one: it may be where the user is, or where a disk is mounted. Raises OutputError where
    it cannot be written.
    """
    partial = {rank: folder / f".{_name(rank)}.{os.getpid()}.part" for rank in ranks}
    try:
        there = folder.exists()
        folder.mkdir(exist_ok=True)
        before = {each.name for each in folder.iterdir()}
        try:
            yield partial
            for name in before - {_name(rank) for rank in ranks}:
                (folder / name).unlink()
            for rank, file in partial.items():
                file.replace(folder / _name(rank))
            there = True
        finally:
            for file in partial.values():
                file.unlink(missing_ok=True)
            if not there:
                folder.rmdir()
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written ({error.strerror or error})") from error


def _name(rank: int) -> str:
    return f"rank-{rank}.json"


def _ours(path: Path) -> bool:
    """Whether a file begins as those written here do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING
