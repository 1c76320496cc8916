"""Which precision recipe does a change of formats take?"""

from collections.abc import Callable
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model.framework import MeasuredHostUse
from clustersim.scenario.scenario import Scenario

_TORCHAO_RECIPES: Final = {
    DType.FP8: "fp8-rowwise",  # torchao's default recipe
    DType.MXFP8: "mxfp8-torchao",
    DType.NVFP4: "nvfp4-torchao",
}
_TRANSFORMER_ENGINE_RECIPES: Final = {
    DType.FP8: "fp8-current"  # Float8CurrentScaling, which Megatron Bridge's recipes take on Hopper
}


def default_recipe_name(scenario: Scenario, dtype: DType) -> str:
    """The name of the recipe that the job's framework uses by default for a format: PyTorch's are torchao's."""
    uses_torchao = scenario.framework.measured_host_use is MeasuredHostUse.TORCH
    return (_TORCHAO_RECIPES if uses_torchao else _TRANSFORMER_ENGINE_RECIPES).get(dtype, str(dtype.value))


def supports_matmuls(dtype: DType) -> Callable[[Scenario], bool]:
    """A predicate: does every accelerator type of the job support matmuls in this format?"""
    return lambda scenario: all(
        dtype in accelerator_kind.formats for accelerator_kind in scenario.cluster.accelerator_kinds()[0]
    )
