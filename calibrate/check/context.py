"""Context of a check: the device of this process, the other processes, and the memory budget."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from calibrate.check.prediction import peak_allocated
from calibrate.collectives.process_groups import World, local_device, process_group_session
from calibrate.devices.device import TorchDevice, find_device
from calibrate.kernels.pytorch_ops import allocated_bytes
from clustersim.build import distinct_kernels
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, format_bytes
from clustersim.model.layer_stack import slice_layers
from clustersim.scenario import Scenario

USABLE_FRACTION: Final = 0.9  # of free memory
TRAINING_FRACTION: Final = 0.5  # of that, for the training peak; the rest is for kernels that are measured meanwhile
MAX_KERNEL_FRACTION: Final = 0.8  # of the rest, for one kernel's operands (`kernels.measure` measures no larger one)
_BACKENDS: Final = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True, slots=True)
class CheckContext:
    """The device of this process, and the processes that train as one job."""

    device: TorchDevice
    world: World

    @property
    def is_first_rank(self) -> bool:
        """Whether this process reports."""
        return self.world.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, on each of them."""
        if self.world.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all processes; on GPUs, make the GPUs wait for each other."""
        if self.world.world_size == 1:
            return
        if self.device.torch.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device.torch))
        else:
            dist.barrier()

    def usable_bytes(self) -> Bytes:
        """Bytes that this process may use."""
        process_count = self.world.ranks_per_node if self.device.torch.type == "cpu" else 1
        return USABLE_FRACTION * self.device.free_bytes() / process_count


def resolve_world(scenario: Scenario, environment: Mapping[str, str] = os.environ) -> World:
    """The processes that torchrun started, or this one; raise InputError if the layout needs another number."""
    ranks, needed = int(environment.get("WORLD_SIZE", "1")), scenario.layout.world_size
    if ranks != needed:
        started = "1 process" if ranks == 1 else f"{ranks} processes"
        raise InputError(
            f"the layout has {needed:,} ranks, and this is {started}; {_launch_advice(scenario, needed)}, or change "
            "the layout: "
            f"--set cluster.gpus={ranks} --set layout.dp={ranks} and 1 for tp, cp and pp"
        )
    return World(int(environment.get("RANK", "0")), ranks, int(environment.get("LOCAL_WORLD_SIZE", str(ranks))))


def _launch_advice(scenario: Scenario, needed: int) -> str:
    path = scenario.path or "SCENARIO"
    if needed == 1:
        return f"start one: python -m calibrate --check {path}"
    return f"start one for each: torchrun --nproc-per-node {needed} -m calibrate --check {path}"


@contextmanager
def join_processes(world: World, device_name: str | None) -> Iterator[CheckContext]:
    """The context on a device (cuda, cpu, or None for the best one), joined with the other processes."""
    kind = find_device(device_name).torch.type
    if world.world_size == 1:
        yield CheckContext(find_device(device_name), world)
        return
    device = local_device(_BACKENDS[kind], world)
    with process_group_session(_BACKENDS[kind], device.torch):
        yield CheckContext(device, world)


def exit_immediately() -> None:
    """Exit this process at once, when all work is done and printed.

    Threads of torch's strategies may still run when the interpreter ends, which now and then aborts a process
    whose work is done ("terminate called without an active exception", torch 2.13 with gloo).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory budget of a check.

    training_bytes: for the training peak; total_bytes: for that plus the operands of any one kernel, None: no
    kernels are measured; device: where kernels are measured.
    """

    training_bytes: Bytes
    total_bytes: Bytes | None = None
    device: torch.device | None = None

    @classmethod
    def shared_with_kernels(cls, free: Bytes, device: torch.device) -> "MemoryBudget":
        """Half for training, the rest for kernels that are measured while the model is in memory."""
        return cls(TRAINING_FRACTION * free, free, device)

    def can_hold(self, scenario: Scenario) -> bool:
        """Whether the scenario's model can be trained within the budget, and its kernels measured."""
        peak = peak_allocated(scenario)
        if peak > self.training_bytes or self.total_bytes is None or self.device is None:
            return peak <= self.training_bytes
        largest = max(allocated_bytes(kernel, self.device) for kernel in distinct_kernels(scenario))
        return peak + largest / MAX_KERNEL_FRACTION <= self.total_bytes


def fit_layer_count(scenario: Scenario, budget: MemoryBudget, layers: int | None) -> Scenario:
    """The scenario with `layers` layers, or as many as fit; raise InputError if even the minimum does not fit."""
    min_layers = scenario.layout.pp * scenario.placement.max_chunks
    if layers is not None:
        if not min_layers <= layers:
            raise InputError(f"--layers: {layers} is too few; {min_layers} is the fewest for {min_layers} stages")
        return truncate_model(scenario, layers)
    layer_counts = (scenario.model.layer_count, *reversed(range(min_layers, scenario.model.layer_count, min_layers)))
    candidates = (candidate for count in layer_counts if budget.can_hold(candidate := truncate_model(scenario, count)))
    largest = next(candidates, None)
    if largest is not None:
        return largest
    min_bytes = peak_allocated(truncate_model(scenario, min_layers))
    kernel_text = "" if budget.total_bytes is None else " in addition to the operands of its largest kernel"
    raise InputError(
        f"{scenario.model.name} with only {min_layers} layers needs {format_bytes(min_bytes)} here{kernel_text}, and "
        "there are "
        f"{format_bytes(budget.total_bytes or budget.training_bytes)}; make it smaller, such as with --set "
        "training.microbatch=1 or "
        "training.sequence"
    )


def truncate_model(scenario: Scenario, layers: int) -> Scenario:
    """The scenario with only the first layers of its model."""
    if layers == scenario.model.layer_count:
        return scenario
    layout = replace(scenario.layout, layers_per_stage=None)
    return replace(
        scenario, model=replace(scenario.model, stack=slice_layers(scenario.model.stack, 0, layers)), layout=layout
    )


def print_note(context: CheckContext, text: str) -> None:
    """Print a note to the user on stderr, on the first rank."""
    if context.is_first_rank:
        print(text, file=sys.stderr, flush=True)
