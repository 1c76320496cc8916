"""Real collectives between real processes: correct, equal on all ranks, written as they are measured."""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from calibrate.collectives.command import MEASURED_COLLECTIVES, add_arguments, grid_calls, with_dtypes
from calibrate.collectives.interference import INTERFERING_COLLECTIVES, heaviest_kernels, largest_calls
from calibrate.collectives.operations import GroupMember
from calibrate.collectives.process_groups import (
    World,
    collective_library,
    local_device,
    select_backend,
    world_from_torchrun,
)
from calibrate.collectives.process_groups import torchrun_command as torchrun_words
from calibrate.collectives.scenario_calls import distinct_comm_calls
from calibrate.collectives.timing import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    CollectiveIteration,
    DeviceIterationTimer,
    HostIterationTimer,
    time_collective,
)
from calibrate.command import main
from calibrate.fit.alpha_beta import fit_collectives
from calibrate.imbalanced_shares import VARIATIONS, lognormal_shares
from clustersim.build import distinct_kernels
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CollectiveCall, FitResidual, KernelFit, signature_of
from clustersim.cost.interference import KernelClass, kernel_class_of
from clustersim.cost.record_file import read_record, write_record
from clustersim.hardware.accelerator import load_accelerator
from clustersim.program.task import CollectiveType
from clustersim.scenario import Scenario
from tests.sentences import parts

ROOT = Path(__file__).parents[2]
SCENARIO_YAML = """
model: {preset: gpt-tiny, vocab: 50432}
cluster: {name: laptop, gpus: 2}
layout: {tp: 2}
training: {sequence: 128, global_batch: 2, microbatch: 1, precision: fp32}
"""


def free_port() -> str:
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        return str(free_socket.getsockname()[1])


