"""How much memory may this process take, and what is said where that is too little?

Limits are those of the shell (`ulimit -v`), of the control group that a container or a batch system sets, and of the
machine. References: getrlimit(2), cgroups(7), proc(5).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Final

from clustersim.common.errors import ClusterSimError
from clustersim.common.units import Bytes, format_bytes

_MIN_ADDRESS_SPACE: Final = 400e6  # bytes: NumPy and pydantic take 250 MB, a small scenario 50 MB
_WARNED_SHARE: Final = 0.4  # of the memory, so that there is time to end the command
_WATCH_SECONDS: Final = 0.5
_CGROUP_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@contextmanager
def as_short_memory() -> Iterator[None]:
    """Raise ClusterSimError where the block runs out of memory."""
    try:
        yield
    except MemoryError:
        limit = _address_space()
        allowed = "this machine has free" if limit is None else f"`ulimit -v` allows ({format_bytes(limit)})"
        error = ClusterSimError(f"memory: more is needed than {allowed}")
        raise error from None


def require_address_space() -> None:
    """Raise ClusterSimError where `ulimit -v` is too small to import anything; libraries would end the process.

    With a limit, linear algebra gets one thread, as each reserves some 40 MB.
    """
    limit = _address_space()
    if limit is None:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if limit < _MIN_ADDRESS_SPACE:
        raise ClusterSimError(
            f"memory: `ulimit -v` allows {format_bytes(limit)}; at least {format_bytes(_MIN_ADDRESS_SPACE)} is needed"
        )


def memory_capacity() -> Bytes | None:
    """Bytes that this process may take: the smallest of all limits and the machine's memory; None: unknown."""
    limits = [_address_space(), _machine_memory(), *map(_cgroup_limit, _CGROUP_LIMITS)]
    return min((limit for limit in limits if limit is not None), default=None)


@contextmanager
def watched_memory(warn: Callable[[str], None]) -> Iterator[None]:
    """Call `warn` with a sentence, once, before the process and its workers have taken half of what they may take."""
    capacity = memory_capacity()
    if capacity is None or _resident_bytes() is None:
        yield
        return
    ended = Event()

    def watch() -> None:
        while not ended.wait(_WATCH_SECONDS):
            taken = _resident_bytes() or 0.0
            if taken > _WARNED_SHARE * capacity:
                warn(
                    f"{format_bytes(taken)} of memory are taken, and soon more than half of the "
                    f"{format_bytes(capacity)} that this process may take; a smaller cluster, fewer steps, fewer "
                    "microbatches or fewer workers take less"
                )
                return

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _resident_bytes() -> Bytes | None:
    """Bytes that this process and its workers have in memory; None where the system does not say."""
    resident = _resident_bytes_of("self")
    children = sum(_resident_bytes_of(child) or 0.0 for child in _child_processes())
    return None if resident is None else resident + children


def _resident_bytes_of(process: str) -> Bytes | None:
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc", process, "statm").read_text(encoding="ascii").split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    return None


def _child_processes() -> Iterator[str]:
    """Ids of the processes that threads of this one have started and that run; none where the system does not say."""
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError, ValueError):  # a thread that has ended meanwhile
            yield from (thread / "children").read_text(encoding="ascii").split()


def _address_space() -> Bytes | None:
    """Bytes that `ulimit -v` allows; None: any number."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else float(soft)


def _machine_memory() -> Bytes | None:
    with suppress(OSError, ValueError, AttributeError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return None


def _cgroup_limit(file: Path) -> Bytes | None:
    with suppress(OSError, ValueError):
        return float(file.read_text(encoding="ascii"))  # "max" is no number
    return None
