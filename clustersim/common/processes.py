"""Worker pools: run tasks in this process or in others on this machine."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from threading import Thread
from time import monotonic
from typing import Final, TypeVar

from clustersim.common.errors import ClusterSimError
from clustersim.common.gc_control import infrequent_gc, raise_gc_threshold
from clustersim.common.plugins import code_refusal, forbid_code

K = TypeVar("K")
T = TypeVar("T")
TASKS_PER_WORKER: Final = 2
"""Queued tasks per worker, so that no worker idles."""
_END_SECONDS: Final = 1.0  # that idle workers have to end


def usable_cpu_count() -> int:
    """CPUs that this process may run on: fewer than the machine has in a Slurm job or a container with a CPU set."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def worker_pool(workers: int, executor: Executor | None = None) -> Iterator[Executor]:
    """An executor with `workers` processes, or the given one, which stays open.

    Raises ClusterSimError if a worker process dies before its work is done.
    """
    if executor is not None:
        yield executor
    elif workers == 1:
        with infrequent_gc():
            yield _InlineExecutor()
    else:
        others = {*active_children()}
        pool = _SpawningPool(
            workers, mp_context=get_context("spawn"), initializer=_init_worker, initargs=(code_refusal(),)
        )
        try:
            yield pool
        except BrokenExecutor as error:
            reason = "a worker process ended before its work was done, as where memory is short"
            raise ClusterSimError(f"workers: {reason}; --workers {workers // 2} takes less") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            _end_children([child for child in active_children() if child not in others])


class _SpawningPool(ProcessPoolExecutor):
    """A pool that breaks, and nothing else, where a worker dies while it starts."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Submit a task; the first one starts the workers."""
        try:
            return super().submit(fn, *args, **kwargs)
        except BrokenPipeError as error:  # what a worker is to run is written into a pipe that it reads
            raise BrokenProcessPool("a worker process ended while it started") from error


def _end_children(children: Sequence[BaseProcess]) -> None:
    """Wait for idle workers to end; end those that are still at work, whose results nobody waits for."""
    deadline = monotonic() + _END_SECONDS
    for child in children:
        child.join(max(0.0, deadline - monotonic()))
        if child.is_alive():
            child.terminate()
    for child in children:
        child.join()


def iterate_completed(
    pool: Executor, max_pending: int, next_task: Callable[[], tuple[K, Callable[[], T]] | None]
) -> Iterator[tuple[K, T]]:
    """Yield (key, result) of tasks as they complete; at most `max_pending` are submitted at a time.

    next_task: returns the next task and its key when a worker is free; None while there is none until others
    complete. Tasks still pending when the iterator is closed are cancelled.
    """
    pending: dict[Future[T], K] = {}
    try:
        while True:
            while len(pending) < max_pending and (task := next_task()) is not None:
                pending[pool.submit(task[1])] = task[0]
            if not pending:
                return
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield pending.pop(future), future.result()
    finally:
        for future in pending:
            future.cancel()


class _InlineExecutor(Executor):
    """Executor that runs each task immediately in this process."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Run the task now; return its completed future."""
        future: Future[object] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _init_worker(refusal: str) -> None:
    """Initialize a worker process. refusal: why it may not run scenarios' code, as `plugins.code_refusal`.

    Ctrl-C is handled by the parent, which ends its workers; they also exit when the parent is killed.
    """
    raise_gc_threshold()
    forbid_code(refusal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
