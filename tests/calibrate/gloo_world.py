"""Four processes, as two nodes of two, that measure collectives with gloo.

Started by test_collectives as one process, which imports PyTorch once and forks them.

Arguments: the file into which the first process writes its results, and a free port. Warnings are errors.
"""

import json
import os
import sys
import warnings
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from calibrate.check.expert_parallel import expert_parameters
from calibrate.check.phase_timer import PhaseTimer
from calibrate.check.supported import build_trainer
from calibrate.check.trainer import TrainingBatch
from calibrate.collectives import operations as torch_collectives
from calibrate.collectives import sweep
from calibrate.collectives.command import measure_calls
from calibrate.collectives.interference import measure_interference
from calibrate.collectives.process_groups import current_world, process_group_session
from calibrate.collectives.sweep import SkippedCall
from calibrate.devices.device import find_device
from calibrate.kernels.copy_interference import square_matmul
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CollectiveCall, CollectiveSample
from clustersim.program.task import CollectiveType
from tests.calibrate.check_scenarios import LLAMA, small_scenario

CPU_DEVICE = torch.device("cpu")
WORLD_SIZE = 4
SIZE = 4096.0
IMBALANCED_SHARES = ((0.5, 0.5, 1.0, 2.0), (0.0, 4.0, 0.0, 0.0))
MOE_OVERRIDES = ("model.experts={count: 8, top_k: 2, ffn: 48, shared: 32}", "model.layers=1", "training.microbatch=1")


def run_ranks(output: Path, port: str) -> bool:
    """Run all ranks; whether they succeeded. The first that fails ends the others, which may wait for it."""
    fork = get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, output, port), daemon=True) for rank in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)  # type: ignore[index]
            process.join()
            if process.exitcode != 0:
                return False
    return True


