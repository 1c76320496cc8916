"""ASTRA-sim itself reads the exported traces, and its times follow from our durations and its rules.

Runs where its analytical backend is: `ASTRA_SIM_SECONDS` names AstraSim_Analytical_Congestion_Unaware, or it is on
PATH. The networks have two dimensions: in one, ASTRA-sim (518bd51) double-frees group data at exit, and may
lose its last lines.
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
from tests.cli.test_manual import MANUAL_PLAN, ROOT
from tests.interop.execution_traces import COLLECTIVE, COMPUTE, DecodedNode, decode, replay
from tests.interop.test_chakra import CASES, MOE, OFFLOADED, ONE_STAGE, UNCONTENDED
from tests.report.small_trace import SMALL_MAPPING, simulated

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
DP_ONLY = (*UNCONTENDED, *ONE_STAGE, "layout.tp=1", "layout.dp=8")


@dataclass(frozen=True)
class AstraSimResult:
    """ASTRA-sim's times of each rank, in nanoseconds, and the number of nodes it issued."""

    end: dict[int, int]
    compute_ns: dict[int, int]
    issued_nodes: dict[int, int]


def export_and_decode(folder: Path, *overrides: str) -> list[list[DecodedNode]]:
    """All ranks' nodes, of the files that `clustersim export chakra` writes."""
    scenario = folder / "scenario.yaml"
    scenario.write_text(yaml.safe_dump(SMALL_MAPPING))
    export_step(scenario, overrides, str(folder / "et"))
    return [decode((folder / "et" / f"trace.{rank}.et").read_bytes())[1] for rank in range(8)]


