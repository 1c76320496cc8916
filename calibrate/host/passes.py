"""Whose forward and backward does a host launch?

The modules of `calibrate.check`, in each state that a step may be in: eager; with the hooks of `fully_shard`; with
DTensor; compiled layer by layer; captured in CUDA graphs, one for each pass.

Sharded and split models run in a group of two ranks whose collectives move nothing (torch's own `fake` backend): with
one rank `fully_shard` skips its gathers and DTensor its exchanges, and what the host does for them would be left out.
What results are then is of no interest. Left out is what the library itself does to enqueue a collective.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from calibrate.check.fsdp import sharded
from calibrate.check.single_process import single
from calibrate.check.tensor_parallel import split
from calibrate.check.trainer import Loop, random_batch
from calibrate.devices.device import TorchDevice
from calibrate.host.tiny_model import tiny_plan
from clustersim.cost.calibration_record import HostState
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.scenario import Scenario

RANKS: Final = 2  # of a group that moves nothing
_CAPTURED_AFTER: Final = 3  # runs on a stream of their own, as torch's notes on CUDA graphs have it


@dataclass(frozen=True, slots=True)
class Passes:
    """What is launched. plan: that counts the launches; forward gives what backward takes."""

    plan: Plan
    forward: Callable[[], Any]
    backward: Callable[[Any], None]


Made = Callable[[Scenario, TorchDevice], AbstractContextManager[Passes]]


@contextmanager
def eager(scenario: Scenario, device: TorchDevice) -> Iterator[Passes]:
    """Modules and autograd as they are."""
    plan = tiny_plan(scenario, device, Layout())
    yield _of(plan, single(plan, device.torch), device)


@contextmanager
def with_fsdp(scenario: Scenario, device: TorchDevice) -> Iterator[Passes]:
    """Every layer's parameters gathered and its gradients scattered."""
    plan, data = tiny_plan(scenario, device, Layout()), scenario.layout.data
    strategy = replace(data, shard=None, secondary=None) if isinstance(data, FullyShard) else FullyShard()
    with _moving_nothing(device.torch) as mesh:
        loop = sharded(plan, strategy, device.torch, mesh)
        with loop.around(True):
            yield _of(plan, loop, device)


@contextmanager
def with_dtensor(scenario: Scenario, device: TorchDevice) -> Iterator[Passes]:
    """Every matrix split over the ranks."""
    layout = Layout(tp=RANKS, sequence_parallel=scenario.layout.sequence_parallel)
    plan = tiny_plan(scenario, device, layout)
    with _moving_nothing(device.torch) as mesh:
        loop = split(plan, device.torch, mesh)
        with loop.around(True):
            yield _of(plan, loop, device)


@contextmanager
def compiled(scenario: Scenario, device: TorchDevice) -> Iterator[Passes]:
    """Layers compiled one by one, as torchtitan does."""
    plan = tiny_plan(scenario, device, Layout())
    loop = single(plan, device.torch)
    for layer in loop.model.layers:  # type: ignore[union-attr]
        layer.compile()
    yield _of(plan, loop, device)


@contextmanager
def captured(scenario: Scenario, device: TorchDevice) -> Iterator[Passes]:
    """Forward and backward captured in a CUDA graph each, with the same memory, as `make_graphed_callables` does."""
    plan = tiny_plan(scenario, device, Layout())
    passes = _of(plan, single(plan, device.torch), device, accumulated=False)
    beside, now = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(now)
    with torch.cuda.stream(beside):
        for _ in range(_CAPTURED_AFTER):
            passes.backward(passes.forward())
    now.wait_stream(beside)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        made = passes.forward()
    with torch.cuda.graph(backward, pool=forward.pool()):
        passes.backward(made)
    yield Passes(plan, forward.replay, lambda _: backward.replay())


MAKES: Final[dict[HostState, Made]] = {
    HostState.EAGER: eager,
    HostState.FSDP: with_fsdp,
    HostState.DTENSOR: with_dtensor,
    HostState.COMPILED: compiled,
    HostState.GRAPH: captured,
}


def _of(plan: Plan, loop: Loop, device: TorchDevice, *, accumulated: bool = True) -> Passes:
    """A model's passes; accumulated: gradients are added to the weights' own, else they are only made."""
    batch = random_batch(plan, device.torch)
    tokens, targets = batch.tokens[0], batch.targets[0]
    weights = list(loop.model.parameters())

    def backward(loss: Tensor) -> None:
        if accumulated:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            torch.autograd.grad(loss, weights, allow_unused=True)

    return Passes(plan, lambda: loop.model(tokens, targets), backward)


@contextmanager
def _moving_nothing(device: torch.device) -> Iterator[DeviceMesh]:
    """A group whose collectives return at once: of all processes where they have joined, else of two that are not.

    The mesh has a name of its own: DTensor remembers what it found out for equal ones, and a mesh of the same ranks
    that does communicate must not be taken for it.
    """
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("fake", rank=0, world_size=RANKS)
    group: Any = dist.group.WORLD if alone else dist.new_group(backend="fake")
    try:
        yield DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"nothing_{group.group_name}",))
    finally:
        dist.destroy_process_group(None if alone else group)
