"""What does a CPU's allocator do with memory between kernels?

glibc gives large blocks back to the system when they are freed, and the next kernel gets new ones, page by page with a
fault each: a foreach Adam of 8.7 M parameters takes 47 ms so, and 26 ms in memory that the process has already. Which
of the two it is depends on what else lies on the heap, so a kernel by itself and the same kernel in a step differ.
Training keeps its memory (PyTorch's caching allocator on GPUs; jemalloc or tcmalloc on CPUs, as PyTorch's tuning guide
advises), and so does calibrating, kernels and real steps alike: no block is mapped by itself, and the heap does not
shrink until it is asked to (`trim_heap`).

Reference: mallopt(3) and malloc_trim(3). Other C libraries are left as they are.
"""

import ctypes
import platform
from functools import cache
from typing import Final

_MMAP_MAX: Final = -4  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
_TRIM_THRESHOLD: Final = -1
_MAX_INT: Final = 2**31 - 1  # of a C int


@cache
def retain_freed_memory() -> None:
    """Keep what is freed, from now on and for this process."""
    library = _glibc()
    if library is not None:
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _MAX_INT)


def trim_heap() -> None:
    """Give the system what is free, at once."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
