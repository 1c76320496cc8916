"""What would a scenario be in other number formats?"""

from dataclasses import replace

from clustersim.common.dtypes import DType
from clustersim.model.precision_recipe import mixed
from clustersim.model.recipe_files import load_recipe
from clustersim.scenario.scenario import Scenario
from clustersim.scenario.validation_rules.precision import as_run

_TORCH = "fp8-rowwise"  # torchao's usual recipe
_OTHERS = "fp8-current"  # Transformer Engine's Float8CurrentScaling, which Megatron Bridge's recipes take on Hopper


def usual_recipe(scenario: Scenario, dtype: DType) -> str:
    """The name of the recipe by which the job's framework mostly computes in a format."""
    if dtype is not DType.FP8:
        return str(dtype.value)
    return _TORCH if scenario.framework.name == "pytorch" else _OTHERS


def with_recipe(scenario: Scenario, name: str) -> Scenario:
    """Products in other formats; gradients and optimizer states stay as they are."""
    own, plain = scenario.training.recipe.weights, mixed() if name == DType.BF16.value else load_recipe(name)
    kept = replace(plain.weights, gradients=own.gradients, master=own.master, moments=own.moments)
    recipe = as_run(replace(plain, weights=kept), scenario.cluster.accelerator, scenario.layout.data)
    return replace(scenario, training=replace(scenario.training, recipe=recipe))
