"""PyTorch dtypes of the number formats that can be trained in."""

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
    """Let FP32 matmuls use TF32 tensor cores if the recipe computes in it, and only then."""
    torch.set_float32_matmul_precision("high" if recipe.compute is DType.TF32 else "highest")
