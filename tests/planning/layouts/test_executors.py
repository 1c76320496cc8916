"""All executors give the same answer; killed workers are survived."""

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
from clustersim.planning.layouts import LayoutSearch, SearchSpace, executors
from clustersim.planning.layouts.executors import open_executor
from clustersim.results.search_result import LayoutResult, SearchResult
from tests.planning.layouts.search_scenarios import search_scenario
from tests.sentences import parts

VARY = {"layout.tp": ["1", "2", "4"], "layout.pp": ["1", "2"], "training.microbatch": ["1", "2"]}


def comparable_report(result: SearchResult) -> dict[str, Any]:
    return {key: value for key, value in result.to_json().items() if key not in ("wall_s", "layouts_per_s")}


def layout_search(**arguments: Any) -> LayoutSearch:
    return LayoutSearch(SearchSpace.restricted_to(search_scenario(), VARY), top=3, sensitivity=False, **arguments)


@pytest.fixture(scope="module")
def sequential() -> dict[str, Any]:
    return comparable_report(layout_search().run())


def test_any_executor_gives_the_same_answer(sequential: dict[str, Any]) -> None:
    with ThreadPoolExecutor(2) as threads:
        assert comparable_report(layout_search(executor=threads, workers=2).run()) == sequential


@pytest.mark.slow
def test_processes_give_the_same_answer(sequential: dict[str, Any]) -> None:
    assert comparable_report(layout_search(workers=2).run()) == sequential
    with ProcessPoolExecutor(2) as processes:
        assert comparable_report(layout_search(executor=processes, workers=2).run()) == sequential


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Two workers in separate processes, with nannies that restart them."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as started:  # type: ignore[no-untyped-call]
        yield started


@pytest.mark.slow
def test_dask_gives_the_same_answer(cluster: LocalCluster, sequential: dict[str, Any]) -> None:
    address = cluster.scheduler_address.removeprefix("tcp://")
    with open_executor(f"dask://{address}", 1) as (executor, workers):
        assert workers == 2
        assert comparable_report(layout_search(executor=executor, workers=workers).run()) == sequential


@pytest.mark.slow
def test_a_search_survives_a_killed_worker(cluster: LocalCluster, sequential: dict[str, Any]) -> None:
    address = cluster.scheduler_address.removeprefix("tcp://")
    left = [next(iter(cluster.workers.values())).pid]

    def kill(activity: str, _done: int, _total: int, _best: LayoutResult | None) -> None:
        if activity.startswith("simulating") and left:
            os.kill(left.pop(), signal.SIGKILL)

    with open_executor(f"dask://{address}", 1) as (executor, workers):
        assert comparable_report(layout_search(executor=executor, workers=workers).run(kill)) == sequential
    assert not left


@pytest.mark.slow
def test_a_lost_cluster_is_reported() -> None:
    """The scheduler is a separate process, which is killed before any layout is simulated."""
    arguments = "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"
    scheduler = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )
    with scheduler:
        assert scheduler.stderr is not None
        address = next(
            match[1] for line in scheduler.stderr if (match := re.search(r"Scheduler at: +tcp://(\S+)", line))
        )
        lost = pytest.raises(InputError, match=rf"executor: dask://{address} went away; --resume DIR keeps")
        with lost, open_executor(f"dask://{address}", 1) as (executor, workers):
            assert executor is not None
            scheduler.kill()
            layout_search(executor=executor, workers=workers).run()


def test_workers_with_other_versions_are_refused_by_name() -> None:
    here = executors.installed_versions()
    executors.require_equal_versions({"tcp://a:1": here, "tcp://b:2": dict(here)}, "dask://host:1")
    older = {**here, "numpy": "1.26.4", "Python": "3.12"}
    sentence = (
        f"executor: worker tcp://b:2 of dask://host:1 has Python 3.12 ... {here['Python']}, "
        f"numpy 1.26.4 ... {here['numpy']}; install"
    )
    with pytest.raises(InputError, match=parts(sentence)):
        executors.require_equal_versions({"tcp://a:1": here, "tcp://b:2": older}, "dask://host:1")
    without = {package: version for package, version in here.items() if package != "simpy"}
    with pytest.raises(InputError, match=r"simpy not installed instead of \d"):
        executors.require_equal_versions({"tcp://b:2": without}, "dask://host:1")


def test_workers_without_clustersim_are_refused_by_name() -> None:
    failed = {"tcp://b:2": ModuleNotFoundError("No module named 'clustersim'")}
    with pytest.raises(
        InputError, match=r"worker tcp://b:2 of dask://host:1 cannot run clustersim \(.*No module named"
    ):
        executors.require_equal_versions(failed, "dask://host:1")


@pytest.mark.slow
def test_dask_workers_with_other_versions_are_refused(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    address = cluster.scheduler_address.removeprefix("tcp://")
    monkeypatch.setattr(executors, "version", lambda _package: "0.1")  # in this process alone
    with pytest.raises(InputError, match=r"numpy [1-9]\S* instead of 0\.1"), open_executor(f"dask://{address}", 1):
        pass


@pytest.mark.slow
def test_an_unreachable_scheduler_is_reported() -> None:
    unreachable = pytest.raises(InputError, match=r"executor: no Dask scheduler answers at dask://127.0.0.1:1 ")
    with unreachable, open_executor("dask://127.0.0.1:1", 1):
        pass
