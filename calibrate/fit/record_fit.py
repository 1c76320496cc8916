"""Fit of the cost-model constants to a calibration record.

The kernel model of `cost.roofline` is fitted to the record's samples, one kind of kernel after the other:
memory-bound kernels (those that their elements do not bind) give the fraction of memory bandwidth and the
kernel latency, casts to block-scaled formats a fraction of that bandwidth, matmuls their constants and the
rate of each number format, flash attention its constants in each direction. Searched constants must lower
the leave-one-out error; where the samples do not support one (too few, or all equal), the accelerator's
default stays. The model of collectives is fitted by `calibrate.fit.alpha_beta`.

Quantities that otherwise come from the datasheet:

- `peak`: the datasheet's, if the fitted rate of matmuls stays below it on a GPU. On a CPU, whose files are
  placeholders, and on a GPU that exceeds its datasheet, the fitted rate (or the best measured one, if that
  is higher).
- `memory_bandwidth`: by the same rule, from copies in device memory and memory-bound kernels.
- `compute_units`: of the device; for a CPU, the threads that a process computes with.

- `factors`: time of a kernel family relative to the common model, where leave-one-out shows that it
  generalizes (FP32 norms in pieces do not reach the bandwidth of a copy, for example).

Samples are device time: the launch interval, a lower bound on predicted times, is excluded from the search.

Leave-one-out errors are those of each kind's own search: constants fitted to earlier kinds are in-sample.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from calibrate.fit.alpha_beta import fit_collectives
from calibrate.fit.attention import (
    BLOCK_SIZES,
    CAUSAL_FACTORS,
    HEAD_OVERHEADS,
    KEY_OVERHEADS,
    AttentionGrid,
    search_attention,
    single_point_grid,
    winner_constants,
)
from calibrate.fit.fit_state import (
    RATE_MARGIN,
    SHARE_GRID,
    FitState,
    TimedKernel,
    best_rate,
    group_by_format,
    latency_grid,
    measured_seconds,
    shares_near,
    with_constants,
)
from calibrate.fit.grid_search import MAX_ERROR_RATIO, select_supported
from calibrate.fit.matmul_formats import fit_matmul_formats
from calibrate.fit.memory_bound import MemoryBoundSample, fit_casts, fit_memory_bound
from calibrate.fit.published_kernels import AttentionSample
from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CopySample,
    DeviceInfo,
    FitResidual,
    KernelFit,
    family_of,
)
from clustersim.cost.elementwise import elementwise_work
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import AttentionEfficiency
from clustersim.model.kernels import AttentionShape, KernelKind, MemoryBoundShape


def fit_record(record: CalibrationRecord, accelerator: Accelerator) -> CalibrationRecord:
    """The record with constants fitted to its samples; without kernels (or collectives) there is no fit of them."""
    timed_samples = [sample for sample in record.kernels if sample.time is not None]
    fit = fit_kernel_model(record, accelerator) if timed_samples else None
    return replace(record, kernel_fit=fit, collective_fits=fit_collectives(record.collectives))


def fit_kernel_model(record: CalibrationRecord, accelerator: Accelerator) -> KernelFit:
    """The kernel model fitted to the record's samples, of which at least one must have a time."""
    timed_samples = ((sample, sample.time.seconds) for sample in record.kernels if sample.time is not None)
    timed_kernels = [TimedKernel(index, sample, seconds) for index, (sample, seconds) in enumerate(timed_samples)]
    state = _fit_memory_bound(_initial_state(record, accelerator), timed_kernels, record.copies)
    state = fit_matmul_formats(_fit_casts(state, timed_kernels), timed_kernels)
    for kind in (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD):
        state = _fit_attention(state, accelerator, [timed for timed in timed_kernels if timed.sample.kind is kind])
    factors, residuals = _fit_family_factors(state, timed_kernels)
    fitted = with_constants(state.accelerator, launch_interval=_launch_interval(record, accelerator))
    return KernelFit(
        peak=dict(fitted.peak),
        memory_bandwidth=fitted.memory_bandwidth,
        compute_units=fitted.compute_units,
        efficiency=fitted.efficiency,
        factors=factors,
        residuals=residuals,
    )


def _initial_state(record: CalibrationRecord, accelerator: Accelerator) -> FitState:
    """The fit state before any search, with the device's own compute units instead of the file's."""
    device = record.device
    units = device.compute_units or (device.threads if _is_cpu(device) else 0) or accelerator.compute_units
    with_constants_reset = with_constants(accelerator, published=True, launch_interval=0.0)
    return FitState(replace(with_constants_reset, compute_units=units), _is_cpu(device))


