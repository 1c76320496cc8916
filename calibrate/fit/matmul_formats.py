"""Fit of matmul constants and of the rate of each number format to the samples of a record.

The format with the most FLOP among the samples is the reference: it determines the fraction of peak, the
perimeter, the prologue and, if no memory-bound kernel was measured, the kernel latency. For every other
format only the rate is searched. All unscaled formats share one peak fraction, so the peak of another format
is its rate over that fraction. Block-scaled formats each have a peak fraction of their own, of the peak of
all formats with as many bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from calibrate.fit.fit_state import (
    RATE_MARGIN,
    SHARE_GRID,
    FitState,
    RateScale,
    TimedKernel,
    best_rate,
    group_by_format,
    latency_grid,
    measured_seconds,
    shares_near,
    with_constants,
    with_peak,
)
from calibrate.fit.grid_search import GridOptimum, select_supported
from calibrate.fit.matmul_constants import EDGES, PROLOGUES, MatmulGrid, search_matmul, single_point_grid
from calibrate.fit.published_kernels import MatmulSample
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import LOW_PRECISION_DTYPES
from clustersim.common.units import FlopPerSecond
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import GROUPED_MATMUL_KINDS, KernelKind, MatmulShape


def fit_matmul_formats(state: FitState, samples: Sequence[TimedKernel]) -> FitState:
    """Fit the reference format, then the rates of all others; samples: of kernels of all kinds."""
    samples_by_format = group_by_format(sample for sample in samples if sample.sample.kind is KernelKind.MATMUL)
    unscaled_formats = [dtype for dtype in samples_by_format if dtype not in LOW_PRECISION_DTYPES]
    if unscaled_formats:
        reference = max(
            unscaled_formats,
            key=lambda dtype: sum(timed_kernel.sample.flops for timed_kernel in samples_by_format[dtype]),
        )
        state = _fit_reference(state, samples_by_format[reference], _latency_grid(state, samples))
        for dtype in unscaled_formats:
            if dtype is not reference:
                state = _fit_unscaled_format(state, samples_by_format[dtype])
    for scaled_samples in (samples_by_format[dtype] for dtype in LOW_PRECISION_DTYPES if dtype in samples_by_format):
        state = _fit_scaled_format(state, scaled_samples)
    return _add_expert_formats(state, (sample for sample in samples if sample.sample.kind in GROUPED_MATMUL_KINDS))


def _latency_grid(state: FitState, samples: Sequence[TimedKernel]) -> FloatArray:
    """Candidate kernel latencies of a matmul: the value from memory-bound kernels if there were any, else a grid."""
    return np.array([state.accelerator.efficiency.kernel_latency]) if state.leave_one_out else latency_grid(samples)


def _fit_reference(state: FitState, samples: Sequence[TimedKernel], latency_grid: FloatArray) -> FitState:
    """Peak fraction, perimeter and prologue of the reference format, and the kernel latency if it is free."""
    scale, accelerator = _rate_scale(state, samples)
    optimum = _search_reference(accelerator, samples, latency_grid)
    share, edge, prologue, latency = optimum.constants
    peak = scale.effective_peak(share)
    matmul = replace(
        state.accelerator.efficiency.matmul, peak_fraction=share * scale.rate / peak, edge=edge, prologue=prologue
    )
    return state.with_fit(samples, optimum, matmul=matmul, kernel_latency=latency).with_peak(
        samples[0].sample.dtype, peak
    )


def _search_reference(
    accelerator: Accelerator, samples: Sequence[TimedKernel], latency_grid: FloatArray
) -> GridOptimum:
    """The most complex supported search: none, share, share and latency, or all constants."""
    measured, current = _matmul_samples(samples), single_point_grid(accelerator, samples[0].sample.dtype)
    optima = [search_matmul(accelerator, measured, grid) for grid in (current, replace(current, shares=SHARE_GRID))]
    near_shares = shares_near(optima[-1])
    if len(latency_grid) > 1:
        optima.append(
            search_matmul(accelerator, measured, replace(current, shares=near_shares, latencies=latency_grid))
        )
    optima.append(search_matmul(accelerator, measured, MatmulGrid(near_shares, EDGES, PROLOGUES, latency_grid)))
    return select_supported(optima, measured_seconds(samples))


def _fit_unscaled_format(state: FitState, samples: Sequence[TimedKernel]) -> FitState:
    """The peak of a non-reference unscaled format, at the reference's peak fraction."""
    rate, optimum, _ = _fit_rate(state, samples)
    peak = rate / state.accelerator.efficiency.matmul.peak_fraction
    return state.with_fit(samples, optimum).with_peak(samples[0].sample.dtype, peak)


