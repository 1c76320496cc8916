"""Pages of freed memory stay with the process: whoever allocates as much again has no page fault."""

import platform
import subprocess
import sys
from typing import Final

import pytest

_PAGES: Final = 8 * 1024  # 32 MiB: a heap of another arena holds 64
_FAULTS: Final = f"""
import ctypes, resource, sys, threading
from calibrate.devices.glibc_heap import grow_heap, retain_freed_memory

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def write():
    block = library.malloc(ctypes.c_size_t({_PAGES} * 4096))
    ctypes.memset(block, 1, {_PAGES} * 4096)
    library.free(block)

def faults(in_thread):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if in_thread:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    else:
        write()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

retain_freed_memory()
if sys.argv[1] == "grown":
    grow_heap({_PAGES} * 4096)
else:
    faults(False)
print(faults(False), faults(True))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
@pytest.mark.parametrize("heap", ["grown", "used"])
def test_memory_that_was_freed_or_grown_is_written_without_a_fault_per_page(heap: str) -> None:
    done = subprocess.run([sys.executable, "-c", _FAULTS, heap], text=True, check=True, stdout=subprocess.PIPE)
    in_main, in_thread = map(int, done.stdout.split())
    assert in_main < _PAGES / 100
    assert in_thread < _PAGES / 100  # a thread's own arena would be empty, and unmaps its heaps when they are