def run_two_ranks(*arguments: str | Path) -> list[subprocess.CompletedProcess[str]]:
    """Run a calibrate command in two processes, started as by torchrun; killed after two minutes."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "calibrate", *(str(argument) for argument in arguments)]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **rendezvous, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(command, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Results of four processes, as two nodes of two (see gloo_world)."""
    output = tmp_path_factory.mktemp("world") / "seen.json"
    process = subprocess.run(
        [sys.executable, "-m", "tests.calibrate.gloo_world", str(output), free_port()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    content: Mapping[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return content


@pytest.mark.slow
def test_every_collective_is_correct_and_timed_within_and_across_nodes(results: Mapping[str, Any]) -> None:
    assert results["nodes"] == 2
    timed = {(name, ranks, nodes) for name, ranks, nodes, _ in results["all"]}
    assert timed == {
        *((collective.value, 2, 1) for collective in CollectiveType if not collective.is_token_routing),
        *(
            (collective.value, 4, 2)
            for collective in CollectiveType
            if not (collective.is_token_routing or collective is CollectiveType.SEND_RECV)
        ),
    }
    assert all(1e-6 < seconds < 60.0 for *_, seconds in results["all"])


@pytest.mark.slow
def test_imbalanced_all_to_alls_are_correct_and_timed(results: Mapping[str, Any]) -> None:
    """Every result is checked before it is timed, also where one rank receives everything."""
    assert [tuple(row[:3]) for row in results["imbalanced"]] == [("all_to_all", 4, 2)] * 2


@pytest.mark.slow
def test_expert_parallel_gradients_equal_those_of_one_rank(results: Mapping[str, Any]) -> None:
    """Gradients of every weight, summed over ranks where replicated, and their norm.

    FP32, in another summation order.
    """
    assert len(results["experts"]) == 13
    assert {name: error for name, error in results["experts"].items() if error > 1e-4} == {}


@pytest.mark.slow
def test_ranks_without_a_group_only_synchronize(results: Mapping[str, Any]) -> None:
    """Groups of three do not fit nodes of two, so only pairs across nodes remain."""
    assert [tuple(row[:3]) for row in results["idle"]] == [("all_reduce", 2, 2)]


@pytest.mark.slow
def test_unmeasurable_calls_are_skipped_with_a_reason(results: Mapping[str, Any]) -> None:
    assert [reason.partition(";")[0] for reason in results["skipped"]] == [
        "1.776 PiB of memory a process",
        "8 ranks on 1 node do not fit the 4 processes on 2 nodes",
        "send_recv has 2 ranks, not 4",
        "the time budget was spent",
        "1.776 PiB of memory for each process could not be had",
    ]


@pytest.mark.slow
def test_overlapped_kernels_and_collectives_are_equal_on_all_ranks(results: Mapping[str, Any]) -> None:
    """The kernel that no CPU supports, and the group that does not fit, are skipped on all ranks."""
    samples = [entry for entry in results["overlapped"] if not isinstance(entry, str)]
    assert [kind for kind, _, _ in samples] == ["all_gather", "send_recv"]
    assert all(
        0.0 <= kernel_slowdown <= 99.0 + 1e-9 and not comm_slowdown for _, kernel_slowdown, comm_slowdown in samples
    )
    *unsupported, too_many = (entry for entry in results["overlapped"] if isinstance(entry, str))
    assert len(unsupported) == 2
    assert all(parts("overlapped.matmul ... in isolation (unsupported)").search(entry) for entry in unsupported)
    assert parts("8 ranks on 1 node ... 4 processes on 2 nodes").fullmatch(too_many)


@pytest.mark.slow
def test_low_precision_reductions_are_exact(results: Mapping[str, Any]) -> None:
    assert [row[0] for row in results["narrow"]] == [
        collective.value for collective in CollectiveType if collective.is_reduction
    ]


@pytest.mark.slow
def test_one_rank_out_of_memory_skips_the_call_on_all_ranks(results: Mapping[str, Any]) -> None:
    """Whether it lacks memory for the check, the expected result, or the buffers; later calls are measured."""
    assert results["short"] == [["8 KiB of memory for each process could not be had"]] * 3
    assert len(results["wrong"]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 7, 64, 300])
def test_reduction_patterns_sum_exactly_in_all_formats(dtype: torch.dtype, size: int) -> None:
    """So that results are compared bit by bit, in any order of summation."""
    members = [GroupMember(None, tuple(range(size)), rank, torch.device("cpu"), dtype) for rank in range(size)]
    contributions = torch.stack([member.test_pattern(member.index, 600) for member in members])
    assert contributions.dtype is dtype
    exact = contributions.double().sum(0)
    assert torch.equal(members[0].expected_sum(600).double(), exact)
    assert exact.max() > 0
    assert not torch.equal(contributions[0], contributions[1]), "tells whose it is"


def test_reductions_are_measured_per_format_and_other_collectives_once() -> None:
    calls = grid_calls(World(0, 2, 2), (1024.0,), (DType.FP32, DType.BF16))
    for collective in MEASURED_COLLECTIVES:
        formats = [call.dtype for call in calls if call.collective is collective]
        assert formats == ([DType.FP32, DType.BF16] if collective.is_reduction else [DType.FP32])
    assert with_dtypes(calls, (DType.BF16,)) == tuple(
        call for call in calls if not call.collective.is_reduction or call.dtype is DType.BF16
    )


def test_scenario_reductions_have_the_scenario_formats(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(SCENARIO_YAML.replace("precision: fp32", "precision: bf16"), encoding="utf-8")
    calls = {(call.collective, call.dtype) for call in distinct_comm_calls(Scenario.load(path))}
    assert (CollectiveType.ALL_REDUCE, DType.BF16) in calls
    assert all(dtype is DType.FP32 for collective, dtype in calls if not collective.is_reduction)


def test_recorded_command_contains_the_torchrun_arguments() -> None:
    """As set in torchrun's environment; a single node needs no further arguments."""
    environment = {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "h100-001", "MASTER_PORT": "29500"}
    assert torchrun_words(World(0, 8, 8), environment) == ("torchrun", "--nproc-per-node", "8")
    expected = "torchrun --nproc-per-node 8 --nnodes 2 --node-rank 0 --master-addr h100-001 --master-port 29500"
    assert " ".join(torchrun_words(World(0, 16, 8), environment)) == expected
    assert " ".join(torchrun_words(World(8, 16, 8), {})) == "torchrun --nproc-per-node 8 --nnodes 2 --node-rank 1"


@pytest.mark.slow
def test_wrong_result_is_an_error_that_names_the_collective(results: Mapping[str, Any]) -> None:
    """Only the fourth rank's result is wrong; all ranks raise the error."""
    assert results["wrong"] == [
        "all_reduce of 2 ranks on 1 node gave a wrong result",
        "all_to_all of 2 ranks on 1 node gave a wrong result",
    ]


@pytest.mark.slow
@pytest.mark.real_time
def test_collectives_command_measures_writes_and_resumes(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    first, _ = run_two_ranks("collectives", "--sizes", "1 KiB,256KiB,4 MiB", "--budget", "4 s", "-o", output)
    assert first.returncode == 0, first.stderr
    record = read_record(output)
    grid = {
        CollectiveCall(collective, size, 2, 1)
        for collective in MEASURED_COLLECTIVES
        for size in (2.0**10, 2.0**18, 2.0**22)
    }
    largest = CollectiveCall(CollectiveType.ALL_TO_ALL, 2.0**22, 2, 1)
    grid |= {replace(largest, shares=lognormal_shares(2, variation)) for variation in VARIATIONS}
    skipped = re.search(
        r"(\d+) not measured: the time budget was spent", first.stdout
    )  # calls that a loaded machine had no time for
    assert {row.call for row in record.collectives} <= grid
    assert len(record.collectives) + int(skipped[1] if skipped else 0) == len(grid)
    assert record.collective_fits == fit_collectives(record.collectives)
    assert (record.device.collectives, record.device.accelerator, record.device.threads) == ("gloo", "cpu-laptop", 1)
    pairs = [(kind.value, kernel) for kind in INTERFERING_COLLECTIVES for kernel in KernelClass]
    assert f"/{len(grid) + len(pairs)}, " in first.stderr  # the progress bar's total
    assert [
        (interference_sample.overlapped_with, kernel_class_of(interference_sample.kernel.kind))
        for interference_sample in record.interference
    ] == pairs
    assert {item.call.payload for item in record.interference if item.call} == {2.0**22}, (
        "none larger than was asked for"
    )
    assert "overlapped  " in first.stdout

    partial = replace(record, collectives=record.collectives[:-1], kernel_fit=_kernel_fit(), collective_fits=())
    write_record(partial, output)
    path = tmp_path / "plan.yaml"
    path.write_text(SCENARIO_YAML, encoding="utf-8")
    second, _ = run_two_ranks("collectives", "--for", path, "--budget", "60 s", "-o", output)
    assert second.returncode == 0, second.stderr
    after = read_record(output)
    expected_calls = {call for call in distinct_comm_calls(Scenario.load(path)) if call.ranks == 2}
    assert {row.call for row in after.collectives} == expected_calls | {row.call for row in partial.collectives}
    assert after.collectives[: len(partial.collectives)] == partial.collectives
    assert after.kernel_fit == partial.kernel_fit
    new_interference = after.interference[len(record.interference) :]
    assert after.interference[: len(record.interference)] == record.interference, "measured once"
    heaviest = heaviest_kernels(distinct_kernels(Scenario.load(path)))
    assert {(element.call, element.kernel.signature) for element in new_interference} == {
        (call, signature_of(kernel)) for call in largest_calls(expected_calls) for kernel in heaviest
    }
    assert after.collective_fits == fit_collectives(after.collectives)


def _kernel_fit() -> KernelFit:
    accelerator = load_accelerator("cpu-laptop")
    return KernelFit(
        dict(accelerator.peak), 1e10, 1, accelerator.efficiency, {}, {"matmul fp32": FitResidual(1, 0.0, 0.0)}
    )


@pytest.mark.slow
def test_record_of_another_device_ends_all_processes_with_one_error(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    text = '{"device": {"accelerator": "mi300x", "name": "AMD Instinct MI300X"}, "version": 3, '
    text += '"conditions": {"date": "2026-11-01", "command": "", "method": ""}}'
    output.write_text(text, encoding="utf-8")
    first, second = run_two_ranks("collectives", "--sizes", "1 KiB", "-o", output)
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.endswith("cannot be merged; keep a record for each of them\n")
    assert "error: " not in second.stderr
    assert output.read_text(encoding="utf-8") == text


def test_without_torchrun_the_command_prints_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["collectives"]) == 2
    assert "torchrun --nproc-per-node 2 -m calibrate collectives" in capsys.readouterr().err


def test_a_single_process_is_refused() -> None:
    with pytest.raises(InputError, match="torchrun started 1; start two or more"):
        world_from_torchrun({"RANK": "0", "WORLD_SIZE": "1"}, command="collectives")


def test_unequal_processes_per_node_are_refused() -> None:
    with pytest.raises(InputError, match="6 processes with 4 on this node"):
        world_from_torchrun({"RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}, command="collectives")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sizes", "1 KiB,2"), "--sizes: '2' is not a size"),
        (("--sizes", "0 B"), "--sizes: '0 B' is not above zero"),
        (("--largest", "512 B"), "--largest: '512 B' is below 1 KiB"),
        (("--dtype", "fp32,bf61"), "--dtype: ... 'bf61' ... bf16"),
        (("--budget", "soon"), "--budget: 'soon' is not a time"),
    ],
)
def test_invalid_options_are_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["collectives", *arguments]) == 2
    assert parts(sentence).search(capsys.readouterr().err)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as exit_info:  # the other ranks exit without repeating the message
        main(["collectives", *arguments])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == ""


def test_torchrun_passes_all_options_to_the_script() -> None:
    """Torchrun also parses the script's arguments, and refuses ambiguous prefixes of its own options."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = ["calibrate", "collectives", *(name for action in parser._actions for name in action.option_strings)]
    assert get_args_parser().parse_args(["-m", *arguments]).training_script_args == arguments[1:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_nccl_without_a_gpu_is_refused() -> None:
    assert select_backend(None) == "gloo"
    with pytest.raises(InputError):
        local_device("nccl", World(0, 2, 2), {})


def test_nccl_needs_one_gpu_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(InputError, match="4 processes on a node with 2 GPUs"):
        local_device("nccl", World(0, 4, 4), {})


def test_library_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert collective_library(torch.device("cuda", 0)) == "nccl 2.27.5"
    assert collective_library(torch.device("cpu")) == "gloo"


def test_groups_are_adjacent_ranks_with_equal_counts_per_node() -> None:
    """Two nodes of four: ranks 0 to 3 and 4 to 7."""
    world = World(0, 8, 4)
    assert world.disjoint_groups(2, 1) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert world.disjoint_groups(2, 2) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert world.disjoint_groups(4, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert world.disjoint_groups(8, 2) == (tuple(range(8)),)
    assert world.disjoint_groups(3, 1) == ((0, 1, 2), (4, 5, 6))  # one rank of each node is unused
    assert (
        world.disjoint_groups(3, 2)
        == world.disjoint_groups(8, 1)
        == world.disjoint_groups(1, 1)
        == world.disjoint_groups(16, 4)
        == ()
    )


@pytest.mark.parametrize("world", [World(0, 8, 8), World(0, 16, 4), World(0, 6, 6), World(0, 12, 4)])
def test_every_group_layout_covers_all_ranks_once(world: World) -> None:
    assert (world.world_size, world.node_count) in world.group_shapes()
    for ranks, nodes in world.group_shapes():
        groups = world.disjoint_groups(ranks, nodes)
        assert sorted(rank for group in groups for rank in group) == list(range(world.world_size))
        assert all(len(group) == ranks for group in groups)
        assert all(len({rank // world.ranks_per_node for rank in group}) == nodes for group in groups)


def test_call_grid_has_pairs_for_send_recv_and_one_element_per_rank() -> None:
    calls = grid_calls(World(0, 6, 3), (16.0, 1024.0))
    assert {(call.ranks, call.nodes) for call in calls if call.collective is CollectiveType.SEND_RECV} == {
        (2, 1),
        (2, 2),
    }
    reduces = {(call.payload, call.ranks, call.nodes) for call in calls if call.collective is CollectiveType.ALL_REDUCE}
    assert reduces == {
        *((1024.0, *shape) for shape in ((2, 2), (3, 1), (6, 2))),
        *((16.0, *shape) for shape in ((2, 2), (3, 1))),
    }
    assert len(set(calls)) == len(calls)


def test_payload_is_rounded_up_to_full_elements_per_rank() -> None:
    member = GroupMember(None, (0, 1, 2), 0, torch.device("cpu"))
    assert member.shard_numel(24.0) == 2
    assert member.shard_numel(25.0) == 3
    assert member.shard_numel(1.0) == 1


def test_iteration_is_timed_between_its_start_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The barrier before it, and the preparation, are not timed."""
    ticks = iter((10.0, 10.5, 20.0, 20.25))
    log: list[str] = []

    def read_clock() -> float:
        log.append("read")
        return next(ticks)

    monkeypatch.setattr("calibrate.collectives.timing.perf_counter", read_clock)
    monkeypatch.setattr("calibrate.collectives.timing.dist.barrier", lambda: log.append("meet"))
    starts, ends = HostIterationTimer(has_shared_clock=True).time_iterations(logging_iteration(log), 2)
    assert (ends - starts).tolist() == [0.5, 0.25]
    assert log == ["prepare", "meet", "read", "run", "read"] * 2


def logging_iteration(log: list[str]) -> CollectiveIteration:
    return CollectiveIteration(lambda: log.append("prepare"), lambda: log.append("run"))


class LoggingEvent:
    """A GPU event that logs its recording, and is 3 ms after the previous one."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append("event")

    def elapsed_time(self, _end: "LoggingEvent") -> float:
        return 3.0


def test_gpu_iterations_are_queued_behind_a_pause_and_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    pauses: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: LoggingEvent(log))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (log.append("pause"), pauses.append(cycles)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: log.append("wait"))
    monkeypatch.setattr("calibrate.collectives.timing.dist.all_reduce", lambda _tensor: log.append("all_reduce"))
    monkeypatch.setattr("calibrate.collectives.timing.perf_counter", count(step=4e-6).__next__)
    clock = DeviceIterationTimer(torch.device("cpu"))
    clock.queuing_seconds = 100e-6
    starts, ends = clock.time_iterations(logging_iteration(log), 2)
    assert (ends - starts).tolist() == [3e-3, 3e-3]
    iteration_log = ["prepare", "all_reduce", "event", "run", "event"]
    assert log == ["pause", *iteration_log, *iteration_log, "wait"]
    clock.time_iterations(logging_iteration(log), 1)
    assert pauses[1] / pauses[0] == pytest.approx(2e-6 / (2 * 100e-6), rel=1e-3)  # as long as queuing took


@dataclass
class FakeIterationClock:
    """Iterations of these lengths, repeated; this rank starts START_DELAY before the last one."""

    lengths: tuple[float, ...]
    has_shared_clock: bool = True
    position: int = 0

    def time_iterations(self, _lap: CollectiveIteration, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = [self.lengths[(self.position + index) % len(self.lengths)] for index in range(count)]
        self.position += count
        starts = torch.full((count,), 5.0, dtype=torch.float64)
        return starts, starts + START_DELAY + torch.tensor(lengths, dtype=torch.float64)


START_DELAY = 1.0


@pytest.fixture
def last_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks start all iterations START_DELAY later and finish first."""

    def delayed_maximum(values: torch.Tensor, _device: torch.device) -> torch.Tensor:
        return values + START_DELAY if bool((values == 5.0).all()) else values

    monkeypatch.setattr("calibrate.collectives.timing.max_over_ranks", delayed_maximum)


CPU_DEVICE = torch.device("cpu")


@pytest.mark.usefixtures("last_to_start")
def test_call_time_counts_from_the_last_member_start() -> None:
    """On the clock of one node; between nodes, every rank counts from its own start."""
    iteration = CollectiveIteration(lambda: None, lambda: None)
    assert time_collective(iteration, FakeIterationClock((0.25,)), CPU_DEVICE, 60.0).seconds == pytest.approx(0.25)
    assert time_collective(
        iteration, FakeIterationClock((0.25,), has_shared_clock=False), CPU_DEVICE, 60.0
    ).seconds == pytest.approx(0.25 + START_DELAY)


@pytest.mark.usefixtures("last_to_start")
def test_round_trip_counts_as_two_calls() -> None:
    assert (
        time_collective(
            CollectiveIteration(lambda: None, lambda: None, transfer_count=2),
            FakeIterationClock((0.5,)),
            CPU_DEVICE,
            60.0,
        ).seconds
        == 0.25
    )


@pytest.mark.usefixtures("last_to_start")
def test_iterations_continue_until_the_median_converges_or_time_is_up() -> None:
    iteration = CollectiveIteration(lambda: None, lambda: None)
    steady = time_collective(iteration, FakeIterationClock((0.25,)), CPU_DEVICE, 60.0)
    unsteady = time_collective(iteration, FakeIterationClock((0.1, 0.25, 0.4)), CPU_DEVICE, 60.0)
    time_limited = time_collective(iteration, FakeIterationClock((0.1, 0.25, 0.4)), CPU_DEVICE, 0.0)
    assert steady.repetitions < unsteady.repetitions
    assert unsteady.repetitions >= MAX_ITERATIONS
    assert time_limited.repetitions == MIN_ITERATIONS