def _launch_interval(record: CalibrationRecord, accelerator: Accelerator) -> Seconds:
    measured = record.launch_interval
    return accelerator.efficiency.launch_interval if measured is None else measured


def _is_cpu(device: DeviceInfo) -> bool:
    """Whether the device is a CPU."""
    return device.threads > 0


def _fit_memory_bound(state: FitState, timed_kernels: Sequence[TimedKernel], copies: Iterable[CopySample]) -> FitState:
    """Fit the fraction of memory bandwidth and the kernel latency."""
    selected = [
        timed
        for timed in timed_kernels
        if isinstance(timed.sample.shape, MemoryBoundShape)
        and not _is_cast(timed)
        and not _is_bound_by_elements(state.accelerator, timed)
    ]
    kernel_samples = _memory_bound_samples(state.accelerator, selected)
    copy_samples = [
        MemoryBoundSample(2.0 * sample.bytes, 1, sample.time.seconds) for sample in copies if sample.route == "device"
    ]
    if not (kernel_samples or copy_samples):
        return state
    nominal, efficiency = state.accelerator.memory_bandwidth, state.accelerator.efficiency
    scale = state.rate_scale(
        nominal, max(sample.moved_bytes / sample.seconds for sample in copy_samples or kernel_samples)
    )
    ratio = efficiency.operator_bandwidth_ratio if kernel_samples else 1.0  # of the chip: it is not fitted
    scaled = with_constants(
        state.accelerator,
        memory_bandwidth_fraction=efficiency.memory_bandwidth_fraction * ratio * nominal / scale.rate,
    )
    optimum = fit_memory_bound(
        replace(scaled, memory_bandwidth=scale.rate), kernel_samples or copy_samples, latency_grid(timed_kernels)
    )
    share, latency = optimum.constants
    share /= ratio
    bandwidth = scale.effective_peak(share)
    next_state = state.with_fit(selected, optimum if kernel_samples else replace(optimum, leave_one_out=np.zeros(0)))
    constants = with_constants(
        state.accelerator,
        memory_bandwidth_fraction=share * scale.rate / bandwidth,
        kernel_latency=latency,
    )
    return replace(next_state, accelerator=replace(constants, memory_bandwidth=bandwidth))


def _fit_casts(state: FitState, timed_kernels: Sequence[TimedKernel]) -> FitState:
    """Fit the fraction of the memory-bound bandwidth that casts to block-scaled formats reach."""
    selected = [timed for timed in timed_kernels if _is_cast(timed)]
    if not selected:
        return state
    optimum = fit_casts(state.accelerator, _memory_bound_samples(state.accelerator, selected))
    return state.with_fit(
        selected,
        optimum,
        quantization_bandwidth_ratio=optimum.constants[0] / state.accelerator.efficiency.memory_bandwidth_fraction,
    )


def _is_bound_by_elements(accelerator: Accelerator, timed: TimedKernel) -> bool:
    """Whether its elements, whose rate is not fitted, are slower than its bytes at the packaged bandwidth."""
    work = elementwise_work(timed.sample.kernel)
    if work is None:
        return False
    bandwidth = accelerator.efficiency.reached_bandwidth(accelerator.memory_bandwidth)
    return work.element_seconds(accelerator.compute_units) > work.unvectorized / bandwidth


def _is_cast(timed: TimedKernel) -> bool:
    return timed.sample.kind is KernelKind.CAST


def _memory_bound_samples(accelerator: Accelerator, timed_kernels: Iterable[TimedKernel]) -> list[MemoryBoundSample]:
    return [_memory_bound_sample(accelerator, timed) for timed in timed_kernels]


def _memory_bound_sample(accelerator: Accelerator, timed: TimedKernel) -> MemoryBoundSample:
    """A sample with the bytes that operators' bandwidth moves in its time: fewer where it streams as copies do."""
    sample, work = timed.sample, elementwise_work(timed.sample.kernel)
    if work is None:
        return MemoryBoundSample(sample.bytes, sample.launches, timed.seconds)
    ratio = 1.0 if work.is_one_kernel else accelerator.efficiency.operator_bandwidth_ratio
    moved, unvectorized = ratio * sample.bytes, ratio * work.unvectorized
    element_seconds = work.element_seconds(accelerator.compute_units)
    return MemoryBoundSample(moved, sample.launches, timed.seconds, unvectorized, element_seconds)


