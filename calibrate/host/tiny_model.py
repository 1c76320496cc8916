"""Which model is so small that only the host's time is left?

A few of the scenario's layers with embedding, head and loss, reduced to a few tokens and narrow matrices: as
many kernels per layer as at full size, each of a few microseconds at most. Features that the modules of
`calibrate.check` lack are left out (windows, soft caps, other block forms, layers without attention or MLP,
tied matrices, adapters, offload), and nothing is recomputed: a recomputed forward is launched like the first.
Launches are counted as in `cost.host_launch`, so that launches times seconds is the host's time.
"""

from dataclasses import dataclass, replace
from typing import Final

from calibrate.check.moe import trainer_overheads
from calibrate.check.torch_dtypes import TRAINING_DTYPES
from calibrate.devices.device import TorchDevice
from clustersim.common.errors import InputError
from clustersim.cost.host_launch import launch_count
from clustersim.lowering.units import UnitBuilder, pass_operations
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.layer_stack import BlockForm, DenseMlp, LayerGroup, LayerSpec, MoeMlp
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.precision_recipe import MatmulFormats, PrecisionRecipe, mixed_precision
from clustersim.model.training import NONE_FUSED, AttentionBackend, LossImplementation, NoRecompute, Training
from clustersim.model.transformer import PositionEncoding, TransformerModel
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.task import Operation
from clustersim.scenario import Scenario

TINY_LAYERS: Final = 4  # layers, so that these, not embedding and head, dominate
TINY_TOKENS: Final = 8
TINY_HEADS: Final = 4
TINY_HEAD_DIM: Final = 16  # flash attention has a kernel for it
TINY_EXPERTS: Final = 8
TINY_WIDTH: Final = TINY_HEADS * TINY_HEAD_DIM  # of model, MLP and vocabulary: rows of 128 bytes in BF16


@dataclass(frozen=True, slots=True)
class CountedPass:
    """The operations of a pass, and their number of launches as clustersim counts them."""

    operations: tuple[Operation, ...]

    @property
    def launch_count(self) -> int:
        """Launches of kernels and collectives."""
        return sum(launch_count(operation.body) for operation in self.operations)


def tiny_plan(scenario: Scenario, device: TorchDevice, layout: Layout) -> Plan:
    """The reduced model and training of a scenario; raise InputError where none of its layers can be built."""
    training = _tiny_training(scenario.training, on_cpu=device.torch.type == "cpu", is_tensor_parallel=layout.tp > 1)
    return Plan(_tiny_model(scenario.model), training, layout)


def count_passes(plan: Plan) -> tuple[CountedPass, CountedPass]:
    """Forward and backward of one microbatch."""
    units = UnitBuilder(plan).stage_units(plan.stages[0])
    return CountedPass(pass_operations(units, ActionKind.FORWARD)), CountedPass(
        pass_operations(units, ActionKind.BACKWARD)
    )


def _tiny_model(model: TransformerModel) -> TransformerModel:
    return replace(
        model,
        stack=(LayerGroup(_tiny_layer(model), min(TINY_LAYERS, model.layer_count)),),
        hidden=TINY_WIDTH,
        vocab=TINY_WIDTH,
        max_positions=TINY_TOKENS,
        positions=PositionEncoding.LEARNED if model.positions is PositionEncoding.LEARNED else PositionEncoding.ROTARY,
        tied_embeddings=False,
        embedding_norm=False,
        final_logit_softcapping=False,
        spare_positions=0,
        head_bias=False,
        mtp_layers=0,
    )


def _tiny_layer(model: TransformerModel) -> LayerSpec:
    for run in sorted(model.stack, key=lambda run: -run.count):
        match run.spec:
            case LayerSpec(FullAttention() as attention, DenseMlp() | MoeMlp() as mlp):
                return LayerSpec(_tiny_attention(attention), _tiny_mlp(mlp), BlockForm.PRE_NORM)
    raise InputError(f"model: no layer of {model.name} has both attention and an MLP, and only such can be built here")


def _tiny_attention(attention: FullAttention) -> FullAttention:
    is_grouped_query = attention.kv_heads < attention.heads
    qk_norm = None if attention.qk_norm is None else QkNorm.PER_HEAD
    return FullAttention(
        TINY_HEADS, TINY_HEADS // 2 if is_grouped_query else TINY_HEADS, TINY_HEAD_DIM, attention.qkv_bias, qk_norm
    )


def _tiny_mlp(mlp: DenseMlp | MoeMlp) -> DenseMlp | MoeMlp:
    """As narrow as all else; of an MoE layer as many experts as the tokens need."""
    match mlp:
        case DenseMlp():
            return replace(mlp, ffn=TINY_WIDTH)
        case MoeMlp(experts, top_k, shared=shared):
            expert_count = min(experts, TINY_EXPERTS)
            expert_top_k, shared_width = min(top_k, expert_count), TINY_WIDTH if shared else 0
            return MoeMlp(
                expert_count,
                expert_top_k,
                TINY_WIDTH,
                mlp.form,
                shared_width,
                router=replace(mlp.router, num_groups=1, group_topk=None),
            )


def _tiny_training(training: Training, *, on_cpu: bool, is_tensor_parallel: bool) -> Training:
    return replace(
        training,
        sequence=TINY_TOKENS,
        global_batch=1,
        microbatch=1,
        recipe=_torch_recipe(training.recipe),
        recompute=NoRecompute(),
        attention=AttentionBackend.FLASH if training.attention is AttentionBackend.FLASH1 else training.attention,
        loss=LossImplementation.TORCH if is_tensor_parallel or on_cpu else training.loss,
        fused=NONE_FUSED if on_cpu else training.fused,
        offload=NO_OFFLOAD,
        lora=None,
        overheads=trainer_overheads(training.overheads),
    )


def _torch_recipe(recipe: PrecisionRecipe) -> PrecisionRecipe:
    """The scenario's formats where torch has matmuls in them, else BF16."""
    storage_dtype = recipe.weight_formats.stored
    return (
        recipe
        if storage_dtype in TRAINING_DTYPES and recipe.matmul_formats == MatmulFormats.uniform(storage_dtype)
        else mixed_precision()
    )
