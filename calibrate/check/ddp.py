"""How do replicas train with torch's DistributedDataParallel?

Buckets of the scenario's size, in which the gradients live; they are all-reduced while the last microbatch's backward
runs. Without overlap there is one bucket, which is full when that backward is done.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from calibrate.check.model import build
from calibrate.check.trainer import Loop, building
from calibrate.check.update import Update
from clustersim.parallel.data import Replicated
from clustersim.parallel.plan import Plan

_MEBIBYTE = 2.0**20


def replicated(plan: Plan, strategy: Replicated, device: torch.device) -> Loop:
    """Every rank holds all weights."""
    with building(plan, device):
        model = build(plan, plan.stages[0])
    whole = sum(weight.nbytes for weight in model.parameters())
    of_gradients = strategy.bucket_bytes(plan.layout.dp, plan.training.recipe.weights.gradients.bytes, first=True)
    bucket = of_gradients if strategy.overlap else whole
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket / _MEBIBYTE, gradient_as_bucket_view=True)

    def around(last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else wrapped.no_sync()

    return Loop(wrapped, Update(list(model.parameters()), plan.training), around)
