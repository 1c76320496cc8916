"""A fused grouped MLP: what is between the two products of an expert takes no kernels, and all else is the same."""

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
BETWEEN = {"experts.activation", "experts.activation.input_gradient"}
CASTS = {"experts.down.cast_input", "experts.up.cast_output_gradient"}


def made(recipe: PrecisionRecipe, grouping: Grouping) -> LayerOperators:
    training = Training(256, 1, recipe=recipe, overheads=Overheads(grouping=grouping))
    return layer_of(MODEL, SPEC, training, LayerShard(1, 256, 256, ep=8))


def kernels(layer: LayerOperators) -> list[Kernel]:
    def of(each: Operator) -> list[Kernel]:
        return [*each.forward, *each.input_gradient, *each.weight_gradient]

    return [*chain.from_iterable(map(of, layer.operators))]


@pytest.mark.parametrize(("recipe", "gone"), [(load_recipe("mxfp8"), BETWEEN | CASTS), (mixed_precision(), BETWEEN)])
def test_activation_and_the_casts_around_it_are_gone(recipe: PrecisionRecipe, gone: set[str]) -> None:
    plain, fused = (made(recipe, item) for item in (Grouping.STREAMS, Grouping.FUSED))
    assert {kernel.name for kernel in kernels(plain)} - {element.name for element in kernels(fused)} == gone
    assert kernels(fused) == [entry for entry in kernels(plain) if entry.name not in gone]


def test_as_much_is_kept_and_computed() -> None:
    plain, fused = (made(load_recipe("mxfp8"), item) for item in (Grouping.STREAMS, Grouping.FUSED))
    for one, other in zip(plain.operators, fused.operators, strict=True):
        assert replace(one, forward=(), input_gradient=()) == replace(other, forward=(), input_gradient=())
