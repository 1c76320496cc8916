"""How do replicas train with torch's FSDP2 (`fully_shard`)?

The embedding, every layer, and the head (final norm and logits) are units, as the simulator gathers them; the head is
not resharded between its forward and its backward (torchtitan, `apply_fsdp`). Units are gathered so many ahead as the
scenario says. Hybrid sharding is a mesh of replicas of shards, secondary shards are what forward reshards to. On a GPU
gathers run on their own stream; on a CPU they are started and waited for later, but FSDP2 waits for each reduce-scatter
at once.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from calibrate.check.torch_dtypes import TORCH
from calibrate.check.torch_model import Transformer, build
from calibrate.check.trainer import Loop, building
from calibrate.check.weight_update import Update
from clustersim.parallel.data_parallel_strategy import FullyShard, GradientSync, ReductionFrequency
from clustersim.parallel.plan import Plan


def sharded(plan: Plan, strategy: FullyShard, device: torch.device, mesh: DeviceMesh | None = None) -> Loop:
    """Every rank holds a part of each weight, in the format that the optimizer updates; mesh: None: all processes."""
    with building(plan, device, held_weights=True):
        model = build(plan, plan.stages[0])
    formats = plan.training.recipe.weight_formats
    policy = MixedPrecisionPolicy(param_dtype=TORCH[formats.gathered], reduce_dtype=TORCH[formats.gradients])
    mesh = mesh or _mesh(strategy, device)
    again = strategy.secondary or strategy.reshards_parameters(is_pipelined=False)
    for unit in _units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False if unit is model.head else again)
    whole = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    _prefetch(model, strategy.prefetch_depth, device)
    every = plan.layout.gradient_sync is GradientSync.EVERY_BACKWARD

    def around(last: bool) -> AbstractContextManager[object]:
        whole.set_requires_gradient_sync(last or every)
        whole.set_requires_all_reduce(last or strategy.all_reduce is ReductionFrequency.PER_MICROBATCH)
        return nullcontext()

    return Loop(model, Update(list(model.parameters()), plan.training), around)


def _mesh(strategy: FullyShard, device: torch.device) -> DeviceMesh:
    """All ranks, or replicas of groups that share weights out."""
    ranks = dist.get_world_size()
    if strategy.shard is None:
        return init_device_mesh(device.type, (ranks,))
    return init_device_mesh(
        device.type, (ranks // strategy.shard, strategy.shard), mesh_dim_names=("replicate", "shard")
    )


def _units(model: Transformer) -> Sequence[torch.nn.Module]:
    return [unit for unit in (model.embedding, *model.layers, model.head) if unit is not None]


def _prefetch(model: Transformer, ahead: int, device: torch.device) -> None:
    """Gather so many units ahead, forward in the model's order, backward in reverse; the head is there already."""
    units: list[FSDPModule] = [unit for unit in _units(model) if isinstance(unit, FSDPModule)]
    for place, unit in enumerate(units):
        unit._set_unshard_async_op(device.type == "cpu" and ahead > 0)
        if ahead:
            unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + ahead])
            unit.set_modules_to_backward_prefetch(units[max(0, place - ahead) : place][::-1])
