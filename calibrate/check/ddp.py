"""Data-parallel training with torch's DistributedDataParallel.

Gradients live in buckets of the scenario's size, which are all-reduced during the last microbatch's
backward. Without overlap there is one bucket, which is full when that backward is done.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from calibrate.check.torch_model import TransformerStage, build_stage
from calibrate.check.trainer import MicrobatchTrainer, construction_settings
from calibrate.check.weight_update import WeightUpdate
from clustersim.parallel.data_parallel_strategy import DdpStrategy
from clustersim.parallel.plan import Plan

_MEBIBYTE = 2.0**20


def build_ddp_trainer(plan: Plan, strategy: DdpStrategy, device: torch.device) -> MicrobatchTrainer:
    """A trainer whose ranks each hold all weights."""
    with construction_settings(plan, device):
        model = build_stage(plan, plan.stages[0])
    ddp_model = wrap_ddp(model, plan, strategy)
    return MicrobatchTrainer(
        ddp_model, WeightUpdate(list(model.parameters()), plan.training), sync_last_only(ddp_model)
    )


def wrap_ddp(
    model: TransformerStage, plan: Plan, strategy: DdpStrategy, ignored_names: Sequence[str] = ()
) -> DistributedDataParallel:
    """The model in DDP; ignored_names: weights whose gradients are not reduced."""
    set_ignored = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    set_ignored(model, list(ignored_names))  # type: ignore[no-untyped-call]
    total_bytes = sum(weight.nbytes for name, weight in model.named_parameters() if name not in ignored_names)
    bucket_bytes = strategy.bucket_bytes(
        plan.layout.dp, plan.training.recipe.weight_formats.gradients.bytes, is_first_chunk=True
    )
    cap_bytes = bucket_bytes if strategy.overlap else total_bytes
    return DistributedDataParallel(model, bucket_cap_mb=cap_bytes / _MEBIBYTE, gradient_as_bucket_view=True)


def sync_last_only(ddp_model: DistributedDataParallel) -> Callable[[bool], AbstractContextManager[object]]:
    """A context factory that reduces gradients only in the last microbatch's backward (`no_sync` otherwise)."""

    def microbatch_context(is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else ddp_model.no_sync()

    return microbatch_context
