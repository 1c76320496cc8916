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

from calibrate.check.context import Room, fitted_layers, truncated
from calibrate.check.moe import HABITS
from calibrate.check.rank_model import one_rank
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes
from clustersim.model.layer_stack import (
    BlockForm,
    DenseMlp,
    FullAttention,
    LayerRun,
    LayerSpec,
    QkNorm,
    RoutedMlp,
    joined,
)
from clustersim.model.offload import NOTHING
from clustersim.model.precision_recipe import Recipe
from clustersim.model.training import (
    Attention,
    FullRecompute,
    NoRecompute,
    Recompute,
    SelectiveOperations,
    SelectiveRecompute,
    Training,
)
from clustersim.model.transformer import Model, Positions
from clustersim.parallel.layout import Layout
from clustersim.scenario import Scenario
from clustersim.schedules.gpipe import GPipe

MOST: Final = 8  # layers: so many are a mix of kernels as in a whole model, and none finds its weights in a cache


def alone(scenario: Scenario, room: Bytes) -> Scenario:
    """One rank's layers that fit into so many bytes; raise InputError where not even one does, or there is none."""
    layout = scenario.layout
    sequence = -(-scenario.training.sequence // layout.cp)
    cut = replace(
        scenario,
        model=one_rank(_runnable_layers(scenario.model), layout),
        layout=Layout(),
        schedule=GPipe(),
        training=_runnable(replace(scenario.training, sequence=sequence), routed=bool(scenario.model.mixtures)),
    )
    return fitted_layers(truncated(cut, min(MOST, cut.model.layers)), Room(room), None)


def _runnable_layers(model: Model) -> Model:
    stack = joined(LayerRun(spec, run.count) for run in model.stack if (spec := _plain(run.spec)) is not None)
    if not stack:
        raise InputError(
            f"{model.name}: no layer has both attention with heads' own keys and an MLP, so there is no chain of "
            "kernels to run; name another model"
        )
    return replace(
        model,
        stack=stack,
        positions=Positions.ROTARY if model.positions is Positions.ALIBI else model.positions,
        embedding_norm=False,
        logit_softcap=False,
        spare_positions=0,
        head_bias=False,
        mtp_layers=0,
    )


def _plain(spec: LayerSpec) -> LayerSpec | None:
    """A layer as the real model has it; None where it lacks a part."""
    match spec:
        case LayerSpec(FullAttention() as attention, DenseMlp() | RoutedMlp() as mlp):
            plain = replace(
                attention,
                qk_norm=None if attention.qk_norm is None else QkNorm.HEADS,
                window=None,
                rotary=1.0,
                softcap=False,
                sinks=False,
            )
            return LayerSpec(plain, _plain_mlp(mlp), BlockForm.PRE_NORM)
    return None


def _plain_mlp(mlp: DenseMlp | RoutedMlp) -> DenseMlp | RoutedMlp:
    match mlp:
        case DenseMlp():
            return mlp
        case RoutedMlp():
            return replace(mlp, bias=False, shared_gate=False, capacity=None)


def _runnable(training: Training, *, routed: bool) -> Training:
    """One microbatch of a training as torch's own operators run it.

    routed: among experts, whose routing PyTorch has no fused kernels for, nor a sum in their products' epilogues.
    """
    return replace(
        training,
        fused=training.fused and not routed,
        global_batch=training.microbatch,
        recipe=_of_torch(training.recipe),
        recompute=_recomputed(training.recompute, routed=routed),
        early_stop=training.early_stop and not training.fused,  # fused products save too late for it
        attention=Attention.FLASH2 if training.attention is Attention.FLASH1 else training.attention,
        offload=NOTHING,
        lora=None,
        overheads=HABITS,
    )


def _recomputed(recompute: Recompute, *, routed: bool) -> Recompute:
    """What the real model can run again, or nothing: the kernels are the same."""
    match recompute:
        case SelectiveOperations():
            return NoRecompute()
        case SelectiveRecompute(modules) if modules != SelectiveRecompute().modules:
            return NoRecompute()
        case FullRecompute() if routed:
            return NoRecompute()
    return recompute


def _of_torch(recipe: Recipe) -> Recipe:
    """Products in the activations' format, and an optimizer whose gradients and moments are in that of its weights."""
    stored = recipe.activations
    held = recipe.weights.master or stored
    weights = replace(recipe.weights, stored=stored, gathered=stored, gradients=held, moments=held)
    return replace(recipe.wide, weights=weights)
