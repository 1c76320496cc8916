"""Published kernel measurements to which constants are fitted.

The rows of the packaged table (`clustersim/validation/published/kernels.csv`) whose `in_fit` is yes: one
library's kernels for each kind and accelerator, with known shapes. `published/bandwidth.csv` holds measured
memory bandwidths. The best shape of an exhaustive search is an upper bound and is never fitted to.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from clustersim.common.dtypes import DType
from clustersim.common.units import BytesPerSecond, Flop, FlopPerSecond, Seconds
from clustersim.hardware.efficiency import FASTEST_ATTENTION
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulShape
from clustersim.validation.accelerator_lookup import case_accelerator
from clustersim.validation.cases import ValidationCase
from clustersim.validation.grouped_gemm import grouped_gemm_kernels
from clustersim.validation.kernels import (
    BEST_OF_SEARCH,
    attention_library,
    case_attention,
    measured_seconds,
    read_kernels,
    timed_attention,
    timed_cast,
    timed_matmul,
    timed_matmuls,
    times_gradients,
)

T = TypeVar("T")
BANDWIDTH_TABLE: Final = Path(__file__).parents[1] / "published" / "bandwidth.csv"
# The text peak of FlashAttention-2 on A100 belongs to the longest sequence of the paper's setting: 16k tokens,
# hidden 2048, head dimension 128, no mask (arXiv:2307.08691, section 4.1 and figures 4-6).
_PEAK_SHAPE: Final = AttentionShape(batch=1, query=16384, key=16384, heads=16, kv_heads=16, head_dim=128, causal=False)


class _PublishedSample:
    """A sample with a source, PUBLICATION or PUBLICATION: PLACE."""

    __slots__ = ()
    source: str

    @property
    def publication(self) -> str:
        """The publication."""
        return self.source.partition(":")[0]


@dataclass(frozen=True, slots=True)
class MatmulSample(_PublishedSample):
    """One measured matmul. moved_bytes: bytes if every operand is read or written once."""

    accelerator: str
    shape: MatmulShape
    dtype: DType
    moved_bytes: float
    seconds: Seconds
    source: str = ""

    @property
    def flops(self) -> Flop:
        """FLOP of the matmul."""
        return 2.0 * self.shape.m * self.shape.n * self.shape.k * self.shape.batch

    @property
    def matmuls(self) -> "tuple[MatmulSample, ...]":
        """The matmuls that were timed as one measurement."""
        return (self,)


@dataclass(frozen=True, slots=True)
class MatmulSetSample:
    """Matmuls that were timed as a sequence; seconds: of the sequence."""

    matmuls: tuple[MatmulSample, ...]
    seconds: Seconds

    @property
    def accelerator(self) -> str:
        """Name of the accelerator."""
        return self.matmuls[0].accelerator

    @property
    def dtype(self) -> DType:
        """The common number format."""
        return self.matmuls[0].dtype

    @property
    def publication(self) -> str:
        """The publication."""
        return self.matmuls[0].publication

    @property
    def flops(self) -> Flop:
        """Total FLOP."""
        return sum(matmul.flops for matmul in self.matmuls)


@dataclass(frozen=True, slots=True)
class CastSample(_PublishedSample):
    """One measured kernel that quantizes a tensor to a block-scaled format."""

    accelerator: str
    kernel: Kernel
    seconds: Seconds
    source: str = ""


@dataclass(frozen=True, slots=True)
class AttentionSample(_PublishedSample):
    """One measured flash attention kernel.

    flops: executed, so half of the full matrix with a causal mask; moved_bytes: bytes if every operand is read
    or written once.
    """

    accelerator: str
    shape: AttentionShape
    dtype: DType
    backward: bool
    flops: Flop
    moved_bytes: float
    seconds: Seconds
    source: str = ""


@dataclass(frozen=True, slots=True)
class GroupedGemmSample(_PublishedSample):
    """Measured expert matmuls: kernels that were timed as a sequence."""

    accelerator: str
    kernels: tuple[Kernel, ...]
    seconds: Seconds
    source: str = ""

    @property
    def dtype(self) -> DType:
        """The common number format."""
        return self.kernels[0].dtype

    @property
    def is_streamed(self) -> bool:
        """Whether one library matmul is launched per expert (no grouped kernel)."""
        return all(kernel.kind is not KernelKind.GROUPED_MATMUL for kernel in self.kernels)


def grouped_gemm_samples() -> list[GroupedGemmSample]:
    """All measurements of grouped matmuls."""
    return _build_samples(_fitted_cases("grouped_gemm"), _grouped_sample)


def matmul_samples() -> list[MatmulSample]:
    """All measured matmuls, without upper bounds."""
    cases = (case for case in _fitted_cases("gemm") if case.text("implementation") != BEST_OF_SEARCH)
    return _build_samples([case for case in cases if not times_gradients(case)], _matmul_sample)


def matmul_set_samples() -> list[MatmulSetSample]:
    """All sequences of matmuls that were timed as one measurement."""
    gradients = [case for case in _fitted_cases("gemm") if times_gradients(case)]
    return _build_samples([*_fitted_cases("gemm_set"), *gradients], _matmul_set_sample)


def cast_samples() -> list[CastSample]:
    """All measured quantization kernels."""
    return _build_samples(_fitted_cases("cast"), _cast_sample)


def best_matmul_rates() -> dict[tuple[str, DType], FlopPerSecond]:
    """Rate of the best matmul shape of an exhaustive search, by accelerator and number format."""
    cases = [case for case in _fitted_cases("gemm") if case.text("implementation") == BEST_OF_SEARCH]
    names = _accelerator_names(cases)
    return {
        (names[case.text("gpu")], DType(case.text("dtype"))): case.positive_float("tflops") * 1e12 for case in cases
    }


def attention_samples() -> list[AttentionSample]:
    """Measured flash attention of each accelerator's fastest library, and the peaks that papers state in their text."""
    cases = [case for case in _fitted_cases("attention") if _is_fastest(case, attention_library(case).value)]
    return _build_samples(cases, _attention_sample) + _build_samples(
        _fitted_cases("attention_peak"), _attention_peak_sample
    )


