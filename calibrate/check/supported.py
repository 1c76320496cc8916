"""Which scenarios can be checked, and with which trainer.

One axis at a time: data parallelism (DDP, FSDP2), tensor parallelism (DTensor) or a pipeline. Where torch's
own strategies and optimizers differ from the scenario, it is rejected with the nearest change that they
support.
"""

from collections.abc import Iterator

import torch

from calibrate.check.ddp import build_ddp_trainer
from calibrate.check.expert_parallel import build_expert_parallel_trainer
from calibrate.check.fsdp import build_fsdp_trainer
from calibrate.check.single_process import build_single_trainer
from calibrate.check.tensor_parallel import build_tensor_parallel_trainer
from calibrate.check.trainer import Trainer
from clustersim.build import build_plan
from clustersim.common.errors import InputError
from clustersim.hardware.degradation import Degradations
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.layer_stack import BlockForm
from clustersim.model.linear_loss import LOSSES_BY_PART
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.optimizers import Optimizer
from clustersim.model.overheads import Grouping
from clustersim.model.precision_recipe import MatmulFormats
from clustersim.model.training import (
    AttentionBackend,
    DotsSaveableRecompute,
    FullRecompute,
    LossImplementation,
    SelectiveOpRecompute,
    SelectiveRecompute,
)
from clustersim.model.transformer import PositionEncoding, TransformerModel
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard
from clustersim.program.task import TokenDispatcher
from clustersim.scenario import Scenario
from clustersim.schedules.schedule import Schedule

_CHECKED_ATTENTION = (AttentionBackend.FLASH, AttentionBackend.SDPA, AttentionBackend.FLASH2, AttentionBackend.STANDARD)
ONE_AXIS_TEXT = "one of dp (ddp or fsdp), tp and pp can be checked at a time"


def build_trainer(scenario: Scenario, device: torch.device) -> Trainer:
    """The model and strategy of this process."""
    plan = build_plan(scenario)
    match plan.layout:
        case layout if layout.world_size == 1:
            return build_single_trainer(plan, device)
        case layout if layout.tp > 1:
            return build_tensor_parallel_trainer(plan, device)
        case layout if layout.pp > 1:
            from calibrate.check.pipeline_parallel import PipelineTrainer  # imports PyTorch's compiler: seconds

            return PipelineTrainer(plan, scenario.schedule, device)
    match plan.layout.data:
        case DdpStrategy() as strategy if plan.layout.ep > 1:
            return build_expert_parallel_trainer(plan, strategy, device)
        case DdpStrategy() as strategy:
            return build_ddp_trainer(plan, strategy, device)
        case FullyShard() as strategy:
            return build_fsdp_trainer(plan, strategy, device)
    raise InputError(f"layout.data: this strategy cannot be checked; {ONE_AXIS_TEXT}")


def require_supported(scenario: Scenario) -> None:
    """Raise InputError that lists everything that cannot be checked."""
    problems = [
        *_layout_problems(scenario),
        *_format_problems(scenario),
        *_model_problems(scenario),
        *_machine_problems(scenario),
    ]
    if problems:
        raise InputError("\n".join(problems))


def _is_torchs_own(schedule: Schedule) -> bool:
    from calibrate.check.pipeline_parallel import TORCH_SCHEDULES  # imports PyTorch's compiler: seconds

    return type(schedule) in TORCH_SCHEDULES


def _layout_problems(scenario: Scenario) -> Iterator[str]:
    layout = scenario.layout
    used_axes = [f"{axis} {degree}" for axis, degree in layout.degrees.items() if degree > 1]
    if layout.cp > 1 or len(used_axes) > 1:
        yield f"layout: {' x '.join(used_axes)} cannot be checked: {ONE_AXIS_TEXT}"
    if layout.dp > 1 and not (isinstance(layout.data, DdpStrategy) or layout.data.zero_stage == 3):
        yield "layout.data: only ddp and fsdp can be checked"
    if layout.pp > 1 and not _is_torchs_own(scenario.schedule):
        yield f"schedule: {scenario.schedule.name} cannot be checked; gpipe, 1f1b and interleaved can"
    if layout.tp_comm_overlap and layout.tp > 1:
        yield "layout.tp_comm_overlap: DTensor does not cut collectives; set it to false"
    min_kv_heads = min(
        (distinct_attention.kv_heads for distinct_attention in scenario.model.distinct_attentions), default=layout.tp
    )
    if layout.tp > min_kv_heads:
        yield f"layout.tp: DTensor cannot repeat {min_kv_heads} kv_heads over {layout.tp} ranks"


