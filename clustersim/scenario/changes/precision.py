"""Changes of the precision recipe."""

from collections.abc import Callable
from dataclasses import replace

from clustersim.common.dtypes import DType
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.recipe_files import load_recipe
from clustersim.scenario.scenario import Scenario
from clustersim.scenario.validation_rules.precision import effective_recipe

_TORCHAO_RECIPE = "fp8-rowwise"  # torchao's default recipe
_TRANSFORMER_ENGINE_RECIPE = (
    "fp8-current"  # Transformer Engine's Float8CurrentScaling, which Megatron Bridge's recipes take on Hopper
)


def default_recipe_name(scenario: Scenario, dtype: DType) -> str:
    """The name of the recipe that the job's framework uses by default for a format."""
    if dtype is not DType.FP8:
        return str(dtype.value)
    return _TORCHAO_RECIPE if scenario.framework.name == "pytorch" else _TRANSFORMER_ENGINE_RECIPE


def supports_matmuls(dtype: DType) -> Callable[[Scenario], bool]:
    """A predicate: does every accelerator type of the job support matmuls in this format?"""
    return lambda scenario: all(
        dtype in accelerator_kind.formats for accelerator_kind in scenario.cluster.accelerator_kinds()[0]
    )


def with_recipe(scenario: Scenario, name: str) -> Scenario:
    """The scenario with other matmul formats; gradients and optimizer states keep theirs."""
    current_weights, new_recipe = (
        scenario.training.recipe.weight_formats,
        mixed_precision() if name == DType.BF16.value else load_recipe(name),
    )
    weight_formats = replace(
        new_recipe.weight_formats,
        gradients=current_weights.gradients,
        master=current_weights.master,
        moments=current_weights.moments,
    )
    recipe = effective_recipe(
        replace(new_recipe, weight_formats=weight_formats), scenario.cluster.accelerator, scenario.layout.data
    )
    return replace(scenario, training=replace(scenario.training, recipe=recipe))
