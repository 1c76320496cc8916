"""Which precision recipe does a change of formats take?"""

from collections.abc import Callable

from clustersim.common.dtypes import DType
from clustersim.scenario.scenario import Scenario

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
