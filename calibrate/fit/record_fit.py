"""Which constants of the cost models does a calibration record support?

The kernel model of `cost.roofline` is fitted to the record's own rows, one kind after the other: streaming kernels give
the part of the memory bandwidth and the latency of a kernel, casts into formats with scales a part of that bandwidth,
matmuls their constants and the rate of each number format, flash attention its own in each direction. Constants that
are searched must lower the left-out error; where the rows do not support one (few, or all alike), the accelerator's own
value stays. The model of collectives is fitted by `calibrate.fit.alpha_beta`.

What stands for the datasheet's in the fit:

- `peak`: the datasheet's, where the fitted rate of matmuls stays below it on a GPU. On a CPU, whose files are
  placeholders, and on a GPU that beats its datasheet, the fitted rate itself (or the best measured, if that is higher).
- `memory_bandwidth`: by the same rule, from copies in device memory and streaming kernels.
- `compute_units`: of the device; of a CPU, the threads that a process computes with.

- `factors`: what a family of kernels takes relative to the model that all of them share, where leaving rows out shows
  that it holds (norms in FP32 pieces do not reach the bandwidth of a copy, for one).

Rows are device time: the launch interval, below which no kernel is predicted, is left out of the search.

Left-out errors are those of each kind's own search: constants from the kinds before it are kept, so those have been
seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from calibrate.fit.alpha_beta import fit_calls
from calibrate.fit.attention import (
    BLOCKS,
    HEAD_OVERHEADS,
    KEY_OVERHEADS,
    MASKS,
    AttentionGrid,
    attention_constants,
    own_attention,
    search_attention,
)
from calibrate.fit.fit_state import (
    ROOM,
    SHARES,
    State,
    Timed,
    best_rate,
    by_format,
    latencies,
    near,
    seconds_of,
    with_constants,
)
from calibrate.fit.grid_search import WORTH, supported
from calibrate.fit.matmul_formats import fit_formats
from calibrate.fit.memory_bound import StreamRow, fit_casts, fit_streaming
from calibrate.fit.published_kernels import AttentionRow
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
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import AttentionEfficiency
from clustersim.model.kernels import AttentionShape, KernelKind, MemoryBoundShape


def fitted(record: CalibrationRecord, accelerator: Accelerator) -> CalibrationRecord:
    """The record with the constants that its rows support; without kernels (or collectives) there is no fit of them."""
    timed = [row for row in record.kernels if row.time is not None]
    fit = fit_kernels(record, accelerator) if timed else None
    return replace(record, kernel_fit=fit, collective_fits=fit_calls(record.collectives))


def fit_kernels(record: CalibrationRecord, accelerator: Accelerator) -> KernelFit:
    """The kernel model fitted to the record's rows, of which at least one was measured."""
    times = ((row, row.time.seconds) for row in record.kernels if row.time is not None)
    rows = [Timed(place, row, seconds) for place, (row, seconds) in enumerate(times)]
    state = _fit_streaming(_ground(record, accelerator), rows, record.copies)
    state = fit_formats(_fit_casts(state, rows), rows)
    for kind in (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD):
        state = _fit_attention(state, accelerator, [timed for timed in rows if timed.row.kind is kind])
    factors, residuals = _families(state, rows)
    found = with_constants(state.accelerator, launch_interval=_launch_interval(record, accelerator))
    return KernelFit(
        peak=dict(found.peak),
        memory_bandwidth=found.memory_bandwidth,
        compute_units=found.compute_units,
        efficiency=found.efficiency,
        factors=factors,
        residuals=residuals,
    )


def _ground(record: CalibrationRecord, accelerator: Accelerator) -> State:
    """The device's own numbers in place of the file's, before anything is searched."""
    device = record.device
    units = device.compute_units or (device.threads if _is_cpu(device) else 0) or accelerator.compute_units
    found = with_constants(accelerator, published=True, launch_interval=0.0)
    return State(replace(found, compute_units=units), _is_cpu(device))


def _launch_interval(record: CalibrationRecord, accelerator: Accelerator) -> Seconds:
    known = record.launch_interval
    return accelerator.efficiency.launch_interval if known is None else known


def _is_cpu(device: DeviceInfo) -> bool:
    """Whether the machine computes with its processor."""
    return device.threads > 0


def _fit_streaming(state: State, rows: Sequence[Timed], copies: Iterable[CopySample]) -> State:
    """Part of the memory bandwidth, and the latency of a kernel."""
    chosen = [timed for timed in rows if isinstance(timed.row.shape, MemoryBoundShape) and not _casts(timed)]
    streams = _streams(chosen)
    copied = [StreamRow(2.0 * row.bytes, 1, row.time.seconds) for row in copies if row.route == "device"]
    if not (streams or copied):
        return state
    nominal, own = state.accelerator.memory_bandwidth, state.accelerator.efficiency
    scale = state.scale(nominal, max(row.moved / row.seconds for row in copied or streams))
    known = with_constants(state.accelerator, memory=own.memory * nominal / scale.rate)
    winner = fit_streaming(replace(known, memory_bandwidth=scale.rate), streams or copied, latencies(rows))
    part, latency = winner.constants
    bandwidth = scale.nominal(part)
    found = state.fitted(chosen, winner if streams else replace(winner, left_out=np.zeros(0)))
    constants = with_constants(state.accelerator, memory=part * scale.rate / bandwidth, kernel_latency=latency)
    return replace(found, accelerator=replace(constants, memory_bandwidth=bandwidth))


