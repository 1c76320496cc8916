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

BAD_INPUT: Final = 2
LOOK: Final = 0.5  # seconds between looks
_SAID: Final = timedelta(seconds=5)  # that a failing rank waits until the first one has said it
_CONNECT: Final = timedelta(seconds=60)


class Word:
    """What a rank tells the others outside of collectives."""

    def __init__(self, world: World, environment: Mapping[str, str] = os.environ) -> None:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self._world = world
        self._store = TCPStore(host, port, is_master=False, timeout=_CONNECT, wait_for_workers=False)
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._failed, self._said = f"clustersim/{attempt}/failed", f"clustersim/{attempt}/said"

    def give(self, text: str) -> str:
        """Tell the others which rank failed, and why; return what was said first, if another one failed before."""
        return bytes(self._store.compare_set(self._failed, "", text)).decode()

    def heard(self) -> str | None:
        """Which rank failed, and why; None: none that is known."""
        return bytes(self._store.get(self._failed)).decode() if self._store.check([self._failed]) else None

    def say(self, text: str) -> None:
        """Print it, if this is the first rank; others wait until that one has."""
        if self._world.rank == 0:
            _print(text)
            self._store.set(self._said, "1")
        else:
            self._store.wait([self._said], _SAID)


def together(world: World, work: Callable[[], T]) -> T:
    """Do what ranks do together; where one of them fails, all end: with its sentence, if it is the user's error."""
    if world.ranks == 1:
        return work()
    done = Event()
    listener = Thread(target=_listen, args=(Word(world), done), daemon=True)
    listener.start()
    try:
        return work()
    except Exception as error:
        _stop(listener, done)
        _end(world, error)
        raise
    finally:
        _stop(listener, done)


def _end(world: World, error: Exception) -> None:
    """Tell the others, if another rank has not failed before, and end."""
    expected = isinstance(error, InputError)
    own = said = f"rank {world.rank}: {'' if expected else f'{type(error).__name__}: '}{error}"
    with suppress(RuntimeError):  # the store is gone: nobody can be told
        word = Word(world)
        said = word.give(own)
        word.say(said)
    if said == own and not expected:
        print_exception(error)
    elif said == own and world.rank:
        _print(said)
    os._exit(BAD_INPUT)


def _listen(word: Word, done: Event) -> None:
    """Until all is done, look whether another rank failed; then end this process."""
    with suppress(RuntimeError):  # the store is gone: whoever kept it ends the others
        while not done.wait(LOOK):
            text = word.heard()
            if text is not None:
                with suppress(RuntimeError):
                    word.say(text)
                os._exit(BAD_INPUT)


def _stop(listener: Thread, done: Event) -> None:
    done.set()
    listener.join()


def _print(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)