def _fit_attention(state: FitState, accelerator: Accelerator, timed_kernels: Sequence[TimedKernel]) -> FitState:
    """Fit the constants of one direction, at the peaks that the matmuls gave."""
    if not timed_kernels:
        return state
    name, dtype = timed_kernels[0].sample.kind.value, timed_kernels[0].sample.dtype
    state, samples = _with_missing_peaks(state, timed_kernels), _attention_samples(timed_kernels)
    default_constants: AttentionEfficiency = getattr(accelerator.efficiency, name)
    peak = state.accelerator.peak_flops(dtype)
    fixed_grid = single_point_grid(
        replace(
            default_constants, peak_fraction=default_constants.peak_fraction * accelerator.peak.get(dtype, peak) / peak
        )
    )
    optima = [
        search_attention(state.accelerator, samples, grid)
        for grid in (fixed_grid, replace(fixed_grid, shares=SHARE_GRID))
    ]
    causal_factors = CAUSAL_FACTORS if any(sample.shape.causal for sample in samples) else fixed_grid.causal_factors
    full_grid = AttentionGrid(shares_near(optima[-1]), causal_factors, HEAD_OVERHEADS, KEY_OVERHEADS, BLOCK_SIZES)
    optima.append(search_attention(state.accelerator, samples, full_grid))
    optimum = select_supported(optima, measured_seconds(timed_kernels))
    return state.with_fit(timed_kernels, optimum, **{name: winner_constants(optimum)})


def _with_missing_peaks(state: FitState, timed_kernels: Sequence[TimedKernel]) -> FitState:
    """Add peaks of formats that neither the datasheet nor a matmul determined."""
    for dtype, format_kernels in group_by_format(timed_kernels).items():
        if dtype not in state.accelerator.peak:
            state = state.with_peak(dtype, RATE_MARGIN * best_rate(format_kernels))
    return state


def _attention_samples(timed_kernels: Iterable[TimedKernel]) -> list[AttentionSample]:
    return [
        AttentionSample(
            accelerator=timed.sample.source,
            shape=timed.sample.shape,
            dtype=timed.sample.dtype,
            backward=timed.sample.kind is KernelKind.ATTENTION_BACKWARD,
            flops=timed.sample.flops,
            moved_bytes=timed.sample.bytes,
            seconds=timed.seconds,
        )
        for timed in timed_kernels
        if isinstance(timed.sample.shape, AttentionShape)
    ]


def _fit_family_factors(
    state: FitState, timed_kernels: Sequence[TimedKernel]
) -> tuple[dict[str, float], dict[str, FitResidual]]:
    """By kernel family: the factor that its samples support, if any, and the residual with it."""
    roofline, ratios = Roofline(state.accelerator), dict[str, list[tuple[float, float]]]()
    for timed in timed_kernels:
        predicted = roofline.time_kernel(timed.sample.kernel).seconds
        left_out = state.leave_one_out.get(timed.index, predicted)
        pair = (predicted / timed.seconds, left_out / timed.seconds)
        ratios.setdefault(family_of(timed.sample.signature), []).append(pair)
    factors: dict[str, float] = {}
    residuals: dict[str, FitResidual] = {}
    for name, pairs in ratios.items():
        fitted, left_out = np.array(pairs).T
        factor, loo_factors = _mean_factor(fitted), _leave_one_out_factors(left_out)
        error, unscaled_error = (float(np.abs(ratios - 1.0).mean()) for ratios in (left_out * loo_factors, left_out))
        if error < MAX_ERROR_RATIO * unscaled_error:
            factors[name], fitted, left_out = factor, fitted * factor, left_out * loo_factors
        errors = (float(np.abs(ratios - 1.0).mean()) for ratios in (fitted, left_out))
        residuals[name] = FitResidual(len(pairs), *errors)
    return factors, residuals


def _mean_factor(ratios: FloatArray) -> float:
    """Factor by which to multiply predicted times, from ratios of predicted to measured times."""
    return float(np.exp(-np.log(ratios).mean()))


def _leave_one_out_factors(ratios: FloatArray) -> FloatArray:
    """The same factor from all samples but each: [samples]; 1 if there are no others."""
    logs = np.log(ratios)
    factors: FloatArray = np.exp(-(logs.sum() - logs) / max(1, len(logs) - 1))
    return factors
