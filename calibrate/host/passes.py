"""Which forward and backward passes does the host launch?

The modules of `calibrate.check`, in each state that a step may be in: eager; with the hooks of `fully_shard`;
with DTensor; compiled layer by layer; captured in CUDA graphs, one per pass.

Sharded and tensor-parallel models run in a group of two ranks whose collectives move nothing (torch's own
`fake` backend): with one rank `fully_shard` skips its all-gathers and DTensor its collectives, and the host's
work for them would be missed. The results are meaningless then. Not included: the time that the collective
library itself takes to enqueue a collective.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from calibrate.check.fsdp import build_fsdp_trainer
from calibrate.check.single_process import build_single_trainer
from calibrate.check.tensor_parallel import build_tensor_parallel_trainer
from calibrate.check.trainer import MicrobatchTrainer, random_batch
from calibrate.devices.device import TorchDevice
from calibrate.host.tiny_model import tiny_plan
from clustersim.cost.record_kinds import LaunchMode
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.scenario import Scenario

FAKE_RANKS: Final = 2  # ranks of the fake group
_CAPTURE_WARM_UP_RUNS: Final = 3  # warm-up runs on a side stream, as torch's notes on CUDA graphs recommend


@dataclass(frozen=True, slots=True)
class LaunchedPasses:
    """The launched passes. plan: for counting launches; forward returns the argument of backward."""

    plan: Plan
    forward: Callable[[], Any]
    backward: Callable[[Any], None]


PassBuilder = Callable[[Scenario, TorchDevice], AbstractContextManager[LaunchedPasses]]


@contextmanager
def eager_passes(scenario: Scenario, device: TorchDevice) -> Iterator[LaunchedPasses]:
    """Eager modules and autograd."""
    plan = tiny_plan(scenario, device, Layout())
    yield _build_passes(plan, build_single_trainer(plan, device.torch), device)


@contextmanager
def fsdp_passes(scenario: Scenario, device: TorchDevice) -> Iterator[LaunchedPasses]:
    """Every layer's parameters all-gathered and its gradients reduce-scattered."""
    plan, data = tiny_plan(scenario, device, Layout()), scenario.layout.data
    strategy = replace(data, shard=None, zero_hpz_partition_size=None) if isinstance(data, FullyShard) else FullyShard()
    with _fake_device_mesh(device.torch) as mesh:
        loop = build_fsdp_trainer(plan, strategy, device.torch, mesh)
        with loop.microbatch_context(True):
            yield _build_passes(plan, loop, device)


@contextmanager
def dtensor_passes(scenario: Scenario, device: TorchDevice) -> Iterator[LaunchedPasses]:
    """Every matrix sharded over the ranks."""
    layout = Layout(tp=FAKE_RANKS, sequence_parallel=scenario.layout.sequence_parallel)
    plan = tiny_plan(scenario, device, layout)
    with _fake_device_mesh(device.torch) as mesh:
        loop = build_tensor_parallel_trainer(plan, device.torch, mesh)
        with loop.microbatch_context(True):
            yield _build_passes(plan, loop, device)


@contextmanager
def compiled_passes(scenario: Scenario, device: TorchDevice) -> Iterator[LaunchedPasses]:
    """Layers compiled one by one, as torchtitan does."""
    plan = tiny_plan(scenario, device, Layout())
    loop = build_single_trainer(plan, device.torch)
    for layer in loop.model.layers:  # type: ignore[union-attr]
        layer.compile()
    yield _build_passes(plan, loop, device)


@contextmanager
def cuda_graph_passes(scenario: Scenario, device: TorchDevice) -> Iterator[LaunchedPasses]:
    """Forward and backward captured in one CUDA graph each, sharing memory, as `make_graphed_callables` does."""
    plan = tiny_plan(scenario, device, Layout())
    passes = _build_passes(plan, build_single_trainer(plan, device.torch), device, accumulates_gradients=False)
    side_stream, current_stream = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    side_stream.wait_stream(current_stream)
    with torch.cuda.stream(side_stream):
        for _ in range(_CAPTURE_WARM_UP_RUNS):
            passes.backward(passes.forward())
    current_stream.wait_stream(side_stream)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        output = passes.forward()
    with torch.cuda.graph(backward, pool=forward.pool()):
        passes.backward(output)
    yield LaunchedPasses(plan, forward.replay, lambda _: backward.replay())


PASS_BUILDERS: Final[dict[LaunchMode, PassBuilder]] = {
    LaunchMode.EAGER: eager_passes,
    LaunchMode.FSDP: fsdp_passes,
    LaunchMode.DTENSOR: dtensor_passes,
    LaunchMode.COMPILED: compiled_passes,
    LaunchMode.GRAPH: cuda_graph_passes,
}


def _build_passes(
    plan: Plan, loop: MicrobatchTrainer, device: TorchDevice, *, accumulates_gradients: bool = True
) -> LaunchedPasses:
    """A model's passes; accumulates_gradients: into the weights' `.grad`, else gradients are only computed."""
    batch = random_batch(plan, device.torch)
    tokens, targets = batch.tokens[0], batch.targets[0]
    weights = list(loop.model.parameters())

    def backward(loss: Tensor) -> None:
        if accumulates_gradients:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            torch.autograd.grad(loss, weights, allow_unused=True)

    return LaunchedPasses(plan, lambda: loop.model(tokens, targets), backward)


@contextmanager
def _fake_device_mesh(device: torch.device) -> Iterator[DeviceMesh]:
    """A mesh whose collectives return at once: over all processes where torch.distributed is initialized, else two.

    The mesh has a unique name: DTensor caches by equal meshes, and a mesh of the same ranks that does communicate
    must not be confused with it.
    """
    is_standalone = not dist.is_initialized()
    if is_standalone:
        dist.init_process_group("fake", rank=0, world_size=FAKE_RANKS)
    group: Any = dist.group.WORLD if is_standalone else dist.new_group(backend="fake")
    try:
        yield DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"nothing_{group.group_name}",))
    finally:
        dist.destroy_process_group(None if is_standalone else group)
