"""A fused grouped MLP has no kernels between an expert's two matmuls, and everything else is the same."""

from dataclasses import replace
from itertools import chain

import pytest

from clustersim.model.kernels import Kernel
from clustersim.model.layers import transformer_layer as layer_of
from clustersim.model.operators import LayerOperators, LayerShard, Operator
from clustersim.model.overheads import Grouping, Overheads
from clustersim.model.precision_recipe import PrecisionRecipe, mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.recipe_files import load_recipe
from clustersim.model.training import Training

MODEL = load_preset("qwen3-30b-a3b")
(SPEC,) = set(MODEL.distinct_specs)
ACTIVATION_KERNELS = {"experts.activation", "experts.activation.input_gradient"}
CASTS = {"experts.down.cast_input", "experts.up.cast_output_gradient"}


def grouped_layer(recipe: PrecisionRecipe, grouping: Grouping) -> LayerOperators:
    training = Training(256, 1, recipe=recipe, overheads=Overheads(grouping=grouping))
    return layer_of(MODEL, SPEC, training, LayerShard(1, 256, 256, ep=8))


def all_kernels(layer: LayerOperators) -> list[Kernel]:
    def operator_kernels(operator: Operator) -> list[Kernel]:
        return [*operator.forward, *operator.input_gradient, *operator.weight_gradient]

    return [*chain.from_iterable(map(operator_kernels, layer.operators))]


@pytest.mark.parametrize(
    ("recipe", "gone"), [(load_recipe("mxfp8"), ACTIVATION_KERNELS | CASTS), (mixed_precision(), ACTIVATION_KERNELS)]
)
def test_a_fused_grouped_mlp_has_no_activation_or_cast_kernels(recipe: PrecisionRecipe, gone: set[str]) -> None:
    plain, fused = (grouped_layer(recipe, grouping) for grouping in (Grouping.STREAMS, Grouping.FUSED))
    assert {all_kernel.name for all_kernel in all_kernels(plain)} - {
        kernel.name for kernel in all_kernels(fused)
    } == gone
    assert all_kernels(fused) == [item for item in all_kernels(plain) if item.name not in gone]


def test_a_fused_grouped_mlp_keeps_and_computes_the_same() -> None:
    plain, fused = (grouped_layer(load_recipe("mxfp8"), grouping) for grouping in (Grouping.STREAMS, Grouping.FUSED))
    for operator, fused_operator in zip(plain.operators, fused.operators, strict=True):
        assert replace(operator, forward=(), input_gradient=()) == replace(
            fused_operator, forward=(), input_gradient=()
        )
