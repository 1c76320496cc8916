"""What does `clustersim export chakra` do? Simulate a step, and write it as execution traces, one file per rank.

ASTRA-sim takes `--workload-configuration=DIR/trace` and `--comm-group-configuration=DIR/comm_groups.json`.
The directory must be new or empty, or hold an earlier export: its files are replaced, and those of ranks
that no longer exist are removed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clustersim.cli.outputs import STDOUT, announce_file
from clustersim.cli.progress import count_progress, show_activity
from clustersim.common.errors import InputError, OutputError
from clustersim.common.files import (
    atomic_file_in,
    is_leftover,
    is_old_leftover,
    require_writable,
)
from clustersim.common.units import Bytes, format_bytes
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.interop.chakra import ChakraWriter

COMM_GROUPS_FILE: Final = "comm_groups.json"
MAX_TOTAL_BYTES: Final = 2**30


def export_step(file: Path, overrides: Sequence[str], out: str, *, force: bool = False) -> bool:
    """Simulate and write all ranks; return whether the scenario fits in memory. force: skip the size limit."""
    if out in ("", STDOUT):
        raise InputError("chakra is a file for each rank: name their directory, such as --out traces")
    scenario, folder = Scenario.load(file, overrides), Path(out)
    old_files = _check_folder(folder)
    from clustersim.interop.chakra import ChakraWriter
    from clustersim.simulation import simulate

    with show_activity("simulating"):
        result = simulate(scenario)
    writer = ChakraWriter(result)
    for remark in writer.approximations:
        print(f"note: not exported: {remark}", file=sys.stderr)
    if not force:
        _check_size(folder, len(writer.encode_rank(0)) * result.rank_count)
    names = {_trace_file_name(rank): rank for rank in range(result.rank_count)}
    _write_traces(writer, folder, names)
    for remark in old_files - names.keys() - {COMM_GROUPS_FILE}:
        (folder / remark).unlink()
    announce_file(folder, f" ({result.rank_count:,} ranks, {len(writer.ranks_by_group_id):,} groups)")
    return result.fits_in_memory


def _write_traces(writer: "ChakraWriter", folder: Path, names: dict[str, int]) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written ({error.strerror})") from error
    with count_progress("writing", len(names)) as report_done:
        for name, rank in names.items():
            with atomic_file_in(folder, name) as trace_file:
                trace_file.write(writer.encode_rank(rank))
            report_done(rank + 1)
    with atomic_file_in(folder, COMM_GROUPS_FILE) as groups_file:
        groups_file.write(f"{json.dumps(writer.ranks_by_group_id)}\n".encode())


def _check_folder(folder: Path) -> set[str]:
    """File names of an earlier export; raise OutputError where the folder holds other files or is not writable."""
    if not folder.exists():
        require_writable(folder)
        return set()
    if not folder.is_dir():
        raise OutputError(f"{folder}: is a file; name a directory for the traces")
    names = {file.name for file in folder.iterdir() if not is_leftover(file) or is_old_leftover(file)}
    unexpected_files = sorted(
        name
        for name in names
        if name != COMM_GROUPS_FILE
        and not (name.startswith("trace.") and name.endswith(".et"))
        and not is_leftover(Path(name))
    )
    if unexpected_files:
        raise OutputError(
            f"{folder}: holds {unexpected_files[0]}, which is no such trace; name an empty or a new directory"
        )
    require_writable(folder / _trace_file_name(0))
    return names


def _check_size(folder: Path, size: Bytes) -> None:
    if size > MAX_TOTAL_BYTES:
        raise OutputError(
            f"{folder}: all ranks would be about {format_bytes(size)}, above {format_bytes(MAX_TOTAL_BYTES)}; give "
            "fewer "
            "microbatches (training.global_batch) or fewer GPUs, or write it all the same (--force)"
        )


def _trace_file_name(rank: int) -> str:
    """The file name that ASTRA-sim expects: a common prefix, the rank, `et`."""
    return f"trace.{rank}.et"
