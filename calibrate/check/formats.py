"""Which torch number format stands for which of ours?"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from clustersim.dtypes import DType
from clustersim.workload.training import Precision

TORCH: Final[Mapping[DType, torch.dtype]] = MappingProxyType(
    {
        DType.FP32: torch.float32,
        DType.TF32: torch.float32,
        DType.BF16: torch.bfloat16,
        DType.FP16: torch.float16,
    }
)


def held(precision: Precision) -> DType:
    """The format of the weights that the optimizer updates: the master weights', or the compute weights' own."""
    return precision.compute if precision.master is None else precision.master


def allow_tf32(precision: Precision) -> None:
    """Let FP32 products run on tensor cores as TF32 where the scenario computes in it, and only there."""
    torch.set_float32_matmul_precision("high" if precision.compute is DType.TF32 else "highest")
