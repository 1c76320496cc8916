"""Tensor-parallel training with torch's DTensor.

Megatron's split (Shoeybi et al. 2019): queries, keys, values and the first MLP matrix column-parallel, the
attention output and the second MLP matrix row-parallel, embedding and logits by vocabulary, the loss over
split logits (`loss_parallel`). With sequence parallelism norms and residuals hold a shard of the sequence
(Korthikanti et al. 2022). DTensor reduces the input gradient of a column-parallel matmul after both of its
gradients, not overlapped with the second one.
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

from calibrate.check.operator_labels import memory_bound_label, record_label
from calibrate.check.torch_model import build_stage, tie_embeddings
from calibrate.check.trainer import MicrobatchTrainer, construction_settings
from calibrate.check.weight_update import WeightUpdate
from clustersim.model.memory_bound import loss_spec
from clustersim.model.training import LossImplementation
from clustersim.parallel.plan import Plan


def build_tensor_parallel_trainer(
    plan: Plan, device: torch.device, mesh: DeviceMesh | None = None
) -> MicrobatchTrainer:
    """A trainer whose ranks hold shards of each matrix; mesh: None for all processes."""
    torch.manual_seed(0)  # unsharded weights must be equal on all ranks
    with construction_settings(plan, device):
        model = build_stage(plan, plan.stages[0])
    mesh = mesh or init_device_mesh(device.type, (dist.get_world_size(),))
    parallelize_module(model, mesh, dict(_parallel_styles(model, sequence_parallel=plan.layout.sequence_parallel)))
    tie_embeddings(model, plan.model)
    model.loss = _parallel_loss
    return MicrobatchTrainer(
        model, WeightUpdate(list(model.parameters()), plan.training), lambda _last: loss_parallel()
    )


def _parallel_styles(model: nn.Module, *, sequence_parallel: bool) -> Mapping[str, ParallelStyle]:
    """How each module is parallelized, by name."""
    activation_layout = Shard(1) if sequence_parallel else Replicate()
    style_by_suffix: dict[str, ParallelStyle] = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=activation_layout),
        "attention.qkv": ColwiseParallel(input_layouts=activation_layout),
        "attention.out": RowwiseParallel(output_layouts=activation_layout),
        "mlp.up": ColwiseParallel(input_layouts=activation_layout),
        "mlp.down": RowwiseParallel(output_layouts=activation_layout),
        "head.logits": ColwiseParallel(
            input_layouts=activation_layout, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence_parallel:
        style_by_suffix |= {
            f"{name}norm": SequenceParallel(use_local_output=True) for name in ("attention_", "mlp_", "head.")
        }
    names = [name for name, _ in model.named_modules()]
    return {name: style for name in names for suffix, style in style_by_suffix.items() if name.endswith(suffix)}


def _parallel_loss(logits: Tensor, targets: Tensor) -> Tensor:
    with record_label(memory_bound_label(loss_spec(LossImplementation.TORCH))):
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