def library_attention_samples(library: str) -> list[AttentionSample]:
    """Measured flash attention of a library on accelerators whose fastest one it is not."""
    cases = [case for case in _fitted_cases("attention") if attention_library(case).value == library]
    return _build_samples([case for case in cases if not _is_fastest(case, library)], _attention_sample)


def _is_fastest(case: ValidationCase, library: str) -> bool:
    return library in (FASTEST_ATTENTION, case_accelerator(case).efficiency.attention_library)


def measured_bandwidths(accelerator: str) -> dict[str, BytesPerSecond]:
    """Measured memory bandwidths of an accelerator, in bytes/s by what was measured."""
    with BANDWIDTH_TABLE.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["gpu"] == accelerator]
    return {row["quantity"]: float(row["bytes_per_second"]) for row in rows}


def _fitted_cases(op: str) -> list[ValidationCase]:
    return [case for case in read_kernels() if case.text("op") == op and case.boolean("in_fit")]


def _accelerator_names(cases: Sequence[ValidationCase]) -> Mapping[str, str]:
    """The packaged accelerator of each GPU name."""
    return {gpu: case_accelerator(case).name for gpu, case in {case.text("gpu"): case for case in cases}.items()}


def _build_samples(cases: Sequence[ValidationCase], build: Callable[[ValidationCase, str], T]) -> list[T]:
    names = _accelerator_names(cases)
    return [build(case, names[case.text("gpu")]) for case in cases]


def _matmul_sample(case: ValidationCase, accelerator: str) -> MatmulSample:
    kernel = timed_matmul(case)
    return _timed_matmul(case, accelerator, kernel, measured_seconds(case, [kernel]))


def _matmul_set_sample(case: ValidationCase, accelerator: str) -> MatmulSetSample:
    kernels = timed_matmuls(case)
    members = tuple(_timed_matmul(case, accelerator, kernel, math.nan) for kernel in kernels)
    return MatmulSetSample(members, measured_seconds(case, kernels))


def _timed_matmul(case: ValidationCase, accelerator: str, kernel: Kernel, seconds: Seconds) -> MatmulSample:
    if not isinstance(kernel.shape, MatmulShape):
        raise TypeError(f"{kernel.name} is no matmul")
    return MatmulSample(accelerator, kernel.shape, kernel.dtype, kernel.bytes, seconds, _source_label(case))


def _cast_sample(case: ValidationCase, accelerator: str) -> CastSample:
    kernel = timed_cast(case)
    return CastSample(accelerator, kernel, measured_seconds(case, [kernel]), _source_label(case))


def _grouped_sample(case: ValidationCase, accelerator: str) -> GroupedGemmSample:
    kernels = grouped_gemm_kernels(case)
    return GroupedGemmSample(accelerator, kernels, measured_seconds(case, kernels), _source_label(case))


def _attention_sample(case: ValidationCase, accelerator: str) -> AttentionSample:
    backward = case.text("direction") == "bwd"
    kernel = case_attention(case, backward=backward)
    return _timed_attention(case, accelerator, kernel, measured_seconds(case, [kernel]))


def _attention_peak_sample(case: ValidationCase, accelerator: str) -> AttentionSample:
    kernel = timed_attention(_PEAK_SHAPE, DType.BF16, backward=case.text("direction") == "bwd")
    return _timed_attention(case, accelerator, kernel, kernel.flops / (case.positive_float("tflops") * 1e12))


def _timed_attention(case: ValidationCase, accelerator: str, kernel: Kernel, seconds: Seconds) -> AttentionSample:
    if not isinstance(kernel.shape, AttentionShape):
        raise TypeError(f"{kernel.name} is no attention")
    backward, source = case.text("direction") == "bwd", _source_label(case)
    moved_bytes, flops = kernel.bytes, kernel.flops
    return AttentionSample(accelerator, kernel.shape, kernel.dtype, backward, flops, moved_bytes, seconds, source)


def _source_label(case: ValidationCase) -> str:
    return f"{case.text('source')}: {case.text('locator')}"