def _fit_casts(state: State, rows: Sequence[Timed]) -> State:
    """Part of the bandwidth of streaming kernels that casts into formats with scales reach."""
    chosen = [timed for timed in rows if _casts(timed)]
    if not chosen:
        return state
    winner = fit_casts(state.accelerator, _streams(chosen))
    return state.fitted(chosen, winner, casts=winner.constants[0] / state.accelerator.efficiency.memory)


def _casts(timed: Timed) -> bool:
    return timed.row.kind is KernelKind.CAST


def _streams(rows: Iterable[Timed]) -> list[StreamRow]:
    return [StreamRow(timed.row.bytes, timed.row.launches, timed.seconds) for timed in rows]


def _fit_attention(state: State, accelerator: Accelerator, rows: Sequence[Timed]) -> State:
    """The constants of one direction, with the peaks that the matmuls gave."""
    if not rows:
        return state
    name, dtype = rows[0].row.kind.value, rows[0].row.dtype
    state, measured = _with_peaks(state, rows), _attentions(rows)
    own: AttentionEfficiency = getattr(accelerator.efficiency, name)
    peak = state.accelerator.peak_flops(dtype)
    given = own_attention(replace(own, share=own.share * accelerator.peak.get(dtype, peak) / peak))
    winners = [search_attention(state.accelerator, measured, grid) for grid in (given, replace(given, shares=SHARES))]
    masks = MASKS if any(attention_row.shape.causal for attention_row in measured) else given.masks
    rich = AttentionGrid(near(winners[-1]), masks, HEAD_OVERHEADS, KEY_OVERHEADS, BLOCKS)
    winners.append(search_attention(state.accelerator, measured, rich))
    winner = supported(winners, seconds_of(rows))
    return state.fitted(rows, winner, **{name: attention_constants(winner)})


def _with_peaks(state: State, rows: Sequence[Timed]) -> State:
    """With peaks of the formats that no datasheet and no matmul told."""
    for dtype, same in by_format(rows).items():
        if dtype not in state.accelerator.peak:
            state = state.with_peak(dtype, ROOM * best_rate(same))
    return state


def _attentions(rows: Iterable[Timed]) -> list[AttentionRow]:
    return [
        AttentionRow(
            accelerator=timed.row.source,
            shape=timed.row.shape,
            dtype=timed.row.dtype,
            backward=timed.row.kind is KernelKind.ATTENTION_BACKWARD,
            flops=timed.row.flops,
            moved=timed.row.bytes,
            seconds=timed.seconds,
        )
        for timed in rows
        if isinstance(timed.row.shape, AttentionShape)
    ]


def _families(state: State, rows: Sequence[Timed]) -> tuple[dict[str, float], dict[str, FitResidual]]:
    """By family: the factor that its rows support, if any, and how the model with it meets them."""
    roofline, ratios = Roofline(state.accelerator), dict[str, list[tuple[float, float]]]()
    for timed in rows:
        predicted = roofline.time_kernel(timed.row.kernel).seconds
        left_out = state.left_out.get(timed.place, predicted)
        pair = (predicted / timed.seconds, left_out / timed.seconds)
        ratios.setdefault(family_of(timed.row.signature), []).append(pair)
    factors: dict[str, float] = {}
    residuals: dict[str, FitResidual] = {}
    for name, pairs in ratios.items():
        fitted, left_out = np.array(pairs).T
        factor, others = _factor(fitted), _factors_of_others(left_out)
        error, plain = (float(np.abs(item - 1.0).mean()) for item in (left_out * others, left_out))
        if error < WORTH * plain:
            factors[name], fitted, left_out = factor, fitted * factor, left_out * others
        errors = (float(np.abs(element - 1.0).mean()) for element in (fitted, left_out))
        residuals[name] = FitResidual(len(pairs), *errors)
    return factors, residuals


def _factor(ratios: FloatArray) -> float:
    """By which predicted times are to be multiplied, given what they are relative to measured ones."""
    return float(np.exp(-np.log(ratios).mean()))


def _factors_of_others(ratios: FloatArray) -> FloatArray:
    """Of all rows but each: [rows]; 1 where there are no others."""
    logs = np.log(ratios)
    others: FloatArray = np.exp(-(logs.sum() - logs) / max(1, len(logs) - 1))
    return others
