"""Worker processes of a calculation end with it, in any case."""

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
from clustersim.common.processes import iterate_completed, usable_cpu_count, worker_pool

PARENT_SOURCE = """
import os, time
from clustersim.common.processes import worker_pool
if __name__ == "__main__":
    with worker_pool(2) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
        print("ready", flush=True)
        time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU sets on this system")
def test_cpus_that_a_job_may_not_use_are_not_counted() -> None:
    """Slurm and containers give a job a CPU set, while `os.cpu_count` counts the machine's."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        assert usable_cpu_count() == 1
    finally:
        os.sched_setaffinity(0, usable)


@pytest.mark.slow
def test_workers_exit_when_their_parent_is_killed() -> None:
    """The parent cannot notify them any more; its stdout pipe is closed when the last process that holds it exits."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT_SOURCE], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        readable, _, _ = select([parent.stdout], [], [], 60.0)
        assert readable
        assert parent.stdout.read() == ""


@pytest.mark.slow
def test_a_killed_worker_is_reported() -> None:
    killed = pytest.raises(
        ClusterSimError, match=r"a worker process ended before its work was done.*--workers 1 takes less"
    )
    with killed, worker_pool(2) as pool:
        pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL).result()


def test_pending_tasks_are_cancelled_when_the_iterator_is_closed() -> None:
    """The executor, which belongs to the caller, stays usable."""
    started: list[int] = []
    release = Event()

    def start(task_id: int) -> None:
        started.append(task_id)
        assert task_id == 0 or release.wait(60.0)

    tasks = iter([(task_id, partial(start, task_id)) for task_id in range(9)])
    with ThreadPoolExecutor(1) as threads:
        completed = iterate_completed(threads, 4, lambda: next(tasks, None))
        assert next(completed) == (0, None)
        completed.close()
        release.set()
        assert threads.submit(len, "abc").result() == 3
    assert set(started) <= {0, 1}
