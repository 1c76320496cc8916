"""Four processes, as two nodes of two, that measure collectives with gloo: started by test_collectives with torchrun.

Argument: a file, into which the first process writes what it saw. Warnings are errors.
"""

import json
import os
import sys
import warnings
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
from tests.calibrate.check_scenarios import LLAMA, scenario

CPU = torch.device("cpu")
SIZE = 4096.0
UNEVEN = ((0.5, 0.5, 1.0, 2.0), (0.0, 4.0, 0.0, 0.0))
MIXTURE = ("model.experts={count: 8, top_k: 2, ffn: 48, shared: 32}", "model.layers=1", "training.microbatch=1")


def main(output: Path) -> None:
    warnings.simplefilter("error")
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    with process_group_session("gloo", torch.device("cpu")):
        seen["nodes"] = current_world().node_count
        seen["all"] = rows(
            [
                CollectiveCall(collective_type, SIZE, *shape)
                for shape in ((2, 1), (4, 2))
                for collective_type in possible(shape)
            ]
        )
        seen["idle"] = rows(
            [
                CollectiveCall(CollectiveType.ALL_REDUCE, SIZE, 3, 1),
                CollectiveCall(CollectiveType.ALL_REDUCE, SIZE, 2, 2),
            ]
        )
        narrow = [CollectiveCall(item, SIZE, 4, 2, DType.BF16) for item in CollectiveType if item.is_reduction]
        seen["narrow"] = rows(narrow)
        seen["uneven"] = rows(
            [CollectiveCall(CollectiveType.ALL_TO_ALL, SIZE, 4, 2, shares=element) for element in UNEVEN]
        )
        seen["experts"] = experts_apart()
        seen["skipped"] = skipped()
        seen["short"] = [short(step) for step in ("check", "expect", "measure")]
        seen["beside"] = together()
        seen["wrong"] = [wrong(entry) for entry in (CollectiveType.ALL_REDUCE, CollectiveType.ALL_TO_ALL)]
        if dist.get_rank() == 0:
            output.write_text(json.dumps(seen), encoding="utf-8")


def experts_apart() -> dict[str, float]:
    """Gradients of experts spread over four ranks, less those of one rank that has all of them and all tokens.

    The largest difference of each weight, over the largest gradient.
    """
    ranks = dist.get_world_size()
    layout = f"layout={{ep: {ranks}, data: ddp}}"
    spread = build_trainer(scenario(LLAMA, *MIXTURE, f"cluster={{name: dgx-h100, gpus: {ranks}}}", layout), CPU)
    alone = build_trainer(scenario(LLAMA, *MIXTURE), CPU)
    whole = {name: weight.detach() for name, weight in spread.model.module.named_parameters()}
    mine = expert_parameters(spread.model.module)
    for name, weight in alone.model.named_parameters():
        weight.data.copy_(torch.cat(gathered(whole[name])) if name in mine else whole[name])
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(128, (ranks, 1, 32), generator=generator) for _ in range(2))
    alone.run_passes(TrainingBatch(tokens, targets), PhaseTimer(CPU))
    here = slice(dist.get_rank(), dist.get_rank() + 1)
    spread.run_passes(TrainingBatch(tokens[here], targets[here]), PhaseTimer(CPU))
    wanted = {name: weight.grad for name, weight in alone.model.named_parameters()}
    found = {
        name: torch.cat(gathered(weight.grad)) if name in mine else weight.grad
        for name, weight in spread.model.module.named_parameters()
    }
    norms = [float(trainer.weight_update._gradient_norm()) for trainer in (spread, alone)]
    apart = {name: float((found[name] - item).abs().max() / item.abs().max()) for name, item in wanted.items()}
    return {**apart, "norm": abs(norms[0] / norms[1] - 1.0)}


