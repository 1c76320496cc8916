"""How do replicas share out experts?

Every rank holds all weights but the experts', of which each rank has its own. DistributedDataParallel reduces what all
have, and leaves the experts' alone: tokens of all ranks have come to them. So losses are divided by the ranks, and
DDP sums (a hook in place of its mean). The norm of the gradients counts each rank's experts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.check.ddp import last_alone, reducing
from calibrate.check.moe import Experts
from calibrate.check.torch_model import build, loss
from calibrate.check.trainer import Loop, building
from calibrate.check.weight_update import Update
from clustersim.parallel.data_parallel_strategy import DdpStrategy
from clustersim.parallel.plan import Plan


def shared_out(plan: Plan, strategy: DdpStrategy, device: torch.device) -> Loop:
    """Every rank holds some of the experts."""
    with building(plan, device):
        model = build(plan, plan.stages[0])
    ranks, own = plan.layout.ep, own_weights(model)
    model.loss = lambda logits, targets: loss(logits, targets, plan.training) / ranks
    reduced = reducing(model, plan, strategy, without=tuple(own))
    reduced.register_comm_hook(None, _summed)
    update = Update(list(model.parameters()), plan.training, _over_ranks, list(own.values()))
    return Loop(reduced, update, last_alone(reduced))


def own_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights of experts, by their names in the model."""
    return {
        f"{path}.{name}": weight
        for path, module in model.named_modules()
        if isinstance(module, Experts)
        for name, weight in module.named_parameters()
    }


def _summed(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """DDP's all-reduce without its mean."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    done: torch.futures.Future[Tensor] = work.get_future().then(lambda found: found.value()[0])
    return done


def _over_ranks(squares: Tensor) -> Tensor:
    dist.all_reduce(squares)
    return squares
