"""How do replicas train with torch's DistributedDataParallel?

Buckets of the scenario's size, in which the gradients live; they are all-reduced while the last microbatch's backward
runs. Without overlap there is one bucket, which is full when that backward is done.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from calibrate.check.torch_model import Transformer, build
from calibrate.check.trainer import Loop, building
from calibrate.check.weight_update import Update
from clustersim.parallel.data_parallel_strategy import DdpStrategy
from clustersim.parallel.plan import Plan

_MEBIBYTE = 2.0**20


def replicated(plan: Plan, strategy: DdpStrategy, device: torch.device) -> Loop:
    """Every rank holds all weights."""
    with building(plan, device):
        model = build(plan, plan.stages[0])
    reduced = reducing(model, plan, strategy)
    return Loop(reduced, Update(list(model.parameters()), plan.training), last_alone(reduced))


def reducing(
    model: Transformer, plan: Plan, strategy: DdpStrategy, without: Sequence[str] = ()
) -> DistributedDataParallel:
    """The model with its gradients reduced; without: names of weights that are not."""
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, list(without))  # type: ignore[no-untyped-call]
    whole = sum(weight.nbytes for name, weight in model.named_parameters() if name not in without)
    of_gradients = strategy.bucket_bytes(
        plan.layout.dp, plan.training.recipe.weight_formats.gradients.bytes, is_first_chunk=True
    )
    bucket = of_gradients if strategy.overlap else whole
    return DistributedDataParallel(model, bucket_cap_mb=bucket / _MEBIBYTE, gradient_as_bucket_view=True)


def last_alone(reduced: DistributedDataParallel) -> Callable[[bool], AbstractContextManager[object]]:
    """Gradients are reduced in the last microbatch's backward alone."""

    def around(last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else reduced.no_sync()

    return around
