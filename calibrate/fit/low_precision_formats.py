"""How fast are products and casts in formats with scales, where they were published and where not?

An accelerator's file says in which of these formats it computes. The share of its peak that each has is

- fitted to its own rows, or to those of the same chip;
- in FP8, for want of own rows, as far from that of the other formats as its best FP8 matmul of a search is from its
  best BF16 one; or as far from a sibling's as their best matmuls are from each other;
- in another format as far from FP8's as a sibling's is from its FP8's;
- where no library has kernels of a format and runs those of another instead, the other's: blocks of 128 on Blackwell
  and CDNA 4 are MXFP8, whose scales are repeated (NVIDIA/TransformerEngine pull request 2157; HazyResearch/HipKittens
  pull request 76).

Casts reach the bandwidth that other streaming kernels reach, or a part of it where that predicts unseen ones better;
without rows the sibling's part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.fit_quality import Judged
from calibrate.fit.grid_search import GridSearch, supported
from calibrate.fit.matmul_constants import Row, fit_scaled
from calibrate.fit.memory_bound import CAST_PARTS
from calibrate.fit.published_kernels import CastRow, casts, matmul_sets, matmuls
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.efficiency import KernelEfficiency, MatmulEfficiency

DIGITS: Final = 2  # of a derived share
INSTEAD: Final[Mapping[DType, DType]] = {DType.FP8_BLOCKWISE: DType.MXFP8}


@dataclass(frozen=True, slots=True)
class Relative:
    """What formats without rows are relative to.

    sibling: whose constants they keep their distance from; fp8: FP8's share relative to the sibling's, or to that of
    the other formats where there is no sibling.
    """

    sibling: KernelEfficiency | None
    fp8: float


def fit_formats(
    accelerator: Accelerator, relative: Relative, same_chip: Sequence[str] = ()
) -> tuple[Accelerator, list[Judged]]:
    """The accelerator with the shares of all formats with scales that its file lists."""
    known = _known(accelerator, relative)
    judged = []
    for dtype in known.efficiency.matmul.shares:
        rows = _rows(dtype, (accelerator.name, *same_chip))
        if rows:
            constants, winner = fit_scaled(known, rows)
            judged.append(Judged(accelerator.name, f"matmul {dtype.value}", rows, winner))
            known = _with(known, constants)
    fitted = {item.rows[0].dtype for item in judged if not isinstance(item.rows[0], CastRow)}
    return _with(known, _derived(known.efficiency.matmul, relative.sibling, fitted)), judged


def fit_casts(accelerator: Accelerator, sibling: KernelEfficiency | None) -> tuple[float, list[Judged]]:
    """The bandwidth that casts reach, relative to other streaming kernels."""
    rows = [row for row in casts() if row.accelerator == accelerator.name]
    if not rows:
        narrow = bool(accelerator.efficiency.matmul.shares)
        return (sibling.casts if sibling is not None and narrow else 1.0), []
    measured, alike = np.array([row.seconds for row in rows]), [row.kernel.shape for row in rows]
    winners = []
    for parts in (np.array([1.0]), CAST_PARTS):
        search = GridSearch(measured, [row.published for row in rows], alike=alike)
        search.offer([(float(part),) for part in parts], _cast_seconds(accelerator, rows, parts))
        winners.append(search.winner())
    winner = supported(winners, measured)
    return winner.constants[0], [Judged(accelerator.name, "casts", rows, winner)]


def scaled_kernels(efficiency: KernelEfficiency, sibling: KernelEfficiency) -> Mapping[DType, float]:
    """Shares of one kernel for all experts as far from those of other products as a sibling's."""
    own, known = efficiency.matmul.shares, sibling.expert_matmul.kernel_shares
    both = (dtype for dtype in known if dtype in own)
    return {dtype: round(known[dtype] * own[dtype] / sibling.matmul.shares[dtype], DIGITS) for dtype in both}


def with_others_kernels(efficiency: KernelEfficiency) -> KernelEfficiency:
    """The same where another format's kernels run a format's products of experts."""
    grouped, listed = efficiency.grouped, efficiency.matmul.shares
    if grouped is None:
        return efficiency
    known = grouped.kernel_shares
    more = {dtype: known[other] for dtype, other in INSTEAD.items() if dtype in listed and other in known}
    return replace(efficiency, grouped=replace(grouped, kernel_shares={**more, **known}))


def _known(accelerator: Accelerator, relative: Relative) -> Accelerator:
    """The accelerator with FP8's share, which the others' are relative to; nothing of the others."""
    listed = load_accelerator(accelerator.name).efficiency.matmul.shares
    matmul = replace(accelerator.efficiency.matmul, shares={}, prologues={}, starts={})
    base = matmul.share if relative.sibling is None else relative.sibling.matmul.peak_fraction_of(DType.FP8)
    share = round(base * relative.fp8, DIGITS)
    found = replace(matmul, shares=dict.fromkeys((item for item in LOW_PRECISION_DTYPES if item in listed), share))
    if relative.sibling is not None and DType.FP8 in listed:
        found = _like(found, DType.FP8, relative.sibling.matmul, DType.FP8)
    return _with(accelerator, found)


def _derived(matmul: MatmulEfficiency, sibling: KernelEfficiency | None, fitted: set[DType]) -> MatmulEfficiency:
    """What has no rows."""
    rest = [d_type for d_type in matmul.shares if d_type not in fitted and d_type is not DType.FP8]
    instead = [item for item in rest if INSTEAD.get(item) in matmul.shares]
    for dtype in (element for element in rest if element not in instead):
        if sibling is None or dtype not in sibling.matmul.shares:
            raise ValueError(f"{dtype.value}: neither published for this accelerator nor known of a sibling")
        ratio = matmul.peak_fraction_of(DType.FP8) / sibling.matmul.peak_fraction_of(DType.FP8)
        share = round(sibling.matmul.peak_fraction_of(dtype) * ratio, DIGITS)
        matmul = _like(matmul.with_peak_fraction(dtype, share), dtype, sibling.matmul, dtype)
    for dtype in instead:
        other = INSTEAD[dtype]
        matmul = _like(matmul.with_peak_fraction(dtype, matmul.peak_fraction_of(other)), dtype, matmul, other)
    return matmul


def _like(matmul: MatmulEfficiency, dtype: DType, known: MatmulEfficiency, other: DType) -> MatmulEfficiency:
    """With the prologue and start that another format has of its own."""
    return matmul.with_format_overheads(dtype, known.prologues.get(other), known.starts.get(other))


def _rows(dtype: DType, names: Sequence[str]) -> list[Row]:
    every: list[Row] = [*matmuls(), *matmul_sets()]
    return [row for row in every if row.accelerator in names and row.dtype is dtype]


def _cast_seconds(accelerator: Accelerator, rows: Sequence[CastRow], parts: FloatArray) -> FloatArray:
    """[parts, rows] of kernels that reach so much of what others reach."""
    efficiency = accelerator.efficiency
    moved = np.array([row.kernel.bytes for row in rows]) / (accelerator.memory_bandwidth * efficiency.memory)
    started = np.array([row.kernel.launches for row in rows]) * efficiency.kernel_latency
    seconds: FloatArray = moved[None, :] / parts[:, None] + started[None, :]
    return seconds


def _with(accelerator: Accelerator, matmul: MatmulEfficiency) -> Accelerator:
    return replace(accelerator, efficiency=replace(accelerator.efficiency, matmul=matmul))
