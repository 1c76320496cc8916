"""Which matmul constants and rates of number formats do a record's rows support?

The format with the most FLOP among the rows is the reference: it gives the share of the peak, perimeter, prologue and,
where no streaming kernel told it, the start of a kernel. Of each other format the rate alone is searched. One share
serves all formats without scales, so the peak of another format is its rate over that share; of those with scales each
has a share of its own, of a peak that all of as many bits have.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from calibrate.fit.fit_state import (
    ROOM,
    SHARES,
    Scale,
    State,
    Timed,
    best_rate,
    by_format,
    latencies,
    near,
    seconds_of,
    with_constants,
    with_peak,
)
from calibrate.fit.grid_search import Winner, supported
from calibrate.fit.matmul_constants import EDGES, PROLOGUES, MatmulGrid, own_matmul, search_matmul
from calibrate.fit.published_kernels import MatmulRow
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import LOW_PRECISION_DTYPES
from clustersim.common.units import FlopPerSecond
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import GROUPED_MATMUL_KINDS, KernelKind, MatmulShape


def fit_formats(state: State, rows: Sequence[Timed]) -> State:
    """The reference format first, then the rates of all others; rows: of all kinds."""
    formats = by_format(timed for timed in rows if timed.row.kind is KernelKind.MATMUL)
    dense = [dtype for dtype in formats if dtype not in LOW_PRECISION_DTYPES]
    if dense:
        reference = max(dense, key=lambda dtype: sum(item.row.flops for item in formats[dtype]))
        state = _fit_reference(state, formats[reference], _free(state, rows))
        for dtype in dense:
            if dtype is not reference:
                state = _fit_format(state, formats[dtype])
    for scaled in (formats[element] for element in LOW_PRECISION_DTYPES if element in formats):
        state = _fit_scaled(state, scaled)
    return _known(state, (entry for entry in rows if entry.row.kind in GROUPED_MATMUL_KINDS))


def _free(state: State, rows: Sequence[Timed]) -> FloatArray:
    """What the start of a matmul may take: what streaming kernels have shown, if there were any."""
    return np.array([state.accelerator.efficiency.kernel_latency]) if state.left_out else latencies(rows)


def _fit_reference(state: State, rows: Sequence[Timed], free: FloatArray) -> State:
    """Share of the peak, perimeter, prologue, and the start of a kernel where it is free."""
    scale, accelerator = _scale(state, rows)
    winner = _search_reference(accelerator, rows, free)
    part, edge, prologue, latency = winner.constants
    peak = scale.nominal(part)
    matmul = replace(state.accelerator.efficiency.matmul, share=part * scale.rate / peak, edge=edge, prologue=prologue)
    return state.fitted(rows, winner, matmul=matmul, kernel_latency=latency).with_peak(rows[0].row.dtype, peak)


def _search_reference(accelerator: Accelerator, rows: Sequence[Timed], free: FloatArray) -> Winner:
    """Nothing, the share alone, the share and the start, all: what the rows support."""
    measured, own = _matmuls(rows), own_matmul(accelerator, rows[0].row.dtype)
    winners = [search_matmul(accelerator, measured, grid) for grid in (own, replace(own, shares=SHARES))]
    around = near(winners[-1])
    if len(free) > 1:
        winners.append(search_matmul(accelerator, measured, replace(own, shares=around, latencies=free)))
    winners.append(search_matmul(accelerator, measured, MatmulGrid(around, EDGES, PROLOGUES, free)))
    return supported(winners, seconds_of(rows))


def _fit_format(state: State, rows: Sequence[Timed]) -> State:
    """The peak of a format beside the reference, at the same share of it."""
    rate, winner, _ = _fit_rate(state, rows)
    peak = rate / state.accelerator.efficiency.matmul.share
    return state.fitted(rows, winner).with_peak(rows[0].row.dtype, peak)


def _fit_scaled(state: State, rows: Sequence[Timed]) -> State:
    """The share of its peak that a format with scales has."""
    dtype, own = rows[0].row.dtype, state.accelerator.efficiency.matmul
    known = with_constants(state.accelerator, matmul=own.with_peak_fraction(dtype, own.peak_fraction_of(dtype)))
    rate, winner, scale = _fit_rate(replace(state, accelerator=known), rows)
    peak = scale.nominal(winner.constants[0])
    before = state.accelerator.peak.get(dtype.peak_dtype, peak)
    for d_type in (share for share in own.shares if share.peak_dtype is dtype.peak_dtype):
        own = own.with_peak_fraction(d_type, own.peak_fraction_of(d_type) * before / peak)  # their rates stay
    return state.fitted(rows, winner, matmul=own.with_peak_fraction(dtype, rate / peak)).with_peak(
        dtype.peak_dtype, peak
    )


def _known(state: State, rows: Iterable[Timed]) -> State:
    """Formats that only products of experts tell of are at the share and peak of others, or of their best row."""
    for dtype, same in by_format(rows).items():
        accelerator = state.accelerator
        if dtype not in accelerator.formats:
            own, peak = accelerator.efficiency.matmul, accelerator.peak.get(dtype.peak_dtype, ROOM * best_rate(same))
            matmul = own.with_peak_fraction(dtype, own.share) if dtype in LOW_PRECISION_DTYPES else own
            known = replace(state, accelerator=with_constants(accelerator, matmul=matmul))
            state = known.with_peak(dtype.peak_dtype, peak)
    return state


def _fit_rate(state: State, rows: Sequence[Timed]) -> tuple[FlopPerSecond, Winner, Scale]:
    """The rate of one format alone; all other constants are those of the reference."""
    scale, accelerator = _scale(state, rows)
    own = own_matmul(accelerator, rows[0].row.dtype)
    winners = [search_matmul(accelerator, _matmuls(rows), grid) for grid in (own, replace(own, shares=SHARES))]
    winner = supported(winners, seconds_of(rows))
    return winner.constants[0] * scale.rate, winner, scale


def _scale(state: State, rows: Sequence[Timed]) -> tuple[Scale, Accelerator]:
    """The rate whose parts are searched, and the accelerator with it for a peak, at the same rate of matmuls."""
    accelerator, dtype = state.accelerator, rows[0].row.dtype.peak_dtype
    nominal, matmul = accelerator.peak.get(dtype, 0.0), accelerator.efficiency.matmul
    scale = state.scale(nominal, best_rate(rows))
    part = (nominal or scale.rate) / scale.rate
    return scale, with_peak(with_constants(accelerator, matmul=matmul.scaled(part)), dtype, scale.rate)


def _matmuls(rows: Iterable[Timed]) -> list[MatmulRow]:
    return [
        MatmulRow(timed.row.source, timed.row.shape, timed.row.dtype, timed.row.bytes, timed.seconds)
        for timed in rows
        if isinstance(timed.row.shape, MatmulShape)
    ]
