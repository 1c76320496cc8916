"""Where do searches run? In this process, in others of this machine, or on an executor that somebody has."""

import pickle
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from logging import CRITICAL, getLogger
from typing import Final

from clustersim.common.errors import InputError
from clustersim.scenario import Scenario

CONNECT_TIMEOUT: Final = "10s"
"""How long a scheduler may take to answer."""


@dataclass(frozen=True, slots=True)
class PackedScenario:
    """A scenario on its way to other processes, each of which reads it once: what it refers to is then shared, too."""

    packed: bytes

    @classmethod
    def pack(cls, scenario: Scenario) -> "PackedScenario":
        """Packed."""
        return cls(pickle.dumps(scenario))

    def __call__(self) -> Scenario:
        """Unpacked."""
        return _unpack(self.packed)


@lru_cache(maxsize=4)
def _unpack(packed: bytes) -> Scenario:
    scenario: Scenario = pickle.loads(packed)
    return scenario


LOCAL, DASK = "local", "dask://"


@contextmanager
def open_executor(name: str, workers: int) -> Iterator[tuple[Executor | None, int]]:
    """The executor that an option names, and how many workers it has: this machine's processes are None and `workers`.

    Raises InputError for another name, where nobody answers, and where the cluster ends before the work.
    """
    if name == LOCAL:
        yield None, workers
        return
    if not name.startswith(DASK):
        raise InputError(f"executor: {name!r} is unknown; {LOCAL} or {DASK}HOST:PORT fits")
    try:
        distributed = import_module("distributed")
    except ImportError:
        raise InputError(f"executor: {name} needs Dask; pip install 'clustersim[dask]'") from None
    for logger in ("distributed", "distributed.client"):  # which has a level of its own
        getLogger(logger).setLevel(CRITICAL)  # what goes wrong is said here
    try:
        client = distributed.Client(f"tcp://{name.removeprefix(DASK)}", timeout=CONNECT_TIMEOUT)
    except (OSError, ValueError) as error:
        raise InputError(f"executor: nobody answers at {name} ({error or type(error).__name__})") from None
    with client:
        try:
            yield client.get_executor(pure=False), max(1, sum(client.nthreads().values()))
        except CancelledError:
            raise InputError(f"executor: {name} went away; --resume DIR keeps what is found out until then") from None
        except distributed.KilledWorker as error:
            raise InputError(f"executor: workers of {name} die of the same layout, one after the other") from error
