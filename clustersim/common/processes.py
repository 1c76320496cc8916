"""Where does work run that has many parts? In this process, or in others of this machine."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Final, TypeVar

from clustersim.common.errors import ClusterSimError
from clustersim.common.gc_control import infrequent_gc, raise_gc_threshold

K = TypeVar("K")
T = TypeVar("T")
TASKS_PER_WORKER: Final = 2
"""Tasks for each worker, so that none waits."""


@contextmanager
def worker_pool(workers: int, executor: Executor | None = None) -> Iterator[Executor]:
    """An executor of so many processes, or the given one, which stays open.

    Raises ClusterSimError where one of the processes ended before its work was done.
    """
    if executor is not None:
        yield executor
    elif workers == 1:
        with infrequent_gc():
            yield _InlineExecutor()
    else:
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_init_worker)
        try:
            yield pool
        except BrokenExecutor as error:
            reason = "a worker process ended before its work was done, as where memory is short"
            raise ClusterSimError(f"workers: {reason}; --workers {workers // 2} takes less") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def iterate_completed(
    pool: Executor, max_pending: int, next_task: Callable[[], tuple[K, Callable[[], T]] | None]
) -> Iterator[tuple[K, T]]:
    """What tasks make of it, with their keys, as they are done; `most` of them are under way at a time.

    take: the next task, asked for when a worker is free for it; None where there is none until others have ended.
    Those that nobody waits for any more are called off, as far as they have not begun.
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
    """Runs what it is given at once, in this process."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Run it now."""
        future: Future[object] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _init_worker() -> None:
    """Begin a process of many tasks.

    Ctrl-C is for the process that was asked; it ends the others, which end with it where it is killed.
    """
    raise_gc_threshold()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
