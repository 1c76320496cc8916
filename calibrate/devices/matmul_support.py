"""For which number formats does PyTorch have matmuls on a GPU?

Those of NVIDIA's tensor cores by compute capability (CUDA C++ Programming Guide, table 24). For formats with
scales PyTorch decides: per-tensor and per-row scales since Ada (8.9), blocks of 128 on Hopper only, MXFP8 and
NVFP4 since Blackwell (pytorch/pytorch, aten/src/ATen/native/cuda/ScaledBlas.cpp: scaled_mm_arch_allowed,
_check_deepseek_support; RowwiseScaledMM.cu, dispatch_fp8_rowwise_kernel_on_sm; cuBLAS, "Narrow precision data
types"). On AMD's GPUs by architecture: FP8 on CDNA 3 (gfx942) and later, MXFP8 on CDNA 4 (gfx950), neither
blocks of 128 nor NVFP4. Grouped GEMMs are supported in fewer cases (torch/testing/_internal/common_cuda.py:
evaluate_platform_supports_fp8_grouped_gemm, evaluate_platform_supports_mxfp8_grouped_gemm).
"""

from types import MappingProxyType
from typing import Final

import torch

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType

_ADA, _HOPPER, _BLACKWELL, _NO_LIMIT = (8, 9), (9, 0), (10, 0), (99, 0)
_CAPABILITIES: Final = MappingProxyType(  # first capability with support, and first one without it again
    {
        DType.FP32: ((0, 0), _NO_LIMIT),
        DType.FP16: ((7, 0), _NO_LIMIT),
        DType.TF32: ((8, 0), _NO_LIMIT),
        DType.BF16: ((8, 0), _NO_LIMIT),
        DType.FP8: (_ADA, _NO_LIMIT),
        DType.FP8_ROWWISE: (_ADA, _NO_LIMIT),
        DType.FP8_BLOCKWISE: (_HOPPER, _BLACKWELL),
        DType.MXFP8: (_BLACKWELL, _NO_LIMIT),
        DType.NVFP4: (_BLACKWELL, _NO_LIMIT),
    }
)
_GROUPED_GEMM_CAPABILITIES: Final = MappingProxyType(
    {DType.FP8_ROWWISE: (_HOPPER, _BLACKWELL), DType.MXFP8: (_BLACKWELL, (10, 1))}
)
_AMD_ARCHITECTURES: Final = MappingProxyType(  # prefixes of AMD architecture names
    {
        DType.FP8: ("gfx94", "gfx95", "gfx12"),
        DType.FP8_ROWWISE: ("gfx94", "gfx95", "gfx12"),
        DType.MXFP8: ("gfx95",),
    }
)
_FNUZ_ARCHITECTURE: Final = "gfx94"  # CDNA 3, whose E4M3 has another bias and no negative zero (CDNA 4 has OCP's)


def supports_matmul(gpu_index: int, dtype: DType) -> bool:
    """Whether PyTorch has matmuls of that format on the GPU with that index."""
    if torch.version.hip is None:
        first, limit = _CAPABILITIES[dtype]
        return first <= torch.cuda.get_device_capability(gpu_index) < limit
    if dtype in LOW_PRECISION_DTYPES:
        return _architecture(gpu_index).startswith(_AMD_ARCHITECTURES.get(dtype, ()))
    return dtype is not DType.TF32


def supports_grouped_gemm(gpu_index: int | None, dtype: DType) -> bool:
    """Whether PyTorch may have a grouped GEMM (several experts in one kernel) in a format with scales there."""
    if torch.version.hip is not None:
        return dtype is DType.FP8_ROWWISE
    first, limit = _GROUPED_GEMM_CAPABILITIES.get(dtype, (_NO_LIMIT, _NO_LIMIT))
    return first <= torch.cuda.get_device_capability(gpu_index) < limit


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The E4M3 dtype of PyTorch on that device."""
    if (
        device.type == "cuda"
        and torch.version.hip is not None
        and _architecture(device.index).startswith(_FNUZ_ARCHITECTURE)
    ):
        return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def _architecture(gpu_index: int | None) -> str:
    return str(torch.cuda.get_device_properties(gpu_index).gcnArchName)