def _format_problems(scenario: Scenario) -> Iterator[str]:
    recipe, formats = scenario.training.recipe, scenario.training.recipe.weight_formats
    if recipe.matmul_formats != MatmulFormats.uniform(formats.stored):
        yield "training.precision: only matmuls in one format, that of the weights, can be checked"
    master_format = formats.updated
    if {formats.gradients.bytes, formats.moments.bytes} != {master_format.bytes}:
        yield (
            "training.precision: torch's optimizers want gradients and moments in the weights' format, "
            f"{master_format.value}"
        )
    ddp = scenario.layout.dp > 1 and isinstance(scenario.layout.data, DdpStrategy)
    if ddp and formats.stored.bytes != formats.gradients.bytes:
        yield (
            f"layout.data: DDP reduces gradients in the weights' format, {formats.stored.value}; "
            "use fsdp, or set training.precision.compute to that of the gradients"
        )


def _model_problems(scenario: Scenario) -> Iterator[str]:
    layout, model = scenario.layout, scenario.model
    if scenario.training.lora is not None:
        yield "training.lora: adapters of frozen weights cannot be checked; set it to none"
    if model.patches is not None or model.encoder is not None:
        yield f"model: {model.name} reads images, which cannot be checked; name a model of tokens"
    if model.mtp_layers:
        yield "model.mtp_layers: layers that predict further tokens cannot be checked; set it to 0"
    if any(None in (spec.attention, spec.mlp) for spec in model.distinct_specs):
        yield "model: layers without attention or without an MLP cannot be checked"
    yield from _layer_problems(model)
    sharded_weights = layout.dp > 1 and layout.data.zero_stage > 0
    if model.tied_embeddings and (layout.pp > 1 or sharded_weights):
        yield "model.tied_embeddings: stages and FSDP units cannot share a weight; set it to false"
    if layout.tp > 1 and layout.sequence_parallel and model.positions is PositionEncoding.LEARNED:
        yield "layout.sequence_parallel: learned positions are not split by sequence; set model.positions to rotary"
    if scenario.training.attention not in _CHECKED_ATTENTION:
        yield (
            f"training.attention: torch has its own choice, not {scenario.training.attention.value}; "
            "flash, flash2 and standard can be checked"
        )
    yield from _recompute_problems(scenario)
    yield from _loss_and_optimizer_problems(scenario)
    yield from _expert_problems(scenario)
    if scenario.training.offload != NO_OFFLOAD:
        yield "training.offload: what is on the host cannot be checked; set it to none"
    if layout.tp > 1 and scenario.training.loss is not LossImplementation.TORCH:
        yield "training.loss: DTensor's loss over a split vocabulary is PyTorch's; set it to torch"


def _loss_and_optimizer_problems(scenario: Scenario) -> Iterator[str]:
    if scenario.training.optimizer not in (Optimizer.ADAM, Optimizer.SGD):
        yield "training.optimizer: only torch's adam and sgd can be checked"
    if scenario.training.loss in LOSSES_BY_PART:
        yield "training.loss: losses that compute the logits again cannot be checked; set it to fused_linear"


def _recompute_problems(scenario: Scenario) -> Iterator[str]:
    match scenario.training.recompute:
        case DotsSaveableRecompute():
            yield "training.recompute: JAX's policy cannot be checked; none, selective, full and {layers: 4} can"
        case SelectiveOpRecompute():
            yield "training.recompute: selective_op cannot be checked; none, selective, full and {layers: 4} can"
        case SelectiveRecompute(modules) if modules != SelectiveRecompute().modules:
            yield "training.recompute.modules: only core_attn alone can be checked; write selective"
        case FullRecompute() if scenario.layout.dp == 1:
            yield from _early_stop_problems(scenario)


