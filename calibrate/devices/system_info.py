"""What does PyTorch run on here: which processor, which libraries, which settings of these?"""

import os
import platform
from collections.abc import Callable, Mapping
from ctypes import CDLL, byref, c_int
from pathlib import Path
from typing import Final

import torch

_RELEVANT_PREFIXES: Final = (
    "NCCL_", "RCCL_", "GLOO_", "CUBLAS", "CUDNN_", "HIPBLAS", "NVIDIA_TF32", "CUDA_", "HIP_", "HSA_", "TORCH",
    "PYTORCH_", "OMP_", "MKL_",
)  # fmt: skip
_IRRELEVANT_PATTERNS: Final = (  # paths, device visibility, launchers and log settings
    "_HOME", "_PATH", "_DIR", "_ROOT", "_VERSION", "ARCH_LIST", "VISIBLE_DEVICES", "TORCHELASTIC_", "_DEBUG",
    "TORCH_LOGS",
)  # fmt: skip
_VERSION_PROPERTIES: Final = (0, 1, 2)  # of libraryPropertyType: major, minor, patch


def processor_name() -> str:
    """Name of the host's CPU."""
    return read_field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def core_clock_mhz() -> float:
    """Current mean clock of the host's cores; 0 where the system does not report it."""
    fields = (line.partition(":") for line in _read_lines(Path("/proc/cpuinfo")))
    clocks = [float(value) for name, _, value in fields if name.strip() == "cpu MHz"]
    return sum(clocks) / len(clocks) if clocks else 0.0


def library_environment() -> Mapping[str, str]:
    """Environment variables that affect libraries: NCCL_ALGO, CUBLAS_WORKSPACE_CONFIG, OMP_NUM_THREADS, ..."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_RELEVANT_PREFIXES) and not any(pattern in name for pattern in _IRRELEVANT_PATTERNS)
    }


def enabled_sdpa_backends() -> str:
    """The enabled SDPA backends of PyTorch."""
    backends: Mapping[str, Callable[[], bool]] = {
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "math": torch.backends.cuda.math_sdp_enabled,
    }
    return " ".join(name for name, is_enabled in backends.items() if is_enabled())


def cudnn_version() -> str:
    """Version of the cuDNN that PyTorch has loaded: 91002 is 9.10.2."""
    try:
        code = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError:  # PyTorch was built with another version than is installed
        return ""
    return "" if code is None else _format_cudnn_version(code)


def cublas_version() -> str:
    """Version of the loaded cuBLAS, as the library reports it."""
    loaded = (line.split()[-1] for line in _read_lines(Path("/proc/self/maps")) if "libcublas.so" in line)
    path = next(loaded, None)
    if path is None:
        return ""
    try:
        get_property = CDLL(path).cublasGetProperty
    except (OSError, AttributeError):
        return ""
    value = c_int()
    components = [str(value.value) for kind in _VERSION_PROPERTIES if get_property(kind, byref(value)) == 0]
    return ".".join(components)


def read_field(path: Path, key: str) -> str | None:
    """The value of the first line `key: value` of a system file; None if there is none."""
    fields = (line.partition(":") for line in _read_lines(path))
    return next((value.strip() for name, _, value in fields if name.strip() == key), None)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _format_cudnn_version(code: int) -> str:
    """Version text: 10000 major + 100 minor + patch since version 9, 1000 major before."""
    thousands = 10_000 if code >= 90_000 else 1000
    return f"{code // thousands}.{code % thousands // 100}.{code % 100}"
