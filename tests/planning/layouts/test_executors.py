"""Wherever layouts are simulated, the answer is the same; workers that die are survived."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest
from distributed import LocalCluster

from clustersim.common.errors import InputError
from clustersim.planning.layouts import LayoutSearch, SearchSpace
from clustersim.planning.layouts.executors import open_executor
from clustersim.results.search_result import LayoutResult, SearchResult
from tests.planning.layouts.search_scenarios import job

VARY = {"layout.tp": ["1", "2", "4"], "layout.pp": ["1", "2"], "training.microbatch": ["1", "2"]}


def answer(found: SearchResult) -> dict[str, Any]:
    return {key: value for key, value in found.to_json().items() if key not in ("wall_s", "layouts_per_s")}


def search(**how: Any) -> LayoutSearch:
    return LayoutSearch(SearchSpace.restricted_to(job(), VARY), top=3, sensitivity=False, **how)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return answer(search().run())


def test_any_executor_will_do(alone: dict[str, Any]) -> None:
    with ThreadPoolExecutor(2) as threads:
        assert answer(search(executor=threads, workers=2).run()) == alone


@pytest.mark.slow
def test_processes_give_the_same_answer(alone: dict[str, Any]) -> None:
    assert answer(search(workers=2).run()) == alone
    with ProcessPoolExecutor(2) as processes:
        assert answer(search(executor=processes, workers=2).run()) == alone


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Two workers in processes of their own, with nannies that restart them."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as started:  # type: ignore[no-untyped-call]
        yield started


@pytest.mark.slow
def test_dask_gives_the_same_answer(cluster: LocalCluster, alone: dict[str, Any]) -> None:
    address = cluster.scheduler_address.removeprefix("tcp://")
    with open_executor(f"dask://{address}", 1) as (executor, workers):
        assert workers == 2
        assert answer(search(executor=executor, workers=workers).run()) == alone


@pytest.mark.slow
def test_a_worker_that_dies_is_survived(cluster: LocalCluster, alone: dict[str, Any]) -> None:
    address = cluster.scheduler_address.removeprefix("tcp://")
    left = [next(iter(cluster.workers.values())).pid]

    def kill(what: str, _done: int, _of: int, _best: LayoutResult | None) -> None:
        if what.startswith("simulating") and left:
            os.kill(left.pop(), signal.SIGKILL)

    with open_executor(f"dask://{address}", 1) as (executor, workers):
        assert answer(search(executor=executor, workers=workers).run(kill)) == alone
    assert not left


@pytest.mark.slow
def test_a_cluster_that_goes_away_is_said() -> None:
    """The scheduler is a process of its own, which is killed before it has done any."""
    started = "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"
    scheduler = subprocess.Popen(
        [sys.executable, "-m", *started],
        stderr=subprocess.PIPE,
        text=True,
    )
    with scheduler:
        assert scheduler.stderr is not None
        address = next(
            found[1] for line in scheduler.stderr if (found := re.search(r"Scheduler at: +tcp://(\S+)", line))
        )
        gone = pytest.raises(InputError, match=rf"executor: dask://{address} went away; --resume DIR keeps")
        with gone, open_executor(f"dask://{address}", 1) as (executor, workers):
            assert executor is not None
            scheduler.kill()
            search(executor=executor, workers=workers).run()


@pytest.mark.slow
def test_where_nobody_answers_is_said() -> None:
    nobody = pytest.raises(InputError, match=r"executor: nobody answers at dask://127.0.0.1:1 ")
    with nobody, open_executor("dask://127.0.0.1:1", 1):
        pass
