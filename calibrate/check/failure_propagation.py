"""Propagation of a failure on one rank to all ranks, outside of collectives.

Otherwise the others would wait until the collective times out, in ten minutes. No collective can notify
them: if one rank is out of memory, the others are inside an all-reduce, which neither gloo nor NCCL's
kernels leave at a thread's request. So every process has a second connection to the rendezvous store
(torchrun's), and a thread that polls it twice a second for a failure. A failing rank announces it there
first; the others see it within a second, the first rank and the one that failed print it, and all processes
exit at once: one that is inside a collective cannot be unwound.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from traceback import print_exception
from typing import Final, TypeVar

from torch._C._distributed_c10d import TCPStore

from calibrate.collectives.process_groups import World
from clustersim.common.errors import InputError

T = TypeVar("T")

EXIT_CODE: Final = 2
POLL_INTERVAL: Final = 0.5  # seconds between polls
_REPORT_TIMEOUT: Final = timedelta(
    seconds=5
)  # for which a failing rank waits until the first one has printed the message
_CONNECT_TIMEOUT: Final = timedelta(seconds=60)


class FailureChannel:
    """Failure messages between ranks through the rendezvous store."""

    def __init__(self, world: World, environment: Mapping[str, str] = os.environ) -> None:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self._world = world
        self._store = TCPStore(host, port, is_master=False, timeout=_CONNECT_TIMEOUT, wait_for_workers=False)
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._failure_key, self._printed_key = f"clustersim/{attempt}/failed", f"clustersim/{attempt}/said"

    def announce(self, text: str) -> str:
        """Announce which rank failed and why; return the first message, if another rank announced one before."""
        return bytes(self._store.compare_set(self._failure_key, "", text)).decode()

    def announced_failure(self) -> str | None:
        """Which rank failed and why; None if no failure was announced."""
        return bytes(self._store.get(self._failure_key)).decode() if self._store.check([self._failure_key]) else None

    def print_once(self, text: str) -> None:
        """Print the message if this is the first rank; other ranks wait until that one has."""
        if self._world.rank == 0:
            _print_error(text)
            self._store.set(self._printed_key, "1")
        else:
            self._store.wait([self._printed_key], _REPORT_TIMEOUT)


def run_on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Run a function that all ranks run; if one fails, all exit, with a clean message if it is a user error."""
    if world.world_size == 1:
        return work()
    done = Event()
    listener = Thread(target=_poll_failures, args=(FailureChannel(world), done), daemon=True)
    listener.start()
    try:
        return work()
    except Exception as error:
        _stop_listener(listener, done)
        _terminate(world, error)
        raise
    finally:
        _stop_listener(listener, done)


def _terminate(world: World, error: Exception) -> None:
    """Announce the failure, unless another rank failed before, and exit."""
    is_user_error = isinstance(error, InputError)
    message = first_message = f"rank {world.rank}: {'' if is_user_error else f'{type(error).__name__}: '}{error}"
    with suppress(RuntimeError):  # the store is gone: nobody can be notified
        channel = FailureChannel(world)
        first_message = channel.announce(message)
        channel.print_once(first_message)
    if first_message == message and not is_user_error:
        print_exception(error)
    elif first_message == message and world.rank:
        _print_error(first_message)
    os._exit(EXIT_CODE)


def _poll_failures(channel: FailureChannel, done: Event) -> None:
    """Poll for a failure of another rank until done; exit this process if there is one."""
    with suppress(RuntimeError):  # the store is gone: the process that hosted it terminates the others
        while not done.wait(POLL_INTERVAL):
            text = channel.announced_failure()
            if text is not None:
                with suppress(RuntimeError):
                    channel.print_once(text)
                os._exit(EXIT_CODE)


def _stop_listener(listener: Thread, done: Event) -> None:
    done.set()
    listener.join()


def _print_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)
