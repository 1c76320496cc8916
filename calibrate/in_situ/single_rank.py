"""What of a scenario can one device run without communication?

One tensor-parallel rank's shard of some layers, with embedding and head: its heads, matrix columns and
vocabulary rows, in one microbatch. Assumed of the factors measured on it: they hold for the scenario's own
ranks, though norms cover all tokens even where ranks share them (sequence parallelism), and tokens of a
context-parallel rank only attend to that rank's tokens. Features that the real model has no module for
(windows, blocks other than pre-norm, adapters, FP8, framework overheads) are run as the nearest supported
form: the same kernel in situ and isolated, so their ratio is still valid.
"""

from dataclasses import replace
from typing import Final

from calibrate.check.context import MemoryBudget, fit_layer_count, truncate_model
from calibrate.check.moe import trainer_overheads
from calibrate.check.rank_model import model_of_rank
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.layer_stack import BlockForm, DenseMlp, LayerGroup, LayerSpec, MoeMlp, merge_groups
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.precision_recipe import PrecisionRecipe
from clustersim.model.training import (
    NONE_FUSED,
    AttentionBackend,
    DotsSaveableRecompute,
    FullRecompute,
    NoRecompute,
    Recompute,
    SelectiveOpRecompute,
    SelectiveRecompute,
    Training,
)
from clustersim.model.transformer import PositionEncoding, TransformerModel
from clustersim.parallel.layout import Layout
from clustersim.scenario import Scenario
from clustersim.schedules.gpipe import GPipe

MAX_CHAIN_LAYERS: Final = (
    8  # layers: enough that the kernel mix is that of a full model, and that no weights stay in a cache
)


def single_rank_scenario(scenario: Scenario, memory_limit: Bytes) -> Scenario:
    """One rank's layers that fit into `memory_limit` bytes; raise InputError if not even one fits or is supported."""
    layout = scenario.layout
    sequence = -(-scenario.training.sequence // layout.cp)
    single_rank = replace(
        scenario,
        model=model_of_rank(_supported_layers(scenario.model), layout),
        layout=Layout(),
        schedule=GPipe(),
        training=_supported_training(
            replace(scenario.training, sequence=sequence), is_moe=bool(scenario.model.distinct_moes)
        ),
    )
    return fit_layer_count(
        truncate_model(single_rank, min(MAX_CHAIN_LAYERS, single_rank.model.layer_count)),
        MemoryBudget(memory_limit),
        None,
    )


def _supported_layers(model: TransformerModel) -> TransformerModel:
    stack = merge_groups(
        LayerGroup(spec, run.count) for run in model.stack if (spec := _supported_layer(run.spec)) is not None
    )
    if not stack:
        raise InputError(
            f"{model.name}: no layer has both attention with heads' own keys and an MLP, so there is no sequence of "
            "kernels to run; name another model"
        )
    return replace(
        model,
        stack=stack,
        positions=PositionEncoding.ROTARY if model.positions is PositionEncoding.ALIBI else model.positions,
        embedding_norm=False,
        final_logit_softcapping=False,
        spare_positions=0,
        head_bias=False,
        mtp_layers=0,
    )


def _supported_layer(spec: LayerSpec) -> LayerSpec | None:
    """The layer as the real model supports it; None where it lacks attention or an MLP."""
    match spec:
        case LayerSpec(FullAttention() as attention, DenseMlp() | MoeMlp() as mlp):
            supported_attention = replace(
                attention,
                qk_norm=None if attention.qk_norm is None else QkNorm.PER_HEAD,
                window=None,
                rotary_percent=1.0,
                attn_logit_softcapping=False,
                attention_sinks=False,
            )
            return LayerSpec(supported_attention, _supported_mlp(mlp), BlockForm.PRE_NORM)
    return None


def _supported_mlp(mlp: DenseMlp | MoeMlp) -> DenseMlp | MoeMlp:
    match mlp:
        case DenseMlp():
            return mlp
        case MoeMlp():
            return replace(mlp, bias=False, shared_gate=False, capacity_factor=None)


def _supported_training(training: Training, *, is_moe: bool) -> Training:
    """One microbatch of the training as torch's own operators run it.

    is_moe: PyTorch has no fused kernels for routing, nor sums in the epilogues of experts' matmuls.
    """
    return replace(
        training,
        fused=NONE_FUSED if is_moe else training.fused,
        global_batch=training.microbatch,
        recipe=_torch_recipe(training.recipe),
        recompute=_supported_recompute(training.recompute, is_moe=is_moe),
        # fused matmuls save their inputs too late for it
        early_stop=training.early_stop and not training.is_fully_fused,
        attention=AttentionBackend.FLASH2 if training.attention is AttentionBackend.FLASH1 else training.attention,
        offload=NO_OFFLOAD,
        lora=None,
        overheads=trainer_overheads(training.overheads),
    )


def _supported_recompute(recompute: Recompute, *, is_moe: bool) -> Recompute:
    """The recomputation that the real model supports, or none: the kernels are the same."""
    match recompute:
        case SelectiveOpRecompute() | DotsSaveableRecompute():
            return NoRecompute()
        case SelectiveRecompute(modules) if modules != SelectiveRecompute().modules:
            return NoRecompute()
        case FullRecompute() if is_moe:
            return NoRecompute()
    return recompute


def _torch_recipe(recipe: PrecisionRecipe) -> PrecisionRecipe:
    """Matmuls in the activations' dtype, and an optimizer with gradients and moments in the master weights' dtype."""
    storage_dtype = recipe.activations
    master_dtype = recipe.weight_formats.master or storage_dtype
    weights = replace(
        recipe.weight_formats,
        stored=storage_dtype,
        gathered=storage_dtype,
        gradients=master_dtype,
        moments=master_dtype,
    )
    return replace(recipe.high_precision, weight_formats=weights)
