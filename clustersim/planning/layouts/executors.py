"""Where does a search run? In this process, in worker processes of this machine, or on a Dask cluster."""

import pickle
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from logging import CRITICAL, getLogger
from typing import Final

from clustersim.common.errors import InputError, format_value
from clustersim.scenario import Scenario

CONNECT_TIMEOUT: Final = "10s"
"""Connection timeout of the Dask scheduler."""
_COMPARED_PACKAGES: Final = ("clustersim", "numpy", "pydantic", "simpy", "networkx", "dask", "distributed")


@dataclass(frozen=True, slots=True)
class PackedScenario:
    """A pickled scenario; each process unpickles it once, so that cached objects are shared within the process."""

    packed: bytes

    @classmethod
    def pack(cls, scenario: Scenario) -> "PackedScenario":
        """Pickle a scenario."""
        return cls(pickle.dumps(scenario))

    def __call__(self) -> Scenario:
        """The unpickled scenario, cached per process."""
        return _unpack(self.packed)


@lru_cache(maxsize=4)
def _unpack(packed: bytes) -> Scenario:
    scenario: Scenario = pickle.loads(packed)
    return scenario


def installed_versions() -> dict[str, str]:
    """Versions of what a search runs on, in the process that is asked."""
    versions = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for package in _COMPARED_PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def require_equal_versions(workers: Mapping[str, object], name: str) -> None:
    """Raise InputError for a worker with other versions than here: it may unpickle or simulate something else."""
    here = installed_versions()
    for worker, there in workers.items():
        if not isinstance(there, Mapping):
            raise InputError(f"executor: worker {worker} of {name} cannot run clustersim ({format_value(str(there))})")
        differing = [
            f"{package} {there.get(package, 'not installed')} instead of {here[package]}"
            for package in here
            if there.get(package) != here[package]
        ]
        if differing:
            raise InputError(f"executor: worker {worker} of {name} has {', '.join(differing)}; install the same there")


LOCAL, DASK = "local", "dask://"


@contextmanager
def open_executor(name: str, workers: int) -> Iterator[tuple[Executor | None, int]]:
    """The executor that an option names, and its number of workers; None and `workers` for this machine's processes.

    Raises InputError for an unknown name, if the scheduler does not respond, and if the cluster ends early.
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
    for logger in ("distributed", "distributed.client"):  # which has its own log level
        getLogger(logger).setLevel(CRITICAL)  # errors are reported here
    try:
        client = distributed.Client(f"tcp://{name.removeprefix(DASK)}", timeout=CONNECT_TIMEOUT)
    except (OSError, ValueError) as error:
        raise InputError(f"executor: no Dask scheduler answers at {name} ({error or type(error).__name__})") from None
    with client:
        require_equal_versions(client.run(installed_versions, on_error="return"), name)
        try:
            yield client.get_executor(pure=False), max(1, sum(client.nthreads().values()))
        except CancelledError:
            raise InputError(f"executor: {name} went away; --resume DIR keeps what is found out until then") from None
        except distributed.KilledWorker as error:
            raise InputError(f"executor: workers of {name} die of the same layout, one after the other") from error
