"""Data-parallel training with torch's FSDP2 (`fully_shard`).

The embedding, every layer, and the head (final norm and logits) are FSDP units, as the simulator gathers
them; the head is not resharded between its forward and its backward (torchtitan, `apply_fsdp`). The prefetch
depth is the scenario's. Hybrid sharding is a 2D mesh of replicas and shards; with secondary shards, forward
reshards to them. On a GPU gathers run on their own stream; on a CPU they are asynchronous, but FSDP2 waits
for each reduce-scatter at once.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from calibrate.check.torch_dtypes import TRAINING_DTYPES
from calibrate.check.torch_model import TransformerStage, build_stage
from calibrate.check.trainer import MicrobatchTrainer, construction_settings
from calibrate.check.weight_update import WeightUpdate
from clustersim.parallel.data_parallel_strategy import FullyShard, GradientSync, ReductionFrequency
from clustersim.parallel.plan import Plan


def build_fsdp_trainer(
    plan: Plan, strategy: FullyShard, device: torch.device, mesh: DeviceMesh | None = None
) -> MicrobatchTrainer:
    """A trainer whose ranks hold shards of all weights, in the optimizer's format; mesh: None for all processes."""
    with construction_settings(plan, device, optimizer_format=True):
        model = build_stage(plan, plan.stages[0])
    formats = plan.training.recipe.weight_formats
    policy = MixedPrecisionPolicy(
        param_dtype=TRAINING_DTYPES[formats.gathered], reduce_dtype=TRAINING_DTYPES[formats.gradients]
    )
    mesh = mesh or _device_mesh(strategy, device)
    reshard = strategy.zero_hpz_partition_size or strategy.reshards_parameters(is_pipelined=False)
    for unit in _fsdp_units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False if unit is model.head else reshard)
    fsdp_model = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    _set_prefetch(model, strategy.prefetch_depth, device)
    sync_always = plan.layout.gradient_sync is GradientSync.EVERY_BACKWARD

    def microbatch_context(is_last: bool) -> AbstractContextManager[object]:
        fsdp_model.set_requires_gradient_sync(is_last or sync_always)
        fsdp_model.set_requires_all_reduce(is_last or strategy.all_reduce is ReductionFrequency.PER_MICROBATCH)
        return nullcontext()

    return MicrobatchTrainer(model, WeightUpdate(list(model.parameters()), plan.training), microbatch_context)


def _device_mesh(strategy: FullyShard, device: torch.device) -> DeviceMesh:
    """All ranks, or replicas of shard groups."""
    ranks = dist.get_world_size()
    if strategy.shard is None:
        return init_device_mesh(device.type, (ranks,))
    return init_device_mesh(
        device.type, (ranks // strategy.shard, strategy.shard), mesh_dim_names=("replicate", "shard")
    )


def _fsdp_units(model: TransformerStage) -> Sequence[torch.nn.Module]:
    return [unit for unit in (model.embedding, *model.layers, model.head) if unit is not None]


def _set_prefetch(model: TransformerStage, depth: int, device: torch.device) -> None:
    """Set forward and (in reverse order) backward prefetch to `depth` units ahead."""
    units: list[FSDPModule] = [unit for unit in _fsdp_units(model) if isinstance(unit, FSDPModule)]
    for index, unit in enumerate(units):
        unit._set_unshard_async_op(device.type == "cpu" and depth > 0)
        if depth:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + depth])
            unit.set_modules_to_backward_prefetch(units[max(0, index - depth) : index][::-1])
