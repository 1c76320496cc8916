"""Expert-parallel training with torch's DistributedDataParallel.

Every rank holds all non-expert weights, and experts of its own. DistributedDataParallel reduces the
gradients that all ranks have and ignores the experts', which already include the tokens of all ranks. So
losses are divided by the number of ranks, and DDP sums (a communication hook instead of its mean). The
gradient norm includes each rank's experts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.check.ddp import sync_last_only, wrap_ddp
from calibrate.check.moe import GroupedExperts
from calibrate.check.torch_model import build_stage, mean_loss
from calibrate.check.trainer import MicrobatchTrainer, construction_settings
from calibrate.check.weight_update import WeightUpdate, all_reduce_squares
from clustersim.parallel.data_parallel_strategy import DdpStrategy
from clustersim.parallel.plan import Plan


def build_expert_parallel_trainer(plan: Plan, strategy: DdpStrategy, device: torch.device) -> MicrobatchTrainer:
    """A trainer whose ranks each hold some of the experts."""
    with construction_settings(plan, device):
        model = build_stage(plan, plan.stages[0])
    ranks, local_experts = plan.layout.ep, expert_parameters(model)
    model.loss = lambda logits, targets: mean_loss(logits, targets, plan.training) / ranks
    ddp_model = wrap_ddp(model, plan, strategy, ignored_names=tuple(local_experts))
    ddp_model.register_comm_hook(None, _sum_hook)
    update = WeightUpdate(list(model.parameters()), plan.training, all_reduce_squares, list(local_experts.values()))
    return MicrobatchTrainer(ddp_model, update, sync_last_only(ddp_model))


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Expert weights, by their names in the model."""
    return {
        f"{path}.{name}": weight
        for path, module in model.named_modules()
        if isinstance(module, GroupedExperts)
        for name, weight in module.named_parameters()
    }


def _sum_hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """DDP's all-reduce without the division."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed
