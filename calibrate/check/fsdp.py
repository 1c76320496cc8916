"""How do replicas train with torch's FSDP2 (`fully_shard`)?

The embedding, every layer, and the head (final norm and logits) are units, as the simulator gathers them; the head is
not resharded between its forward and its backward (torchtitan, `apply_fsdp`). Units are gathered so many ahead as the
scenario says. On a GPU gathers run on their own stream; on a CPU they are started and waited for later, but FSDP2
waits for each reduce-scatter at once.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from calibrate.check.formats import TORCH
from calibrate.check.model import Transformer, build
from calibrate.check.trainer import Loop, building
from calibrate.check.update import Update
from clustersim.parallel.data import FullyShard
from clustersim.parallel.plan import Plan


def sharded(plan: Plan, strategy: FullyShard, device: torch.device) -> Loop:
    """Every rank holds a part of each weight, in the format that the optimizer updates."""
    with building(plan, device, held_weights=True):
        model = build(plan, plan.stages[0])
    formats = plan.training.recipe.weights
    policy = MixedPrecisionPolicy(param_dtype=TORCH[formats.gathered], reduce_dtype=TORCH[formats.gradients])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    again = strategy.reshard_after_forward
    for unit in _units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=again and unit is not model.head)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    _prefetch(model, strategy.ahead, device)
    return Loop(model, Update(list(model.parameters()), plan.training))


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