def run_astra_sim(folder: Path, bandwidth: float = 50.0, latency: float = 500.0, **system: float) -> AstraSimResult:
    """ASTRA-sim's result of the exported step on two equal dimensions; system: overrides of SYSTEM (_ for -)."""
    network = {"topology": ["Switch"] * 2, "npus_count": NPUS, "bandwidth": [bandwidth] * 2, "latency": [latency] * 2}
    (folder / "network.yml").write_text(yaml.safe_dump(network))
    (folder / "memory.json").write_text(json.dumps(MEMORY))
    system_changes = {key.replace("_", "-"): value for key, value in system.items()}
    (folder / "system.json").write_text(json.dumps({**SYSTEM, "trace-enabled": 1, **system_changes}))
    files = {
        "workload": "et/trace",
        "comm-group": f"et/{COMM_GROUPS_FILE}",
        "system": "system.json",
        "network": "network.yml",
        "remote-memory": "memory.json",
    }
    arguments = [f"--{key}-configuration={folder / name}" for key, name in files.items()]
    process = subprocess.run(
        [str(BINARY), *arguments, f"--logging-folder={folder / 'log'}"], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    logged = "".join(path.read_text() for path in (folder / "log").glob("log*.log"))
    return AstraSimResult(
        {int(rank): int(end) for rank, end in re.findall(r"sys\[(\d+)\] finished, (\d+) cycles", process.stdout)},
        {int(rank): int(time) for rank, time in re.findall(r"sys\[(\d+)\], GPU time: (\d+)", process.stdout)},
        Counter(int(rank) for rank in re.findall(r"issue,sys->id=(\d+)", logged)),
    )


@pytest.mark.parametrize("case", [*CASES.values(), MOE, OFFLOADED], ids=[*CASES, "experts", "offloaded"])
def test_all_nodes_are_issued_and_all_ranks_finish(case: tuple[str, ...], tmp_path: Path) -> None:
    nodes = export_and_decode(tmp_path, *case)
    result = run_astra_sim(tmp_path)
    assert result.end.keys() == set(range(8))
    assert result.issued_nodes == dict(enumerate(map(len, nodes)))


@pytest.mark.parametrize("case", CASES)
def test_kernel_times_equal_ours(case: str, tmp_path: Path) -> None:
    """To the nanosecond; for nothing it takes one."""
    nodes = export_and_decode(tmp_path, *CASES[case])
    expected = [
        sum(max(1, 1000 * rank_node.duration) for rank_node in rank_nodes if rank_node.type == COMPUTE)
        for rank_nodes in nodes
    ]
    assert run_astra_sim(tmp_path).compute_ns == dict(enumerate(expected))


@pytest.mark.parametrize("case", CASES)
def test_on_an_ideal_network_the_step_is_its_dependencies(case: str, tmp_path: Path) -> None:
    """The step is that of the same nodes, replayed with communication that takes no time."""
    nodes = export_and_decode(tmp_path, *CASES[case])
    without_comm = [
        [
            rank_node
            if rank_node.type == COMPUTE or rank_node.attr.get("comm_type") == BROADCAST
            else replace(rank_node, duration=0)
            for rank_node in rank_nodes
        ]
        for rank_nodes in nodes
    ]
    groups = {
        int(key): rank_nodes for key, rank_nodes in json.loads((tmp_path / "et" / COMM_GROUPS_FILE).read_text()).items()
    }
    result = run_astra_sim(tmp_path, bandwidth=1e7, latency=0.0, local_mem_bw=1e9)
    assert max(result.end.values()) == pytest.approx(1e3 * replay(without_comm, groups), rel=1e-3)


@pytest.mark.parametrize("overrides", [("layout.data=ddp",), ("layout.data=zero3",)])
def test_replayed_a_step_without_messages_takes_the_same_time(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Within half a microsecond for each collective, since durations are integers."""
    nodes = export_and_decode(tmp_path, *DP_ONLY, *overrides)
    collective_count = sum(node.type == COLLECTIVE for node in nodes[0])
    result = run_astra_sim(tmp_path, replay_only=1)
    expected = 1e9 * simulated(*DP_ONLY, *overrides).trace.makespan
    assert max(result.end.values()) == pytest.approx(expected, abs=500 * collective_count + 1000)


@pytest.mark.parametrize("overrides", [(*DP_ONLY, "layout.data=zero3"), MOE], ids=["sharded", "experts"])
def test_on_a_slow_network_the_step_is_our_bytes_over_its_bandwidth(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Of n ranks in a ring each sends (n - 1) / n of what is gathered or scattered, twice that of what is all-reduced.

    So it does in two dimensions of 2 and 4, one after the other: 1 / 2 + 1 / 2 x 3 / 4 = 7 / 8. An all-to-all in a ring
    passes all parts on, (n - 1) / 2 of what a rank puts in, in each dimension: 1 / 2 + 3 / 2.
    """
    export_and_decode(tmp_path, *overrides)
    result = simulated(*overrides)
    sent = sum(
        comm_op.payload * _sent_fraction(comm_op.collective, _group_size(result, comm_op))
        for comm_op in _comm_ops(result)
    )
    astra_result = run_astra_sim(tmp_path, bandwidth=0.01, latency=0.0, local_mem_bw=1e9)
    assert astra_result.end[0] == pytest.approx(sent / (0.01 * GIB), rel=2e-3)


def _comm_ops(result: SimulationResult) -> Iterator[CommOp]:
    """Of the first rank."""
    for task in result.program.programs[int(result.program.program_index[0])].tasks:
        if isinstance(task, ComputeTask):
            yield from task.segment.comm_ops
        elif isinstance(task, CollectiveTask):
            yield task.comm_op


def _group_size(result: SimulationResult, comm_op: CommOp) -> int:
    return int(result.program.groups[comm_op.comm_group].members.shape[1])


def _sent_fraction(collective: CollectiveType, members: int) -> float:
    """Fraction of the payload that a rank sends."""
    if collective is CollectiveType.ALL_TO_ALL:
        return {1: 0.0, 8: 2.0}[members]
    return (1 + (collective is CollectiveType.ALL_REDUCE)) * (members - 1) / members


def test_its_roofline_is_the_maximum_of_flop_and_byte_time(tmp_path: Path) -> None:
    """In whole nanoseconds, of those kernels that have no FLOP, too."""
    nodes = export_and_decode(tmp_path)
    result = run_astra_sim(tmp_path, roofline_enabled=1, peak_perf=1000, local_mem_bw=3000)
    for rank, rank_nodes in enumerate(nodes):
        kernels = [rank_node.attr for rank_node in rank_nodes if rank_node.type == COMPUTE]
        expected = sum(max(kernel["num_ops"] / 1e15, kernel["tensor_size"] / 3e12) for kernel in kernels)
        assert 0 <= 1e9 * expected - result.compute_ns[rank] <= len(kernels)


MANUAL = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
LLAMA = {
    **SMALL_MAPPING,
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "training": {"sequence": 4096, "global_batch": 16, "microbatch": 1, "precision": "bf16"},
}
MIXTRAL = {**LLAMA, "model": {"preset": "mixtral-8x22b", "layers": 4}}


def run_manual_commands(folder: Path, nodes: int) -> int:
    """Makespan in cycles of `et` by the manual's commands on a number of nodes of 8 GPUs, all ranks finished."""
    (commands,) = re.findall(r"```bash\n(.*?)```", MANUAL, re.DOTALL)
    (folder / NAME).symlink_to(Path(str(BINARY)).absolute())
    process = subprocess.run(
        ["bash", "-euc", commands.replace("[ 8, 4 ]", f"[ 8, {nodes} ]")],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    ends = dict(re.findall(r"sys\[(\d+)\] finished, (\d+) cycles", process.stdout))
    assert ends.keys() == {str(rank) for rank in range(8 * nodes)}
    return max(map(int, ends.values()))


def test_it_runs_the_manual_s_example(tmp_path: Path) -> None:
    (command,) = re.findall(r"clustersim (export chakra .*)", MANUAL)
    arguments = shlex.split(command)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(MANUAL_PLAN))
    overrides = [value for flag, value in pairwise(arguments) if flag == "--set"]
    export_step(tmp_path / "plan.yaml", overrides, str(tmp_path / arguments[-1]))
    assert run_manual_commands(tmp_path, nodes=4) > 0


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
def test_step_times_differ_by_the_documented_ratio(
    plan: dict[str, Any], layout: dict[str, Any], schedule: str, ratio: float, tmp_path: Path
) -> None:
    """Network and algorithms are ASTRA-sim's own, so only the ratio of step times is documented."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(yaml.safe_dump({**plan, "layout": layout, "schedule": schedule}))
    export_step(scenario, [], str(tmp_path / "et"))
    expected = 1e9 * simulate(Scenario.load(scenario, [])).trace.makespan
    assert run_manual_commands(tmp_path, nodes=2) == pytest.approx(ratio * expected, rel=0.02)
