"""How do ranks share every layer with torch's DTensor?

Megatron's split (Shoeybi et al. 2019): queries, keys, values and the first MLP matrix by columns, the attention output
and the second MLP matrix by rows, embedding and logits by vocabulary, the loss over split logits (`loss_parallel`).
With sequence parallelism norms and residuals hold a part of the sequence (Korthikanti et al. 2022). DTensor reduces
the gradient of a column-parallel product's input after both gradients of the product, not beside the second one.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from calibrate.check.operator_labels import labelled, streaming
from calibrate.check.torch_model import build, tie
from calibrate.check.trainer import Loop, building
from calibrate.check.weight_update import Update
from clustersim.model.memory_bound import loss_spec
from clustersim.model.training import LossImplementation
from clustersim.parallel.plan import Plan


def split(plan: Plan, device: torch.device, mesh: DeviceMesh | None = None) -> Loop:
    """Every rank holds a part of each matrix; mesh: None: all processes."""
    torch.manual_seed(0)  # what is not split must be equal
    with building(plan, device):
        model = build(plan, plan.stages[0])
    mesh = mesh or init_device_mesh(device.type, (dist.get_world_size(),))
    parallelize_module(model, mesh, dict(_styles(model, sequence=plan.layout.sequence_parallel)))
    tie(model, plan.model)
    model.loss = _loss
    return Loop(model, Update(list(model.parameters()), plan.training), lambda _last: loss_parallel())


def _styles(model: nn.Module, *, sequence: bool) -> Mapping[str, ParallelStyle]:
    """How each module is split, by its name."""
    between = Shard(1) if sequence else Replicate()
    by_end: dict[str, ParallelStyle] = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "attention.qkv": ColwiseParallel(input_layouts=between),
        "attention.out": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(input_layouts=between),
        "mlp.down": RowwiseParallel(output_layouts=between),
        "head.logits": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        by_end |= {f"{name}norm": SequenceParallel(use_local_output=True) for name in ("attention_", "mlp_", "head.")}
    names = [name for name, _ in model.named_modules()]
    return {name: style for name in names for end, style in by_end.items() if name.endswith(end)}


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    with labelled(streaming(loss_spec(LossImplementation.TORCH))):
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
