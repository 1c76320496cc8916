"""What of a scenario can one device run by itself?

One tensor-parallel rank's part of some layers, with embedding and head: so many heads, columns of matrices and rows of
the vocabulary, in one microbatch. Assumed of the factors that are measured on it: they are those of the scenario's own
ranks, though norms are over all tokens also where ranks share them out (sequence parallelism), and tokens of a
context-parallel rank see themselves only. What the real model has no module for (windows, blocks other than pre-norm,
adapters, FP8, what a framework does beside the model) is run as the nearest that there is: the same kernel in the chain
and alone, so their ratio stands.
"""

from dataclasses import replace
from typing import Final

from calibrate.check.context import MemoryBudget, fit_layer_count, truncate_model
from calibrate.check.moe import MOE_OVERHEADS
from calibrate.check.rank_model import model_of_rank
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes
from clustersim.model.layer_stack import (
    BlockForm,
    DenseMlp,
    FullAttention,
    LayerGroup,
    LayerSpec,
    MoeMlp,
    QkNorm,
    merge_groups,
)
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.precision_recipe import PrecisionRecipe
from clustersim.model.training import (
    AttentionBackend,
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
    8  # layers: so many are a mix of kernels as in a whole model, and none finds its weights in a cache
)


def single_rank_scenario(scenario: Scenario, memory_limit: Bytes) -> Scenario:
    """One rank's layers that fit into so many bytes; raise InputError where not even one does, or there is none."""
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
            f"{model.name}: no layer has both attention with heads' own keys and an MLP, so there is no chain of "
            "kernels to run; name another model"
        )
    return replace(
        model,
        stack=stack,
        positions=PositionEncoding.ROTARY if model.positions is PositionEncoding.ALIBI else model.positions,
        embedding_norm=False,
        logit_softcap=False,
        spare_positions=0,
        head_bias=False,
        mtp_layers=0,
    )


def _supported_layer(spec: LayerSpec) -> LayerSpec | None:
    """A layer as the real model has it; None where it lacks a part."""
    match spec:
        case LayerSpec(FullAttention() as attention, DenseMlp() | MoeMlp() as mlp):
            supported_attention = replace(
                attention,
                qk_norm=None if attention.qk_norm is None else QkNorm.PER_HEAD,
                window=None,
                rotary=1.0,
                softcap=False,
                sinks=False,
            )
            return LayerSpec(supported_attention, _supported_mlp(mlp), BlockForm.PRE_NORM)
    return None


def _supported_mlp(mlp: DenseMlp | MoeMlp) -> DenseMlp | MoeMlp:
    match mlp:
        case DenseMlp():
            return mlp
        case MoeMlp():
            return replace(mlp, bias=False, shared_gate=False, capacity=None)


def _supported_training(training: Training, *, is_moe: bool) -> Training:
    """One microbatch of a training as torch's own operators run it.

    routed: among experts, whose routing PyTorch has no fused kernels for, nor a sum in their products' epilogues.
    """
    return replace(
        training,
        fused=training.fused and not is_moe,
        global_batch=training.microbatch,
        recipe=_torch_recipe(training.recipe),
        recompute=_supported_recompute(training.recompute, is_moe=is_moe),
        early_stop=training.early_stop and not training.fused,  # fused products save too late for it
        attention=AttentionBackend.FLASH2 if training.attention is AttentionBackend.FLASH1 else training.attention,
        offload=NO_OFFLOAD,
        lora=None,
        overheads=MOE_OVERHEADS,
    )


def _supported_recompute(recompute: Recompute, *, is_moe: bool) -> Recompute:
    """What the real model can run again, or nothing: the kernels are the same."""
    match recompute:
        case SelectiveOpRecompute():
            return NoRecompute()
        case SelectiveRecompute(modules) if modules != SelectiveRecompute().modules:
            return NoRecompute()
        case FullRecompute() if is_moe:
            return NoRecompute()
    return recompute


def _torch_recipe(recipe: PrecisionRecipe) -> PrecisionRecipe:
    """Products in the activations' format, and an optimizer whose gradients and moments are in that of its weights."""
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
