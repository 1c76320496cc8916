"""What does `clustersim export chakra` do? Simulate a step, and write it as execution traces, a file for each rank.

ASTRA-sim takes `--workload-configuration=DIR/trace` and `--comm-group-configuration=DIR/comm_groups.json`. The
directory is new or empty, or holds an earlier export, whose files are replaced and whose other ranks' are removed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clustersim.cli.outputs import STDOUT, announce
from clustersim.cli.progress import counting, waiting_for
from clustersim.common.errors import InputError, OutputError
from clustersim.common.files import atomic_file, require_writable, write_text_atomically
from clustersim.common.units import Bytes, format_bytes
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.interop.chakra import ChakraWriter

GROUPS: Final = "comm_groups.json"
MOST_BYTES: Final = 2**30


def export_step(file: Path, overrides: Sequence[str], out: str, *, force: bool = False) -> bool:
    """Simulate and write all ranks; whether the scenario fits in memory. force: whatever the size."""
    if out in ("", STDOUT):
        raise InputError("chakra is a file for each rank: name their directory, such as --out traces")
    scenario, folder = Scenario.load(file, overrides), Path(out)
    before = _require_folder(folder)
    from clustersim.interop.chakra import ChakraWriter
    from clustersim.simulation import simulate

    with waiting_for("simulating"):
        result = simulate(scenario)
    writer = ChakraWriter(result)
    for remark in writer.remarks:
        print(f"note: not said: {remark}", file=sys.stderr)
    if not force:
        _require_size(folder, len(writer.rank(0)) * result.rank_count)
    names = {_name(rank): rank for rank in range(result.rank_count)}
    _write(writer, folder, names)
    for remark in before - names.keys() - {GROUPS}:
        (folder / remark).unlink()
    announce(folder, f" ({result.rank_count:,} ranks, {len(writer.groups):,} groups)")
    return result.fits_in_memory


def _write(writer: "ChakraWriter", folder: Path, names: dict[str, int]) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written ({error.strerror})") from error
    with counting("writing", len(names)) as tell:
        for name, rank in names.items():
            with atomic_file(folder / name) as opened:
                opened.write(writer.rank(rank))
            tell(rank + 1)
    write_text_atomically(folder / GROUPS, json.dumps(writer.groups) + "\n")


def _require_folder(folder: Path) -> set[str]:
    """The names of an earlier export's files; raise OutputError where anything else is there, or nothing can be."""
    if not folder.exists():
        require_writable(folder)
        return set()
    if not folder.is_dir():
        raise OutputError(f"{folder}: is a file; name a directory for the traces")
    names = {path.name for path in folder.iterdir()}
    others = sorted(
        name for name in names if name != GROUPS and not (name.startswith("trace.") and name.endswith(".et"))
    )
    if others:
        raise OutputError(f"{folder}: holds {others[0]}, which is no such trace; name an empty or a new directory")
    require_writable(folder / _name(0))
    return names


def _require_size(folder: Path, size: Bytes) -> None:
    if size > MOST_BYTES:
        raise OutputError(
            f"{folder}: all ranks would be about {format_bytes(size)}, above {format_bytes(MOST_BYTES)}; give fewer "
            "microbatches (training.global_batch) or fewer GPUs, or write it all the same (--force)"
        )


def _name(rank: int) -> str:
    """As ASTRA-sim looks for it: a common beginning, the rank, `et`."""
    return f"trace.{rank}.et"