def gathered(part: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor."""
    every = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(every, part.contiguous())
    return every


def possible(shape: tuple[int, int]) -> list[CollectiveType]:
    each_call = (collective_type for collective_type in CollectiveType if not collective_type.is_token_routing)
    return [item for item in each_call if item is not CollectiveType.SEND_RECV or shape[0] == 2]


def rows(calls: list[CollectiveCall]) -> list[list[Any]]:
    """All rows, which every rank must see alike."""
    measured = measure_calls(calls, find_device("cpu"), max_seconds_per_call=0.01)
    mine = [row.time.seconds for row in measured]
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, mine)
    assert all(other == mine for other in others)
    return [[row.call.collective.value, row.call.ranks, row.call.nodes, row.time.seconds] for row in measured]


def skipped() -> list[str]:
    """Why calls were not measured."""
    reasons: list[str] = []

    def note(result: CollectiveSample | SkippedCall) -> None:
        if isinstance(result, SkippedCall):
            reasons.append(result.reason)

    huge = [CollectiveCall(CollectiveType.BROADCAST, 1e15, 2, 1), CollectiveCall(CollectiveType.BROADCAST, SIZE, 8, 1)]
    measure_calls([*huge, CollectiveCall(CollectiveType.SEND_RECV, SIZE, 4, 2)], find_device("cpu"), on_result=note)
    measure_calls(
        [CollectiveCall(CollectiveType.BROADCAST, SIZE, 2, 1)], find_device("cpu"), budget=0.0, on_result=note
    )
    sweep._USABLE_MEMORY_FRACTION = float("inf")  # the memory looks free, but one rank cannot have it
    measure_calls([CollectiveCall(CollectiveType.BROADCAST, 1e15, 2, 1)], find_device("cpu"), on_result=note)
    return reasons


def together() -> list[list[Any]]:
    """Kernels beside calls of groups in and across nodes, which every rank must see alike; and what cannot be run."""
    kernels = [square_matmul(DType.FP32, 64), square_matmul(DType.FP8, 64)]
    gather, send = (
        CollectiveCall(CollectiveType.ALL_GATHER, SIZE, 4, 2),
        CollectiveCall(CollectiveType.SEND_RECV, SIZE, 2, 1),
    )
    calls = [gather, send, CollectiveCall(CollectiveType.ALL_REDUCE, SIZE, 8, 1)]
    found = list(
        measure_interference([(kernel, call) for call in calls for kernel in kernels], find_device("cpu"), rounds=1)
    )
    mine = [
        item.reason if isinstance(item, SkippedCall) else [item.beside, item.kernel_slowdown, item.comm_slowdown]
        for item in found
    ]
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, mine)
    assert all(other == mine for other in others)
    return mine


def short(step: str) -> list[str]:
    """Why a call is left out when the fourth rank alone has no memory for its check, its result, or its buffers."""
    does = torch_collectives._PREPARERS[CollectiveType.ALL_GATHER]

    def refused() -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")

    def lacking(member: torch_collectives.GroupMember, payload: float) -> torch_collectives.PreparedCollective:
        call, checked = does(member, payload), payload != SIZE
        if dist.get_rank() != 3 or (step == "measure") == checked:
            return call
        return torch_collectives.PreparedCollective(
            call.iteration, call.result, refused if step == "expect" else refused()
        )

    torch_collectives._PREPARERS = {**torch_collectives._PREPARERS, CollectiveType.ALL_GATHER: lacking}
    reasons = [
        skipped_call.reason for skipped_call in [*passed_over([CollectiveCall(CollectiveType.ALL_GATHER, SIZE, 2, 1)])]
    ]
    torch_collectives._PREPARERS = {**torch_collectives._PREPARERS, CollectiveType.ALL_GATHER: does}
    return reasons


def passed_over(calls: list[CollectiveCall]) -> list[SkippedCall]:
    """Calls that were not measured."""
    left: list[CollectiveSample | SkippedCall] = []
    measure_calls(calls, find_device("cpu"), max_seconds_per_call=0.01, on_result=left.append)
    return [item for item in left if isinstance(item, SkippedCall)]


def wrong(collective: CollectiveType) -> str:
    """What is said of a collective that does nothing in one group."""
    does = torch_collectives._PREPARERS[collective]

    def broken(member: torch_collectives.GroupMember, payload: float) -> torch_collectives.PreparedCollective:
        call = does(member, payload)
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
    main(Path(sys.argv[1]))
