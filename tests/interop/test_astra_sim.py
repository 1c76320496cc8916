"""Does ASTRA-sim itself read what is exported, and say of it what its rules make of our numbers?

Run where its analytical backend is: `ASTRA_SIM` names AstraSim_Analytical_Congestion_Unaware, or it is on PATH. The
networks have two dimensions: in one, ASTRA-sim (518bd51) frees what belongs to groups twice when it ends, and may lose
its last lines.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.cli.export_chakra import COMM_GROUPS_FILE, export_step
from clustersim.program.task import CollectiveTask, CollectiveType, CommOp, ComputeTask
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.cli.test_manual import PLAN, ROOT
from tests.interop.execution_traces import COLLECTIVE, COMPUTE, Decoded, decode, played
from tests.interop.test_chakra import ALONE, CASES, EXPERTS, OFFLOADED, ONE_STAGE
from tests.report.small_trace import SMALL, simulated

NAME = "AstraSim_Analytical_Congestion_Unaware"
BINARY = os.environ.get("ASTRA_SIM") or shutil.which(NAME)
pytestmark = pytest.mark.skipif(BINARY is None, reason=f"no ASTRA-sim: ASTRA_SIM names no {NAME}, nor is one on PATH")

NPUS = [2, 4]
GIB = 2**30 / 1e9  # bytes in a nanosecond of what ASTRA-sim's networks call a GB/s
MEMORY = {"memory-type": "PER_NPU_MEMORY_EXPANSION", "remote-mem-latency": 0, "remote-mem-bw": 51}
RINGS = {
    f"{item}-implementation": ["ring"] * 2 for item in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
}
SYSTEM = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "active-chunks-per-dimension": 1,
    "preferred-dataset-splits": 1,
    "collective-optimization": "localBWAware",
    "local-mem-bw": 3350,
    **RINGS,
}
BROADCAST = 5
DATA = (*ALONE, *ONE_STAGE, "layout.tp=1", "layout.dp=8")


@dataclass(frozen=True)
class Said:
    """What ASTRA-sim says of each rank, in nanoseconds, and how many nodes it began."""

    end: dict[int, int]
    computing: dict[int, int]
    begun: dict[int, int]


def exported(folder: Path, *overrides: str) -> list[list[Decoded]]:
    """All ranks' nodes, of the files that `clustersim export chakra` writes."""
    scenario = folder / "scenario.yaml"
    scenario.write_text(yaml.safe_dump(SMALL))
    export_step(scenario, overrides, str(folder / "et"))
    return [decode((folder / "et" / f"trace.{rank}.et").read_bytes())[1] for rank in range(8)]


