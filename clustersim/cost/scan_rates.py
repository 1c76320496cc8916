"""What share of the roofline do the kernels of scans reach?

Kernels of linear attention and state spaces are of libraries whose generated (Triton) code reaches less of memory
bandwidth and matmul rate than hand-written kernels do. A share by routine and direction, fitted to published
kernels, stands in `topologies/scans`, one file per library; routines that no file names reach all of it.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from clustersim.common import data_files
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.mapping_reader import MappingReader
from clustersim.model.kernels import MemoryBoundOp, ScanRoutine

ScanKernel = ScanRoutine | MemoryBoundOp


def library_share(routine: ScanKernel, backward: bool) -> float:
    """Share of the roofline that a routine's kernels reach."""
    return _shares().get((routine, backward), 1.0)


@lru_cache(maxsize=1)
def _shares() -> Mapping[tuple[ScanKernel, bool], float]:
    """Shares of all files, by routine and direction."""
    shares: dict[tuple[ScanKernel, bool], float] = {}
    for name in data_files.list_names("scans"):
        path = data_files.find_file("scans", name)
        file = MappingReader(path, data_files.read_mapping(path))
        for key in file.key_names():
            section, routine = file.get_section(key), _routine(path.name, key)
            shares[routine, False] = section.get_fraction("forward")
            shares[routine, True] = section.get_fraction("backward")
    return MappingProxyType(shares)


def _routine(file_name: str, key: str) -> ScanKernel:
    routines: dict[str, ScanKernel] = {
        routine.value: routine
        for routine in (*ScanRoutine, MemoryBoundOp.CAUSAL_CONV1D, MemoryBoundOp.GATED_RMSNORM, MemoryBoundOp.L2NORM)
    }
    if key not in routines:
        raise InputError(f"{file_name}: {key} is no routine; {suggest_nearest(key, routines)}")
    return routines[key]