def _fit_scaled_format(state: FitState, samples: Sequence[TimedKernel]) -> FitState:
    """The peak fraction of a block-scaled format."""
    dtype, matmul_constants = samples[0].sample.dtype, state.accelerator.efficiency.matmul
    extended = with_constants(
        state.accelerator, matmul=matmul_constants.with_peak_fraction(dtype, matmul_constants.peak_fraction_of(dtype))
    )
    rate, winner, scale = _fit_rate(replace(state, accelerator=extended), samples)
    peak = scale.effective_peak(winner.constants[0])
    previous_peak = state.accelerator.peak.get(dtype.peak_dtype, peak)
    for peer_format in (
        peer_format
        for peer_format in matmul_constants.peak_fraction_by_format
        if peer_format.peak_dtype is dtype.peak_dtype
    ):
        matmul_constants = matmul_constants.with_peak_fraction(
            peer_format, matmul_constants.peak_fraction_of(peer_format) * previous_peak / peak
        )  # their rates stay
    return state.with_fit(samples, winner, matmul=matmul_constants.with_peak_fraction(dtype, rate / peak)).with_peak(
        dtype.peak_dtype, peak
    )


def _add_expert_formats(state: FitState, samples: Iterable[TimedKernel]) -> FitState:
    """Add formats of grouped matmuls only, at the others' peak fraction and peak or at their best rate."""
    for dtype, format_samples in group_by_format(samples).items():
        accelerator = state.accelerator
        if dtype not in accelerator.formats:
            matmul_constants, peak = (
                accelerator.efficiency.matmul,
                accelerator.peak.get(dtype.peak_dtype, RATE_MARGIN * best_rate(format_samples)),
            )
            matmul = (
                matmul_constants.with_peak_fraction(dtype, matmul_constants.peak_fraction)
                if dtype in LOW_PRECISION_DTYPES
                else matmul_constants
            )
            extended = replace(state, accelerator=with_constants(accelerator, matmul=matmul))
            state = extended.with_peak(dtype.peak_dtype, peak)
    return state


def _fit_rate(state: FitState, samples: Sequence[TimedKernel]) -> tuple[FlopPerSecond, GridOptimum, RateScale]:
    """The rate of one format; all other constants are those of the reference."""
    scale, accelerator = _rate_scale(state, samples)
    current = single_point_grid(accelerator, samples[0].sample.dtype)
    optima = [
        search_matmul(accelerator, _matmul_samples(samples), grid)
        for grid in (current, replace(current, shares=SHARE_GRID))
    ]
    optimum = select_supported(optima, measured_seconds(samples))
    return optimum.constants[0] * scale.rate, optimum, scale


def _rate_scale(state: FitState, samples: Sequence[TimedKernel]) -> tuple[RateScale, Accelerator]:
    """The rate scale to search, and the accelerator with that scale as peak, at unchanged matmul rate."""
    accelerator, dtype = state.accelerator, samples[0].sample.dtype.peak_dtype
    nominal, matmul = accelerator.peak.get(dtype, 0.0), accelerator.efficiency.matmul
    scale = state.rate_scale(nominal, best_rate(samples))
    ratio = (nominal or scale.rate) / scale.rate
    return scale, with_peak(with_constants(accelerator, matmul=matmul.scaled(ratio)), dtype, scale.rate)


def _matmul_samples(samples: Iterable[TimedKernel]) -> list[MatmulSample]:
    return [
        MatmulSample(timed.sample.source, timed.sample.shape, timed.sample.dtype, timed.sample.bytes, timed.seconds)
        for timed in samples
        if isinstance(timed.sample.shape, MatmulShape)
    ]