def ran(folder: Path, bandwidth: float = 50.0, latency: float = 500.0, **system: float) -> Said:
    """What ASTRA-sim says of the exported step on two equal dimensions; system: what differs from SYSTEM (_ for -)."""
    words = {"topology": ["Switch"] * 2, "npus_count": NPUS, "bandwidth": [bandwidth] * 2, "latency": [latency] * 2}
    (folder / "network.yml").write_text(yaml.safe_dump(words))
    (folder / "memory.json").write_text(json.dumps(MEMORY))
    changed = {key.replace("_", "-"): value for key, value in system.items()}
    (folder / "system.json").write_text(json.dumps({**SYSTEM, "trace-enabled": 1, **changed}))
    files = {
        "workload": "et/trace",
        "comm-group": f"et/{COMM_GROUPS_FILE}",
        "system": "system.json",
        "network": "network.yml",
        "remote-memory": "memory.json",
    }
    arguments = [f"--{key}-configuration={folder / name}" for key, name in files.items()]
    done = subprocess.run(
        [str(BINARY), *arguments, f"--logging-folder={folder / 'log'}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    logged = "".join(path.read_text() for path in (folder / "log").glob("log*.log"))
    return Said(
        {int(rank): int(end) for rank, end in re.findall(r"sys\[(\d+)\] finished, (\d+) cycles", done.stdout)},
        {int(rank): int(time) for rank, time in re.findall(r"sys\[(\d+)\], GPU time: (\d+)", done.stdout)},
        Counter(int(rank) for rank in re.findall(r"issue,sys->id=(\d+)", logged)),
    )


@pytest.mark.parametrize("case", [*CASES.values(), EXPERTS, OFFLOADED], ids=[*CASES, "experts", "offloaded"])
def test_all_nodes_are_begun_and_all_ranks_finish(case: tuple[str, ...], tmp_path: Path) -> None:
    nodes = exported(tmp_path, *case)
    said = ran(tmp_path)
    assert said.end.keys() == set(range(8))
    assert said.begun == dict(enumerate(map(len, nodes)))


@pytest.mark.parametrize("case", CASES)
def test_kernels_take_what_they_take_here(case: str, tmp_path: Path) -> None:
    """To the nanosecond; for nothing it takes one."""
    nodes = exported(tmp_path, *CASES[case])
    expected = [sum(max(1, 1000 * decoded.lasting) for decoded in own if decoded.type == COMPUTE) for own in nodes]
    assert ran(tmp_path).computing == dict(enumerate(expected))


@pytest.mark.parametrize("case", CASES)
def test_where_the_network_takes_no_time_only_dependencies_tell(case: str, tmp_path: Path) -> None:
    """So it waits for what we wait for: the step is that of the same nodes, played with exchanges that take nothing."""
    nodes = exported(tmp_path, *CASES[case])
    free = [
        [
            decoded
            if decoded.type == COMPUTE or decoded.attr.get("comm_type") == BROADCAST
            else replace(decoded, lasting=0)
            for decoded in own
        ]
        for own in nodes
    ]
    groups = {int(key): own for key, own in json.loads((tmp_path / "et" / COMM_GROUPS_FILE).read_text()).items()}
    said = ran(tmp_path, bandwidth=1e7, latency=0.0, local_mem_bw=1e9)
    assert max(said.end.values()) == pytest.approx(1e3 * played(free, groups), rel=1e-3)


@pytest.mark.parametrize("overrides", [("layout.data=ddp",), ("layout.data=zero3",)])
def test_replayed_a_step_without_messages_takes_the_same_time(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Within half a microsecond for each exchange, whose durations are whole ones."""
    nodes = exported(tmp_path, *DATA, *overrides)
    exchanges = sum(node.type == COLLECTIVE for node in nodes[0])
    said = ran(tmp_path, replay_only=1)
    expected = 1e9 * simulated(*DATA, *overrides).trace.makespan
    assert max(said.end.values()) == pytest.approx(expected, abs=500 * exchanges + 1000)


@pytest.mark.parametrize("overrides", [(*DATA, "layout.data=zero3"), EXPERTS], ids=["sharded", "experts"])
def test_on_a_slow_network_the_step_is_our_bytes_over_its_bandwidth(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Of n ranks in a ring each sends (n - 1) / n of what is gathered or scattered, twice that of what is all-reduced.

    So it does in two dimensions of 2 and 4, one after the other: 1 / 2 + 1 / 2 x 3 / 4 = 7 / 8. An all-to-all in a ring
    passes all parts on, (n - 1) / 2 of what a rank puts in, in each dimension: 1 / 2 + 3 / 2.
    """
    exported(tmp_path, *overrides)
    result = simulated(*overrides)
    sent = sum(
        exchange.payload * _share(exchange.collective, _members(result, exchange)) for exchange in _exchanges(result)
    )
    said = ran(tmp_path, bandwidth=0.01, latency=0.0, local_mem_bw=1e9)
    assert said.end[0] == pytest.approx(sent / (0.01 * GIB), rel=2e-3)


def _exchanges(result: SimulationResult) -> Iterator[CommOp]:
    """Of the first rank."""
    for task in result.program.programs[int(result.program.program_index[0])].tasks:
        if isinstance(task, ComputeTask):
            yield from task.segment.comm_ops
        elif isinstance(task, CollectiveTask):
            yield task.comm_op


def _members(result: SimulationResult, exchange: CommOp) -> int:
    return int(result.program.groups[exchange.comm_group].members.shape[1])


def _share(collective: CollectiveType, members: int) -> float:
    """What a rank sends of the payload."""
    if collective is CollectiveType.ALL_TO_ALL:
        return {1: 0.0, 8: 2.0}[members]
    return (1 + (collective is CollectiveType.ALL_REDUCE)) * (members - 1) / members


def test_its_roofline_takes_the_larger_one_of_flop_and_bytes(tmp_path: Path) -> None:
    """In whole nanoseconds, of those kernels that have no FLOP, too."""
    nodes = exported(tmp_path)
    said = ran(tmp_path, roofline_enabled=1, peak_perf=1000, local_mem_bw=3000)
    for rank, own in enumerate(nodes):
        kernels = [decoded.attr for decoded in own if decoded.type == COMPUTE]
        expected = sum(max(kernel["num_ops"] / 1e15, kernel["tensor_size"] / 3e12) for kernel in kernels)
        assert 0 <= 1e9 * expected - said.computing[rank] <= len(kernels)


MANUAL = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
LLAMA = {
    **SMALL,
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "training": {"sequence": 4096, "global_batch": 16, "microbatch": 1, "precision": "bf16"},
}
MIXTRAL = {**LLAMA, "model": {"preset": "mixtral-8x22b", "layers": 4}}


def ran_as_the_manual_says(folder: Path, nodes: int) -> int:
    """Cycles that its commands say of `et`, all ranks finished, on so many nodes of 8 GPUs."""
    (commands,) = re.findall(r"```bash\n(.*?)```", MANUAL, re.DOTALL)
    (folder / NAME).symlink_to(Path(str(BINARY)).absolute())
    done = subprocess.run(
        ["bash", "-euc", commands.replace("[ 8, 4 ]", f"[ 8, {nodes} ]")],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ends = dict(re.findall(r"sys\[(\d+)\] finished, (\d+) cycles", done.stdout))
    assert ends.keys() == {str(rank) for rank in range(8 * nodes)}
    return max(map(int, ends.values()))


def test_it_runs_what_the_manual_shows(tmp_path: Path) -> None:
    (command,) = re.findall(r"clustersim (export chakra .*)", MANUAL)
    words = shlex.split(command)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    overrides = [value for flag, value in pairwise(words) if flag == "--set"]
    export_step(tmp_path / "plan.yaml", overrides, str(tmp_path / words[-1]))
    assert ran_as_the_manual_says(tmp_path, nodes=4) > 0


@pytest.mark.parametrize(
    ("plan", "layout", "schedule", "ratio"),
    [
        (LLAMA, {"dp": 16, "data": "ddp"}, "1f1b", 1.0),
        (LLAMA, {"dp": 16, "data": "fsdp"}, "1f1b", 1.0),
        (LLAMA, {"dp": 16, "data": {"hsdp": {"shard": 8}}}, "1f1b", 1.0),
        (LLAMA, {"pp": 4, "dp": 4}, "zb-v", 1.0),
        (LLAMA, {"tp": 8, "pp": 2, "dp": 1}, "1f1b", 1.0),
        (LLAMA, {"tp": 4, "pp": 2, "dp": 2, "data": "zero1"}, "1f1b", 1.0),
        (LLAMA, {"tp": 8, "dp": 2, "data": "zero1"}, "1f1b", 1.05),
        (MIXTRAL, {"dp": 16, "ep": 8, "data": "zero1"}, "1f1b", 1.22),
    ],
)
def test_a_step_differs_as_the_manual_says(
    plan: dict[str, Any], layout: dict[str, Any], schedule: str, ratio: float, tmp_path: Path
) -> None:
    """Network and algorithms are ASTRA-sim's own, so only how near steps are is said."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(yaml.safe_dump({**plan, "layout": layout, "schedule": schedule}))
    export_step(scenario, [], str(tmp_path / "et"))
    expected = 1e9 * simulate(Scenario.load(scenario, [])).trace.makespan
    assert ran_as_the_manual_says(tmp_path, nodes=2) == pytest.approx(ratio * expected, rel=0.02)
