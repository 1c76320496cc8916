"""What if one process fails while the others wait for it in a collective?

They would wait until the collective times out, in ten minutes. No collective can tell them: one rank is out of memory,
and the others are inside an all-reduce, which neither gloo nor NCCL's kernels leave because a thread asks them to. So
every process has a second connection to the store by which they found each other (torchrun's), and a thread that looks
there twice a second for a failure. Whoever fails says so there first; then the others know within a second, the first
rank and the one that failed say it, and all of them end at once: a process that is inside a collective cannot be
unwound.
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
POLL_INTERVAL: Final = 0.5  # seconds between looks
_REPORT_TIMEOUT: Final = timedelta(seconds=5)  # that a failing rank waits until the first one has said it
_CONNECT_TIMEOUT: Final = timedelta(seconds=60)


class FailureChannel:
    """What a rank tells the others outside of collectives."""

    def __init__(self, world: World, environment: Mapping[str, str] = os.environ) -> None:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self._world = world
        self._store = TCPStore(host, port, is_master=False, timeout=_CONNECT_TIMEOUT, wait_for_workers=False)
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._failure_key, self._printed_key = f"clustersim/{attempt}/failed", f"clustersim/{attempt}/said"

    def announce(self, text: str) -> str:
        """Tell the others which rank failed, and why; return what was said first, if another one failed before."""
        return bytes(self._store.compare_set(self._failure_key, "", text)).decode()

    def announced_failure(self) -> str | None:
        """Which rank failed, and why; None: none that is known."""
        return bytes(self._store.get(self._failure_key)).decode() if self._store.check([self._failure_key]) else None

    def print_once(self, text: str) -> None:
        """Print it, if this is the first rank; others wait until that one has."""
        if self._world.rank == 0:
            _print_error(text)
            self._store.set(self._printed_key, "1")
        else:
            self._store.wait([self._printed_key], _REPORT_TIMEOUT)


def run_on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Do what ranks do together; where one of them fails, all end: with its sentence, if it is the user's error."""
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
    """Tell the others, if another rank has not failed before, and end."""
    is_user_error = isinstance(error, InputError)
    message = first_message = f"rank {world.rank}: {'' if is_user_error else f'{type(error).__name__}: '}{error}"
    with suppress(RuntimeError):  # the store is gone: nobody can be told
        channel = FailureChannel(world)
        first_message = channel.announce(message)
        channel.print_once(first_message)
    if first_message == message and not is_user_error:
        print_exception(error)
    elif first_message == message and world.rank:
        _print_error(first_message)
    os._exit(EXIT_CODE)


def _poll_failures(channel: FailureChannel, done: Event) -> None:
    """Until all is done, look whether another rank failed; then end this process."""
    with suppress(RuntimeError):  # the store is gone: whoever kept it ends the others
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
