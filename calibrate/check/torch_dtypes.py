"""Which torch number format stands for which of ours?"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from clustersim.common.dtypes import DType
from clustersim.model.precision_recipe import PrecisionRecipe

TRAINING_DTYPES: Final[Mapping[DType, torch.dtype]] = MappingProxyType(
    {
        DType.FP32: torch.float32,
        DType.TF32: torch.float32,
        DType.BF16: torch.bfloat16,
        DType.FP16: torch.float16,
    }
)


def set_tf32(recipe: PrecisionRecipe) -> None:
    """Let FP32 products run on tensor cores as TF32 where the scenario computes in it, and only there."""
    torch.set_float32_matmul_precision("high" if recipe.compute is DType.TF32 else "highest")
