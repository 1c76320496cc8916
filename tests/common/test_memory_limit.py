"""Memory: a limit is a sentence, and half of it is said beforehand."""

import subprocess
import sys

import pytest

from clustersim.common import memory_limit
from clustersim.common.errors import ClusterSimError
from clustersim.common.memory_limit import as_short_memory, memory_capacity, watched_memory

HOLDS_100_MB = "held = bytearray(10**8); print(flush=True); input()"


def test_short_memory_is_a_sentence() -> None:
    with pytest.raises(ClusterSimError, match="memory: more is needed than"), as_short_memory():
        raise MemoryError


def test_the_capacity_is_known_here() -> None:
    capacity = memory_capacity()
    assert capacity is not None
    assert 1e8 < capacity < 1e15


@pytest.mark.parametrize(("capacity", "count"), [(1e15, 0), (1.0, 1)])
def test_half_of_the_memory_is_said_once(monkeypatch: pytest.MonkeyPatch, capacity: float, count: int) -> None:
    import time

    said: list[str] = []
    monkeypatch.setattr(memory_limit, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(memory_limit, "memory_capacity", lambda: capacity)
    with watched_memory(said.append):
        deadline = time.monotonic() + (0.1 if count == 0 else 20.0)
        while time.monotonic() < deadline and len(said) < max(count, 1):
            time.sleep(0.005)
    assert len(said) == count


def test_workers_count() -> None:
    """A process that a command has started holds memory of the machine as well."""
    before = memory_limit._resident_bytes()
    assert before is not None
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_100_MB], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        during = memory_limit._resident_bytes()
        worker.communicate(b"\n")
    assert during is not None
    assert during - before > 0.9e8