def run_rank(rank: int, output: Path, port: str) -> None:
    """One rank, in the environment that torchrun would give it on the first or the second of two nodes."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD_SIZE), "RANK": str(rank)}
    os.environ.update({**rendezvous, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)})
    main(output)


def main(output: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with process_group_session("gloo", torch.device("cpu")):
        results["nodes"] = current_world().node_count
        results["all"] = measure_samples(
            [
                CollectiveCall(collective, SIZE, *shape)
                for shape in ((2, 1), (4, 2))
                for collective in supported_collectives(shape)
            ]
        )
        results["idle"] = measure_samples(
            [
                CollectiveCall(CollectiveType.ALL_REDUCE, SIZE, 3, 1),
                CollectiveCall(CollectiveType.ALL_REDUCE, SIZE, 2, 2),
            ]
        )
        low_precision_calls = [
            CollectiveCall(collective, SIZE, 4, 2, DType.BF16)
            for collective in CollectiveType
            if collective.is_reduction
        ]
        results["narrow"] = measure_samples(low_precision_calls)
        results["imbalanced"] = measure_samples(
            [CollectiveCall(CollectiveType.ALL_TO_ALL, SIZE, 4, 2, shares=shares) for shares in IMBALANCED_SHARES]
        )
        results["experts"] = expert_gradient_errors()
        results["skipped"] = skip_reasons()
        results["short"] = [out_of_memory_reasons(step) for step in ("check", "expect", "measure")]
        results["overlapped"] = interference_results()
        results["wrong"] = [wrong_result_error(item) for item in (CollectiveType.ALL_REDUCE, CollectiveType.ALL_TO_ALL)]
        if dist.get_rank() == 0:
            output.write_text(json.dumps(results), encoding="utf-8")


def expert_gradient_errors() -> dict[str, float]:
    """Relative gradient errors of experts on four ranks, against one rank that has all experts and all tokens.

    Per weight: the maximum difference over the maximum gradient; and of the gradient norm.
    """
    ranks = dist.get_world_size()
    layout = f"layout={{ep: {ranks}, data: ddp}}"
    distributed = build_trainer(
        small_scenario(LLAMA, *MOE_OVERRIDES, f"cluster={{name: dgx-h100, gpus: {ranks}}}", layout), CPU_DEVICE
    )
    single = build_trainer(small_scenario(LLAMA, *MOE_OVERRIDES), CPU_DEVICE)
    weights = {name: weight.detach() for name, weight in distributed.model.module.named_parameters()}
    local_experts = expert_parameters(distributed.model.module)
    for name, weight in single.model.named_parameters():
        weight.data.copy_(torch.cat(all_gather(weights[name])) if name in local_experts else weights[name])
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(128, (ranks, 1, 32), generator=generator) for _ in range(2))
    single.run_passes(TrainingBatch(tokens, targets), PhaseTimer(CPU_DEVICE))
    batch_slice = slice(dist.get_rank(), dist.get_rank() + 1)
    distributed.run_passes(TrainingBatch(tokens[batch_slice], targets[batch_slice]), PhaseTimer(CPU_DEVICE))
    expected = {name: weight.grad for name, weight in single.model.named_parameters()}
    gradients = {
        name: torch.cat(all_gather(weight.grad)) if name in local_experts else weight.grad
        for name, weight in distributed.model.module.named_parameters()
    }
    norms = [float(trainer.weight_update._gradient_norm()) for trainer in (distributed, single)]
    errors = {
        name: float((gradients[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in expected.items()
    }
    return {**errors, "norm": abs(norms[0] / norms[1] - 1.0)}


def all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor.contiguous())
    return tensors


def supported_collectives(shape: tuple[int, int]) -> list[CollectiveType]:
    unrouted = (collective for collective in CollectiveType if not collective.is_token_routing)
    return [collective for collective in unrouted if collective is not CollectiveType.SEND_RECV or shape[0] == 2]


def measure_samples(calls: list[CollectiveCall]) -> list[list[Any]]:
    """All samples, which must be equal on all ranks."""
    samples = measure_calls(calls, find_device("cpu"), max_seconds_per_call=0.01)
    local_seconds = [sample.time.seconds for sample in samples]
    all_seconds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_seconds, local_seconds)
    assert all(other == local_seconds for other in all_seconds)
    return [
        [sample.call.collective.value, sample.call.ranks, sample.call.nodes, sample.time.seconds] for sample in samples
    ]


def skip_reasons() -> list[str]:
    """The reasons why calls were skipped."""
    reasons: list[str] = []

    def note(result: CollectiveSample | SkippedCall) -> None:
        if isinstance(result, SkippedCall):
            reasons.append(result.reason)

    huge = [CollectiveCall(CollectiveType.BROADCAST, 1e15, 2, 1), CollectiveCall(CollectiveType.BROADCAST, SIZE, 8, 1)]
    measure_calls([*huge, CollectiveCall(CollectiveType.SEND_RECV, SIZE, 4, 2)], find_device("cpu"), on_result=note)
    measure_calls(
        [CollectiveCall(CollectiveType.BROADCAST, SIZE, 2, 1)], find_device("cpu"), budget=0.0, on_result=note
    )
    sweep._USABLE_MEMORY_FRACTION = float("inf")  # the memory appears to be free, but the allocation fails
    measure_calls([CollectiveCall(CollectiveType.BROADCAST, 1e15, 2, 1)], find_device("cpu"), on_result=note)
    return reasons


def interference_results() -> list[list[Any]]:
    """Kernels overlapping calls of groups within and across nodes, equal on all ranks; and reasons of skipped pairs."""
    kernels = [square_matmul(DType.FP32, 64), square_matmul(DType.FP8, 64)]
    gather, send = (
        CollectiveCall(CollectiveType.ALL_GATHER, SIZE, 4, 2),
        CollectiveCall(CollectiveType.SEND_RECV, SIZE, 2, 1),
    )
    calls = [gather, send, CollectiveCall(CollectiveType.ALL_REDUCE, SIZE, 8, 1)]
    samples = list(
        measure_interference([(kernel, call) for call in calls for kernel in kernels], find_device("cpu"), rounds=1)
    )
    local_results = [
        sample.reason
        if isinstance(sample, SkippedCall)
        else [sample.overlapped_with, sample.kernel_slowdown, sample.comm_slowdown]
        for sample in samples
    ]
    all_results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_results, local_results)
    assert all(other == local_results for other in all_results)
    return local_results


def out_of_memory_reasons(step: str) -> list[str]:
    """Why a call is skipped when only the fourth rank lacks memory for its check, its result, or its buffers."""
    original = torch_collectives._PREPARERS[CollectiveType.ALL_GATHER]

    def raise_out_of_memory() -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")

    def without_memory(member: torch_collectives.GroupMember, payload: float) -> torch_collectives.PreparedCollective:
        call, checked = original(member, payload), payload != SIZE
        if dist.get_rank() != 3 or (step == "measure") == checked:
            return call
        return torch_collectives.PreparedCollective(
            call.iteration, call.result, raise_out_of_memory if step == "expect" else raise_out_of_memory()
        )

    torch_collectives._PREPARERS = {**torch_collectives._PREPARERS, CollectiveType.ALL_GATHER: without_memory}
    reasons = [skip.reason for skip in [*skipped_calls([CollectiveCall(CollectiveType.ALL_GATHER, SIZE, 2, 1)])]]
    torch_collectives._PREPARERS = {**torch_collectives._PREPARERS, CollectiveType.ALL_GATHER: original}
    return reasons


def skipped_calls(calls: list[CollectiveCall]) -> list[SkippedCall]:
    """Calls that were not measured."""
    results: list[CollectiveSample | SkippedCall] = []
    measure_calls(calls, find_device("cpu"), max_seconds_per_call=0.01, on_result=results.append)
    return [result for result in results if isinstance(result, SkippedCall)]


def wrong_result_error(collective: CollectiveType) -> str:
    """The error message for a collective whose result is wrong on one rank."""
    original = torch_collectives._PREPARERS[collective]

    def broken(member: torch_collectives.GroupMember, payload: float) -> torch_collectives.PreparedCollective:
        call = original(member, payload)
        result = call.result
        assert result is not None
        return torch_collectives.PreparedCollective(call.iteration, result + (dist.get_rank() == 3), call.expected)

    torch_collectives._PREPARERS = {**torch_collectives._PREPARERS, collective: broken}
    try:
        measure_calls([CollectiveCall(collective, SIZE, 2, 1)], find_device("cpu"))
    except InputError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    sys.exit(not run_ranks(Path(sys.argv[1]), sys.argv[2]))
