"""Which published kernels are constants fitted to?

Those rows of the shipped table of measurements (`clustersim/validation/published/kernels.csv`) that say so in `in_fit`:
one library's kernels for each kind and accelerator, and shapes that are known. `published/bandwidth.csv` holds measured
memory bandwidths. Rows of a search's best shape are upper bounds, and are never fitted on.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from clustersim.common.dtypes import DType
from clustersim.common.units import BytesPerSecond, Flop, FlopPerSecond, Seconds
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulShape
from clustersim.validation.accelerator_lookup import accelerator_of
from clustersim.validation.cases import Case
from clustersim.validation.grouped_gemm import grouped_of
from clustersim.validation.kernels import (
    BEST_OF_SEARCH,
    attention_of,
    cast_of,
    matmul_of,
    matmuls_of,
    read_kernels,
    seconds_of,
    timed_attention,
)

T = TypeVar("T")
BANDWIDTHS: Final = Path(__file__).parents[1] / "published" / "bandwidth.csv"
# The text peak of FlashAttention-2 on A100 belongs to the longest sequence of the paper's setting: 16k tokens,
# hidden 2048, head dimension 128, no mask (arXiv:2307.08691, section 4.1 and figures 4-6).
_PEAK_SHAPE: Final = AttentionShape(batch=1, query=16384, key=16384, heads=16, kv_heads=16, head_dim=128, causal=False)


@dataclass(frozen=True, slots=True)
class MatmulRow:
    """One measured matmul. moved: bytes if every operand passes once."""

    accelerator: str
    shape: MatmulShape
    dtype: DType
    moved: float
    seconds: Seconds
    source: str = ""

    @property
    def published(self) -> str:
        """Who published it."""
        return self.source.partition(":")[0]

    @property
    def flops(self) -> Flop:
        """FLOP of the product."""
        return 2.0 * self.shape.m * self.shape.n * self.shape.k * self.shape.batch

    @property
    def products(self) -> "tuple[MatmulRow, ...]":
        """What was timed together."""
        return (self,)


@dataclass(frozen=True, slots=True)
class MatmulSet:
    """Measured matmuls that were timed together, one behind the other; seconds: of all of them."""

    products: tuple[MatmulRow, ...]
    seconds: Seconds

    @property
    def accelerator(self) -> str:
        """Where."""
        return self.products[0].accelerator

    @property
    def dtype(self) -> DType:
        """The format of all of them."""
        return self.products[0].dtype

    @property
    def published(self) -> str:
        """Who published them."""
        return self.products[0].published

    @property
    def flops(self) -> Flop:
        """FLOP of all of them."""
        return sum(product.flops for product in self.products)


@dataclass(frozen=True, slots=True)
class CastRow:
    """One measured kernel that casts a tensor to a format with scales."""

    accelerator: str
    kernel: Kernel
    seconds: Seconds
    source: str = ""

    @property
    def published(self) -> str:
        """Who published it."""
        return self.source.partition(":")[0]


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One measured flash attention kernel.

    flops: executed, so half of the full matrix with a causal mask; moved: bytes if every operand passes once.
    """

    accelerator: str
    shape: AttentionShape
    dtype: DType
    backward: bool
    flops: Flop
    moved: float
    seconds: Seconds
    source: str = ""

    @property
    def published(self) -> str:
        """Who published it."""
        return self.source.partition(":")[0]


@dataclass(frozen=True, slots=True)
class GroupedRow:
    """Measured products of experts: kernels that were timed together, one behind the other."""

    accelerator: str
    kernels: tuple[Kernel, ...]
    seconds: Seconds
    source: str = ""

    @property
    def published(self) -> str:
        """Who published it."""
        return self.source.partition(":")[0]

    @property
    def dtype(self) -> DType:
        """The format of all of them."""
        return self.kernels[0].dtype

    @property
    def streamed(self) -> bool:
        """Whether a library's product is launched for each expert."""
        return all(kernel.kind is not KernelKind.GROUPED_MATMUL for kernel in self.kernels)


def grouped_products() -> list[GroupedRow]:
    """Every measured group of products of experts."""
    return _rows(_cases("grouped_gemm"), _grouped)


