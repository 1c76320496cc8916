"""Steps that a CPU ran: Gloo's collectives have the names of the calls that issued them."""

import json
from pathlib import Path
from typing import Any

import pytest

from clustersim.interop.kineto import read_traces
from clustersim.program.task import CollectiveType
from clustersim.results.profiled_step import collective_durations

MAIN, FIRST, SECOND = range(3)  # threads


def operator(name: str, begin: float, duration: float, dims: Any = (), thread: int = MAIN) -> dict[str, Any]:
    arguments = {"Input Dims": list(dims), "External id": round(begin)}
    return {
        "ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": thread, "ts": begin, "dur": duration,
        "args": arguments,
    }  # fmt: skip


def gloo(begin: float, elements: int, thread: int) -> dict[str, Any]:
    event = operator("gloo:all_reduce", begin, 30.0, [[elements]], thread)
    return event | {"cat": "user_annotation", "args": event["args"] | {"Input type": ["float"]}}


def write_trace(path: Path, events: list[dict[str, Any]], rank: int = 0) -> Path:
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": MAIN, "ts": 0.0, "dur": 1e4}
    info = {"backend": "gloo", "rank": rank, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": [mark, *events]}))
    return path


@pytest.mark.parametrize("is_reduced_first", [False, True])
def test_gloo_runs_reduce_scatters_as_all_reduces(tmp_path: Path, is_reduced_first: bool) -> None:
    """Those of equal sizes in the order of the calls, whichever thread runs them; payloads are those of the inputs."""
    calls = [("c10d::_reduce_scatter_base_", [[50], [100], []]), ("c10d::allreduce_", [[[100]], []])]
    if is_reduced_first:
        calls.reverse()
    events = [operator("aten::mm", 10.0, 50.0, [[8, 8], [8, 8]])]
    events += [operator(name, 100.0 + 10.0 * index, 5.0, dims) for index, (name, dims) in enumerate(calls)]
    events += [operator("c10d::_reduce_scatter_base_", 125.0, 5.0, [[8], [16], []])]
    events += [gloo(160.0, 16, SECOND), gloo(150.0, 100, SECOND), gloo(140.0, 100, FIRST)]
    events += [operator("aten::add", 400.0, 5.0, [[8]])]
    (spans,) = read_traces(write_trace(tmp_path / "trace.json", events), on_host=True).ranks
    found = [collective for collective, _ in collective_durations([spans])]
    reductions = [CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_REDUCE]
    if is_reduced_first:
        reductions.reverse()
    assert [(each.name, each.payload) for each in found] == [
        *((kind.value, 400.0) for kind in reductions), (CollectiveType.REDUCE_SCATTER.value, 64.0),
    ]  # fmt: skip
