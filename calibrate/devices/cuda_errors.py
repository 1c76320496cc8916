"""Which errors of a GPU does a process survive?

Most concern a single call: memory exhausted, a format or an algorithm that a library does not have, a launch
that asks for too much. After some the context is lost: the CUDA Runtime API says of each of them that it
"leaves the process in an inconsistent state and any further CUDA work will return the same error. To continue
using CUDA, the process must be terminated and relaunched" (CUDA Runtime API, section Data types, cudaError; of
ECC and NVLink only that they are uncorrectable). HIP has the same codes and messages.

PyTorch raises `torch.AcceleratorError` with the code as `error_code` (torch/csrc/Exceptions.cpp, since 2.8)
and cudaGetErrorString's message after "CUDA error: "; errors from elsewhere (Triton, NCCL, older versions)
have the message only. States of cuBLAS and cuDNN are a RuntimeError ("CUDA error:
CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic(...)`", "cuDNN error:
CUDNN_STATUS_..."), which says nothing about the context: a lost one shows at the next call.
"""

from types import MappingProxyType
from typing import Final

import torch

_MEMORY_ALLOCATION_CODE: Final = 2  # cudaErrorMemoryAllocation, of the device or of pinned host memory
_OUT_OF_MEMORY_TEXTS: Final = (
    "error: out of memory",  # CUDA's or HIP's message
    "CUBLAS_STATUS_ALLOC_FAILED",
    "when calling `cublasCreate(",  # CUBLAS_STATUS_NOT_INITIALIZED: no memory (discuss.pytorch.org/t/125450)
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
)
_CONTEXT_LOST_ERRORS: Final = MappingProxyType(
    {
        214: "uncorrectable ECC error",
        220: "uncorrectable NVLink error",
        226: "Invalid access of peer GPU memory over nvlink or a hardware error",
        700: "an illegal memory access was encountered",
        702: "the launch timed out and was terminated",
        709: "context is destroyed",
        710: "device-side assert triggered",
        714: "hardware stack error",
        715: "an illegal instruction was encountered",
        716: "misaligned address",
        717: "operation not supported on global/shared address space",
        718: "invalid program counter",
        719: "unspecified launch failure",
        721: "tensor memory not completely freed",
        810: "MPS client was terminated",
        999: "error: unknown error",
    }
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out, the device's or pinned host memory."""
    if isinstance(error, torch.cuda.OutOfMemoryError) or _cuda_error_code(error) == _MEMORY_ALLOCATION_CODE:
        return True
    return any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def is_context_lost(error: Exception) -> bool:
    """Whether an error means that the process cannot use the device any more, by its code or message."""
    code = _cuda_error_code(error)
    if code is not None:
        return code in _CONTEXT_LOST_ERRORS
    text = str(error)
    return any(message.lower() in text.lower() for message in _CONTEXT_LOST_ERRORS.values())


def _cuda_error_code(error: Exception) -> int | None:
    """The cudaError code, None where the error has none."""
    code = getattr(error, "error_code", None)
    return code if isinstance(error, torch.AcceleratorError) and isinstance(code, int) else None