def matmuls() -> list[MatmulRow]:
    """Every measured matmul, without upper bounds."""
    cases = (case for case in _cases("gemm") if case.text("implementation") != BEST_OF_SEARCH)
    return _rows(list(cases), _matmul)


def matmul_sets() -> list[MatmulSet]:
    """Every set of matmuls that were measured together."""
    return _rows(_cases("gemm_set"), _matmul_set)


def casts() -> list[CastRow]:
    """Every measured cast to a format with scales."""
    return _rows(_cases("cast"), _cast)


def best_rates() -> dict[tuple[str, DType], FlopPerSecond]:
    """Rate of the best matmul shape that a search found, by accelerator and number format."""
    cases = [case for case in _cases("gemm") if case.text("implementation") == BEST_OF_SEARCH]
    names = _names(cases)
    return {(names[item.text("gpu")], DType(item.text("dtype"))): item.number("tflops") * 1e12 for item in cases}


def attentions() -> list[AttentionRow]:
    """Every measured flash attention kernel, and the peaks that the papers' texts state."""
    return _rows(_cases("attention"), _attention) + _rows(_cases("attention_peak"), _peak)


def bandwidths() -> dict[str, list[BytesPerSecond]]:
    """Measured memory bandwidths by accelerator."""
    found: dict[str, list[BytesPerSecond]] = {}
    with BANDWIDTHS.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            found.setdefault(row["gpu"], []).append(float(row["bytes_per_second"]))
    return found


def _cases(op: str) -> list[Case]:
    return [case for case in read_kernels() if case.text("op") == op and case.is_yes("in_fit")]


def _names(cases: Sequence[Case]) -> Mapping[str, str]:
    """The shipped accelerator that each GPU is."""
    return {gpu: accelerator_of(case).name for gpu, case in {case.text("gpu"): case for case in cases}.items()}


def _rows(cases: Sequence[Case], row: Callable[[Case, str], T]) -> list[T]:
    names = _names(cases)
    return [row(case, names[case.text("gpu")]) for case in cases]


def _matmul(case: Case, accelerator: str) -> MatmulRow:
    kernel = matmul_of(case)
    return _timed_matmul(case, accelerator, kernel, seconds_of(case, [kernel]))


def _matmul_set(case: Case, accelerator: str) -> MatmulSet:
    kernels = matmuls_of(case)
    alone = tuple(_timed_matmul(case, accelerator, kernel, math.nan) for kernel in kernels)
    return MatmulSet(alone, seconds_of(case, kernels))


def _timed_matmul(case: Case, accelerator: str, kernel: Kernel, seconds: Seconds) -> MatmulRow:
    if not isinstance(kernel.shape, MatmulShape):
        raise TypeError(f"{kernel.name} is no matmul")
    return MatmulRow(accelerator, kernel.shape, kernel.dtype, kernel.bytes, seconds, _source(case))


def _cast(case: Case, accelerator: str) -> CastRow:
    kernel = cast_of(case)
    return CastRow(accelerator, kernel, seconds_of(case, [kernel]), _source(case))


def _grouped(case: Case, accelerator: str) -> GroupedRow:
    kernels = grouped_of(case)
    return GroupedRow(accelerator, kernels, seconds_of(case, kernels), _source(case))


def _attention(case: Case, accelerator: str) -> AttentionRow:
    backward = case.text("direction") == "bwd"
    kernel = attention_of(case, backward=backward)
    return _timed(case, accelerator, kernel, seconds_of(case, [kernel]))


def _peak(case: Case, accelerator: str) -> AttentionRow:
    kernel = timed_attention(_PEAK_SHAPE, DType.BF16, backward=case.text("direction") == "bwd")
    return _timed(case, accelerator, kernel, kernel.flops / (case.number("tflops") * 1e12))


def _timed(case: Case, accelerator: str, kernel: Kernel, seconds: Seconds) -> AttentionRow:
    if not isinstance(kernel.shape, AttentionShape):
        raise TypeError(f"{kernel.name} is no attention")
    backward, source = case.text("direction") == "bwd", _source(case)
    moved, flops = kernel.bytes, kernel.flops
    return AttentionRow(accelerator, kernel.shape, kernel.dtype, backward, flops, moved, seconds, source)


def _source(case: Case) -> str:
    return f"{case.text('source')}: {case.text('locator')}"
