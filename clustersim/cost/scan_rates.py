"""What share of the roofline do the kernels of scans and of sparse attention reach?

Kernels of linear attention, state spaces and sparse attention are of libraries whose generated (Triton, TileLang) code
reaches less of memory bandwidth and matmul rate than hand-written kernels do. A share by routine and direction, fitted
to published kernels, stands in `topologies/scans`, one file per library; an accelerator's own file has those that are
known to be others there. Routines that no file names reach all of it. Matrix factorizations are given in the same way.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from clustersim.common import data_files
from clustersim.common.mapping_reader import MappingReader
from clustersim.hardware.efficiency import ScanShare
from clustersim.hardware.efficiency_reader import read_scan_shares


def library_share(routine: str) -> ScanShare | None:
    """Share of the roofline that a routine's kernels reach; None: no library that is known has it."""
    return _shares().get(routine)


@lru_cache(maxsize=1)
def _shares() -> Mapping[str, ScanShare]:
    """Shares of all files by routine."""
    paths = [data_files.find_file("scans", name) for name in data_files.list_names("scans")]
    files = [read_scan_shares(MappingReader(path, data_files.read_mapping(path))) for path in paths]
    return MappingProxyType({routine: share for file in files for routine, share in file.items()})