def _early_stop_problems(scenario: Scenario) -> Iterator[str]:
    """Fused wgrad accumulation saves its inputs at the end, too late for early_stop."""
    if scenario.training.is_fully_fused and scenario.training.early_stop:
        yield "training.recompute: fused matmuls save too late for early_stop; set it or training.fused to false"


def _layer_problems(model: TransformerModel) -> Iterator[str]:
    """Layer features that the PyTorch model has no module for."""
    other = (one.label for one in model.distinct_attentions if not isinstance(one, FullAttention))
    if (label := next(other, None)) is not None:
        yield f"model: {label} cannot be checked"
    if any(spec.block is not BlockForm.PRE_NORM for spec in model.distinct_specs):
        yield "model.block: only pre_norm layers can be checked"
    if any(attention.window is not None for attention in model.distinct_attentions):
        yield "model.window: torch's SDPA has no sliding window; set it to full"
    if any(
        isinstance(attention, FullAttention) and attention.attention_sinks for attention in model.distinct_attentions
    ):
        yield "model.attention_sinks: torch's SDPA has no sinks; set it to false"
    if (
        any(attention.rotary_percent != 1 for attention in model.distinct_attentions)
        and model.positions is PositionEncoding.ROTARY
    ):
        yield "model.rotary_percent: only whole heads that are turned can be checked, in every layer"
    if any(attention.qk_norm is QkNorm.ALL_HEADS for attention in model.distinct_attentions):
        yield "model.qk_norm: only norms of each head can be checked; set it to true or false"
    if model.final_logit_softcapping or any(
        attention.attn_logit_softcapping for attention in model.distinct_attentions
    ):
        yield (
            "model.attn_logit_softcapping and model.final_logit_softcapping: capped scores and logits cannot "
            "be checked; set them to false"
        )
    if model.embedding_norm or model.positions is PositionEncoding.ALIBI or model.spare_positions or model.head_bias:
        yield "model: a norm of the embedding, ALiBi, spare positions and a bias of the logits cannot be checked"


def _expert_problems(scenario: Scenario) -> Iterator[str]:
    """Restrictions of MoE layers."""
    moe_layers = [
        distinct_moe for distinct_moe in scenario.model.distinct_moes if distinct_moe.single_dense_mlp is None
    ]
    if not moe_layers:
        return
    layout, training = scenario.layout, scenario.training
    if layout.tp > 1 or layout.pp > 1 or layout.effective_etp > 1:
        yield "layout: experts with tp, pp or etp cannot be checked; set these to 1"
    if layout.dp > 1 and not isinstance(layout.data, DdpStrategy):
        yield "layout.data: experts can be checked with ddp only; set it to ddp"
    if layout.ep not in (1, layout.dp):
        yield f"layout.ep: {layout.ep} of {layout.dp} replicas cannot be checked; 1 and {layout.dp} can"
    if layout.ep > 1 and layout.dispatcher is not TokenDispatcher.ALL_TO_ALL:
        yield "layout.dispatcher: torch has all_to_all alone; set it to alltoall"
    if any(
        moe_layer.capacity_factor is not None or moe_layer.bias or moe_layer.shared_gate for moe_layer in moe_layers
    ):
        yield "model.experts: capacity_factor, bias and shared_gate cannot be checked; set them to none and false"
    if training.fused or isinstance(training.recompute, FullRecompute):
        yield "training: experts with fused kernels or full recomputation cannot be checked; set fused to false"
    overheads = training.overheads
    if overheads.router_loss:
        yield "training.overheads.router_loss: a loss of experts' load cannot be checked; set it to false"
    if training.grouping is not Grouping.KERNEL or not (overheads.permute_unfused and overheads.router_unfused):
        yield (
            "training.overheads: torch runs experts in one kernel, and their routing operation by operation; set "
            "grouping to kernel, permute_unfused and router_unfused to true"
        )


def _machine_problems(scenario: Scenario) -> Iterator[str]:
    if scenario.framework.compiled or scenario.framework.uses_cuda_graphs:
        yield "framework: the real step is neither compiled nor captured; set torch_compile and cuda_graphs to false"
    if scenario.degradations != Degradations() or scenario.jitter is not None or scenario.cluster.accelerator_overrides:
        yield "degradations: this machine has its own; leave them out, and mixed accelerators too"
