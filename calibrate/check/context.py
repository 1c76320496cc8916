"""What does this process check on: which device, beside which other processes, and what fits?"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from calibrate.check.prediction import peak_allocated
from calibrate.collectives.process_groups import World, joined, local_device
from calibrate.devices.device import TorchDevice, find
from calibrate.kernels.pytorch_ops import allocated
from clustersim.build import distinct_kernels
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, format_bytes
from clustersim.model.layer_stack import slice_layers
from clustersim.scenario import Scenario

USABLE: Final = 0.9  # of the free memory
TRAINED: Final = 0.5  # of that, for what is trained at its peak; kernels are measured beside it with the rest
MEASURED: Final = 0.8  # of what is free beside it, for one kernel's operands (`kernels.measure` measures no larger one)
_BACKENDS: Final = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True, slots=True)
class Here:
    """The device of this process, and the processes that train together."""

    device: TorchDevice
    world: World

    @property
    def first(self) -> bool:
        """Whether it reports."""
        return self.world.rank == 0

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, on each of them."""
        if self.world.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.world.ranks
        dist.all_gather_object(values, value)
        return values

    def meet(self) -> None:
        """Wait for all processes; on GPUs, let the GPUs wait for each other."""
        if self.world.ranks == 1:
            return
        if self.device.torch.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device.torch))
        else:
            dist.barrier()

    def alone(self) -> Bytes:
        """Memory that this process may take."""
        shared = self.world.per_node if self.device.torch.type == "cpu" else 1
        return USABLE * self.device.free_bytes() / shared


def world_of(scenario: Scenario, environment: Mapping[str, str] = os.environ) -> World:
    """The processes that torchrun started, or this one; raise InputError where the layout needs other ones."""
    ranks, needed = int(environment.get("WORLD_SIZE", "1")), scenario.layout.world_size
    if ranks != needed:
        there = "1 process" if ranks == 1 else f"{ranks} processes"
        raise InputError(
            f"the layout has {needed:,} ranks, and this is {there}; {_how(scenario, needed)}, or change the layout: "
            f"--set cluster.gpus={ranks} --set layout.dp={ranks} and 1 for tp, cp and pp"
        )
    return World(int(environment.get("RANK", "0")), ranks, int(environment.get("LOCAL_WORLD_SIZE", str(ranks))))


def _how(scenario: Scenario, needed: int) -> str:
    path = scenario.path or "SCENARIO"
    if needed == 1:
        return f"start one: python -m calibrate --check {path}"
    return f"start one for each: torchrun --nproc-per-node {needed} -m calibrate --check {path}"


@contextmanager
def joined_here(world: World, name: str | None) -> Iterator[Here]:
    """What this process checks on (cuda, cpu, or None for the best), joined with the others."""
    kind = find(name).torch.type
    if world.ranks == 1:
        yield Here(find(name), world)
        return
    device = local_device(_BACKENDS[kind], world)
    with joined(_BACKENDS[kind], device.torch):
        yield Here(device, world)


def end_without_threads() -> None:
    """End this process at once, all being done and said.

    Threads of torch's strategies may still run when the interpreter ends, which now and then aborts a process whose
    work is done ("terminate called without an active exception", torch 2.13 with gloo).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for what is trained, at its peak, and for that with the operands of any one kernel; None: none is measured.

    device: where kernels are measured.
    """

    trained: Bytes
    whole: Bytes | None = None
    device: torch.device | None = None

    @classmethod
    def shared(cls, free: Bytes, device: torch.device) -> "Room":
        """Half for what is trained, the rest for kernels beside it."""
        return cls(TRAINED * free, free, device)

    def holds(self, scenario: Scenario) -> bool:
        """Whether the scenario's model can be trained in it, and its kernels be measured."""
        peak = peak_allocated(scenario)
        if peak > self.trained or self.whole is None or self.device is None:
            return peak <= self.trained
        largest = max(allocated(kernel, self.device) for kernel in distinct_kernels(scenario))
        return peak + largest / MEASURED <= self.whole


def fitted_layers(scenario: Scenario, room: Room, layers: int | None) -> Scenario:
    """The scenario with so many layers, or with as many as fit; raise InputError where not even the fewest do."""
    fewest = scenario.layout.pp * scenario.placement.max_chunks
    if layers is not None:
        if not fewest <= layers:
            raise InputError(f"--layers: {layers} is too few; {fewest} is the fewest for {fewest} stages")
        return truncated(scenario, layers)
    legal = (scenario.model.layer_count, *reversed(range(fewest, scenario.model.layer_count, fewest)))
    fitting = (each for count in legal if room.holds(each := truncated(scenario, count)))
    found = next(fitting, None)
    if found is not None:
        return found
    least = peak_allocated(truncated(scenario, fewest))
    beside = "" if room.whole is None else " beside the operands of its largest kernel"
    raise InputError(
        f"{scenario.model.name} with only {fewest} layers needs {format_bytes(least)} here{beside}, and there are "
        f"{format_bytes(room.whole or room.trained)}; make it smaller, such as with --set training.microbatch=1 or "
        "training.sequence"
    )


def truncated(scenario: Scenario, layers: int) -> Scenario:
    """The scenario with the first so many layers of its model."""
    if layers == scenario.model.layer_count:
        return scenario
    layout = replace(scenario.layout, layers_per_stage=None)
    return replace(
        scenario, model=replace(scenario.model, stack=slice_layers(scenario.model.stack, 0, layers)), layout=layout
    )


def note(here: Here, text: str) -> None:
    """Tell the user something that is no answer."""
    if here.first:
        print(text, file=sys.stderr, flush=True)
