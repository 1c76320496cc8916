"""What does a CPU's allocator do with memory between kernels?

glibc returns large blocks to the system when they are freed, and the next kernel gets new ones with a fault
per page: a foreach Adam of 8.7 M parameters takes 47 ms so, and 26 ms in memory that the process already
has. Which of the two happens depends on the rest of the heap, so an isolated kernel and the same kernel in a
step would differ. Training retains its memory (PyTorch's caching allocator on GPUs; jemalloc or tcmalloc on
CPUs, as PyTorch's tuning guide recommends), and so does calibration, both for kernels and for real steps:
no block is mapped separately, all threads allocate in the one heap that shrinks only on request (`trim_heap`).

A profiler keeps its records in holes that freed blocks left, so that the heap grows in every profiled step, by a fault
per page. In pages that it has already (`grow_heap`) a profiled step takes as long as others.

Reference: mallopt(3) and malloc_trim(3). Other C libraries are left as they are.
"""

import ctypes
import platform
from functools import cache
from typing import Final

from clustersim.common.units import Bytes

_MMAP_MAX: Final = -4  # M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX of malloc.h
_TRIM_THRESHOLD: Final = -1
_ARENA_MAX: Final = -8
_MAX_INT: Final = 2**31 - 1  # largest C int


@cache
def retain_freed_memory() -> None:
    """Retain freed memory from now on in this process."""
    library = _glibc()
    if library is not None:
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _MAX_INT)
        library.mallopt(_ARENA_MAX, 1)


def grow_heap(size: Bytes) -> None:
    """Let the heap have at least as many free bytes, in pages that were written; freed memory must be retained."""
    library = _glibc()
    if library is not None:
        library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        block = library.malloc(ctypes.c_size_t(int(size)))
        if block:
            ctypes.memset(block, 0, int(size))
            library.free(block)


def trim_heap() -> None:
    """Return free memory to the system now."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
