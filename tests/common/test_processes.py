"""Processes that do parts of a calculation end with it, however it ends."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from select import select
from threading import Event

import pytest

from clustersim.common.errors import ClusterSimError
from clustersim.common.processes import iterate_completed, worker_pool

PARENT = """
import os, time
from clustersim.common.processes import running
if __name__ == "__main__":
    with running(2) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
        print("ready", flush=True)
        time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_where_their_parent_is_killed() -> None:
    """It cannot tell them any more; whoever has the pipe that it wrote to is gone when that ends."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        ended, _, _ = select([parent.stdout], [], [], 60.0)
        assert ended
        assert parent.stdout.read() == ""


@pytest.mark.slow
def test_a_worker_that_dies_is_said() -> None:
    died = pytest.raises(
        ClusterSimError, match=r"a worker process ended before its work was done.*--workers 1 takes less"
    )
    with died, worker_pool(2) as pool:
        pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL).result()


def test_what_nobody_waits_for_is_called_off() -> None:
    """And the executor, which is somebody's own, goes on."""
    begun: list[int] = []
    first = Event()

    def begin(number: int) -> None:
        begun.append(number)
        assert number == 0 or first.wait(60.0)

    tasks = iter([(number, partial(begin, number)) for number in range(9)])
    with ThreadPoolExecutor(1) as threads:
        done = iterate_completed(threads, 4, lambda: next(tasks, None))
        assert next(done) == (0, None)
        done.close()
        first.set()
        assert threads.submit(len, "abc").result() == 3
    assert set(begun) <= {0, 1}
