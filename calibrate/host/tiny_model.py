"""What is launched, so small that only the host's time is left?

A few of the scenario's layers with embedding, head and loss, cut to a few tokens and narrow matrices: as many kernels a
layer as at full size, each of a few microseconds at most. What the modules of `calibrate.check` do not have is left
out (windows, soft caps, other forms of blocks, layers without attention or MLP, tied matrices, adapters, offload), and
nothing is computed again: a forward that is run again is launched like the first. Launches are counted as
`cost.launching` counts them, so that launches times seconds is what the host took.
"""

from dataclasses import dataclass, replace
from typing import Final

from calibrate.check.moe import HABITS
from calibrate.check.torch_dtypes import TORCH
from calibrate.devices.device import TorchDevice
from clustersim.common.errors import InputError
from clustersim.cost.host_launch import launch_count
from clustersim.lowering.units import Units, operations_of
from clustersim.model.layer_stack import BlockForm, DenseMlp, FullAttention, LayerGroup, LayerSpec, MoeMlp, QkNorm
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.precision_recipe import MatmulFormats, PrecisionRecipe, mixed_precision
from clustersim.model.training import AttentionBackend, LossImplementation, NoRecompute, Training
from clustersim.model.transformer import PositionEncoding, TransformerModel
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.task import Operation
from clustersim.scenario import Scenario

LAYERS: Final = 4  # so that they, not embedding and head, are most of it
TOKENS: Final = 8
HEADS: Final = 4
HEAD_DIM: Final = 16  # flash attention has a kernel for it
EXPERTS: Final = 8
WIDTH: Final = HEADS * HEAD_DIM  # of the model, its MLP and its vocabulary: rows of whole 128 bytes in BF16


@dataclass(frozen=True, slots=True)
class Counted:
    """A pass: its operations, and how many launches clustersim counts in them."""

    operations: tuple[Operation, ...]

    @property
    def launches(self) -> int:
        """Of kernels and collectives."""
        return sum(launch_count(operation.body) for operation in self.operations)


def tiny_plan(scenario: Scenario, device: TorchDevice, layout: Layout) -> Plan:
    """The scenario's model and training cut down; raise InputError where none of its layers can be built."""
    training = _training(scenario.training, on_cpu=device.torch.type == "cpu", split=layout.tp > 1)
    return Plan(_model(scenario.model), training, layout)


def counted(plan: Plan) -> tuple[Counted, Counted]:
    """Forward and backward of one microbatch."""
    units = Units(plan).of(plan.stages[0])
    return Counted(operations_of(units, ActionKind.FORWARD)), Counted(operations_of(units, ActionKind.BACKWARD))


def _model(model: TransformerModel) -> TransformerModel:
    return replace(
        model,
        stack=(LayerGroup(_layer(model), min(LAYERS, model.layer_count)),),
        hidden=WIDTH,
        vocab=WIDTH,
        max_positions=TOKENS,
        positions=PositionEncoding.LEARNED if model.positions is PositionEncoding.LEARNED else PositionEncoding.ROTARY,
        tied_embeddings=False,
        embedding_norm=False,
        logit_softcap=False,
        spare_positions=0,
        head_bias=False,
        mtp_layers=0,
    )


def _layer(model: TransformerModel) -> LayerSpec:
    for run in sorted(model.stack, key=lambda run: -run.count):
        match run.spec:
            case LayerSpec(FullAttention() as attention, DenseMlp() | MoeMlp() as mlp):
                return LayerSpec(_attention(attention), _mlp(mlp), BlockForm.PRE_NORM)
    raise InputError(f"model: no layer of {model.name} has both attention and an MLP, and only such can be built here")


def _attention(attention: FullAttention) -> FullAttention:
    shared = attention.kv_heads < attention.heads
    normed = None if attention.qk_norm is None else QkNorm.PER_HEAD
    return FullAttention(HEADS, HEADS // 2 if shared else HEADS, HEAD_DIM, attention.qkv_bias, normed)


def _mlp(mlp: DenseMlp | MoeMlp) -> DenseMlp | MoeMlp:
    """As wide as all else; of a mixture as many of its experts as tokens need."""
    match mlp:
        case DenseMlp():
            return replace(mlp, ffn=WIDTH)
        case MoeMlp(experts, top_k, shared=shared):
            few = min(experts, EXPERTS)
            chosen, wide = min(top_k, few), WIDTH if shared else 0
            return MoeMlp(few, chosen, WIDTH, mlp.form, wide, router=replace(mlp.router, groups=1, limit=None))


def _training(training: Training, *, on_cpu: bool, split: bool) -> Training:
    return replace(
        training,
        sequence=TOKENS,
        global_batch=1,
        microbatch=1,
        recipe=_recipe(training.recipe),
        recompute=NoRecompute(),
        attention=AttentionBackend.FLASH if training.attention is AttentionBackend.FLASH1 else training.attention,
        loss=LossImplementation.TORCH if split or on_cpu else training.loss,
        fused=training.fused and not on_cpu,
        offload=NO_OFFLOAD,
        lora=None,
        overheads=HABITS,
    )


def _recipe(recipe: PrecisionRecipe) -> PrecisionRecipe:
    """The scenario's formats where torch multiplies in them, else BF16."""
    stored = recipe.weight_formats.stored
    return recipe if stored in TORCH and recipe.matmul_formats == MatmulFormats.uniform(stored) else mixed_precision()
