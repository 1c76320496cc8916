"""How long does a kernel take, given measurements on this hardware?

A measured kernel takes its median time. A kernel between measured ones (inside the convex hull of those of
its family, in log sizes: `cost.kernel_features`, `cost.convex_hull`) takes the fitted kernel model's time,
times the measured/model ratio interpolated from its neighbours (`cost.kriging`). A kernel outside takes the
fitted model's time. Errors are, respectively, the dispersion of the sample; the mean leave-one-out error of
the samples compared (those on the hull included, so it is rather too large); and the model's leave-one-out
residual.

Samples are of isolated kernels; where the record has in-situ factors, they are applied on top
(`cost.in_situ`). Times are device time, without host launches. Where a record gives host seconds per
launch, `cost.host_launch` finds when the device waits for the host, and kernels take device time only: a
lower bound on each kernel would count launches twice, and also those that the host issues ahead. Without
host samples a kernel takes at least the time of its launches in sequence; on a CPU there is no such bound,
as the launching thread is the one that computes.

Assumed: a sample represents the kernel wherever it runs in a step, with caches as in training (further
effects of a step are in `cost.sustained_rate`). Times from published or derived samples are never labelled
measured or interpolated, and their errors, which are of other machines, are not used.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.cached_method import cached_method
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    KernelFit,
    KernelSample,
    TimeStatistics,
    family_of,
    signature_of,
)
from clustersim.cost.convex_hull import is_in_convex_hull
from clustersim.cost.in_situ import InSituFactors
from clustersim.cost.kernel_features import LAYOUT_DISTANCE, KernelFeatures, extract_features
from clustersim.cost.kriging import Kriging, smooth_correlation
from clustersim.cost.measured_host import host_samples, is_compute_host
from clustersim.cost.record_kinds import MeasurementOutcome, RecordOrigin
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import Bottleneck, KernelTiming, Provenance
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import Kernel

_PROVENANCE_OF_ORIGIN: Final = {RecordOrigin.PUBLISHED: Provenance.PUBLISHED, RecordOrigin.DERIVED: Provenance.DERIVED}


def provenance_of(origin: RecordOrigin, provenance: Provenance) -> Provenance:
    """Provenance of a duration found in a record of this origin."""
    return _PROVENANCE_OF_ORIGIN.get(origin, provenance)


def local_error(origin: RecordOrigin, error: float | None) -> float | None:
    """Error of a record as far as it applies to this machine: None for published and derived records."""
    return error if origin is RecordOrigin.MEASURED else None


def fitted_model(fit: KernelFit | None, accelerator: Accelerator) -> Roofline:
    """The kernel model with a record's constants, or the accelerator's own where the record has no fit."""
    if fit is None:
        return Roofline(accelerator)
    return Roofline(
        replace(
            accelerator,
            peak={**accelerator.peak, **fit.peak},
            memory_bandwidth=fit.memory_bandwidth,
            compute_units=fit.compute_units,
            efficiency=fit.efficiency,
        )
    )


def _with_launch_interval(accelerator: Accelerator, interval: Seconds) -> Roofline:
    """The kernel model with this launch interval of the host."""
    return Roofline(replace(accelerator, efficiency=replace(accelerator.efficiency, launch_interval=interval)))


class MeasuredKernels:
    """Kernel durations of one accelerator from its calibration record (a `KernelCost`), with a cache.

    record: of this accelerator (checked by the caller); accelerator: supplies what the record's fit does not
    have; model: the kernel model of the measured device, launches included.
    """

    def __init__(self, record: CalibrationRecord, accelerator: Accelerator) -> None:
        self._origin, self._fit = record.origin, record.kernel_fit
        fitted = fitted_model(record.kernel_fit, accelerator).accelerator
        measured_interval, fitted_interval = record.launch_interval, fitted.efficiency.launch_interval
        launches_hidden = bool(host_samples(record)) and not is_compute_host(record)
        self._interval = 0.0 if launches_hidden else fitted_interval if measured_interval is None else measured_interval
        self.model = _with_launch_interval(fitted, self._interval)
        self._device_model = _with_launch_interval(fitted, 0.0)
        self._time_by_signature = {sample.signature: time for sample, time in _with_time(record.kernels)}
        self._absent = {sample.signature for sample in record.kernels if sample.outcome is MeasurementOutcome.ABSENT}
        self._absent_families = {family_of(signature) for signature in self._absent} - {
            family_of(sample.signature) for sample, _ in _with_time(record.kernels)
        }
        self._scales_samples = record.profile is not None
        self._in_situ = InSituFactors.from_record(record)
        self._samples_by_family = _group_by_family(record.kernels)

    @cached_method
    def time_kernel(self, kernel: Kernel) -> KernelTiming:
        """Time one kernel: in isolation, or in a step where the record has in-situ factors."""
        in_situ = self._in_situ.apply(self._device_time(kernel), kernel.kind, signature_of(kernel))
        is_launched = in_situ.seconds > 0.0  # an absent kernel is not
        return self._at_least_launch_time(in_situ, kernel.launches) if is_launched else in_situ

    def _at_least_launch_time(self, timing: KernelTiming, launch_count: int) -> KernelTiming:
        """Raise a time to the seconds that the host needs for the launches."""
        launch_seconds = launch_count * self._interval
        return (
            timing
            if launch_seconds <= timing.seconds
            else replace(timing, seconds=launch_seconds, bottleneck=Bottleneck.LAUNCH)
        )

    def _device_time(self, kernel: Kernel) -> KernelTiming:
        modelled, key = self._device_model.time_kernel(kernel), signature_of(kernel)
        if key is None:
            return self._extrapolate(modelled, None)
        if key in self._absent or family_of(key) in self._absent_families:
            provenance_of_absence = Provenance.MEASURED if key in self._absent else Provenance.FITTED
            return replace(
                modelled, seconds=0.0, provenance=provenance_of(self._origin, provenance_of_absence), error=0.0
            )
        statistics = self._time_by_signature.get(key)
        if statistics is not None:
            return self._measured_timing(
                modelled, statistics.seconds, self._dispersion(statistics, family_of(key)), Provenance.MEASURED
            )
        interpolated = self._interpolate(extract_features(key), modelled.seconds)
        if interpolated is not None:
            return self._measured_timing(modelled, *interpolated, Provenance.INTERPOLATED)
        if self._scales_samples:
            scaled = self._scale_nearest(extract_features(key), modelled)
            if scaled is not None:
                return scaled
        return self._extrapolate(modelled, family_of(key))

    def _dispersion(self, statistics: TimeStatistics, family_name: str) -> float | None:
        """Dispersion of a sample's repetitions; with a single repetition, the family's residual.

        A profiled kernel's repetitions are at different places of a step, whose mean is what a step takes: its error.
        """
        if statistics.dispersion is not None:
            place_count = statistics.repetitions if self._scales_samples else 1
            return statistics.dispersion / math.sqrt(place_count)
        residual = None if self._fit is None else self._fit.residuals.get(family_name)
        return None if residual is None else residual.leave_one_out_error

    def _measured_timing(
        self, modelled: KernelTiming, seconds: Seconds, error: float | None, provenance: Provenance
    ) -> KernelTiming:
        return KernelTiming(
            seconds, provenance_of(self._origin, provenance), modelled.bottleneck, local_error(self._origin, error)
        )

    def _interpolate(self, features: KernelFeatures, modelled: Seconds) -> tuple[Seconds, float] | None:
        """Interpolated seconds and their error; None outside the hull of the measured samples."""
        if features.comparable_key not in self._samples_by_family:
            return None
        neighbourhood = self._neighbourhood(features.comparable_key)
        return (
            (modelled * neighbourhood.factor(features), neighbourhood.error)
            if neighbourhood.encloses(features)
            else None
        )

    @cached_method
    def _neighbourhood(self, comparable_key: Hashable) -> "_FamilySamples":
        return _family_samples(self._samples_by_family[comparable_key], self._device_model)

    def _scale_nearest(self, features: KernelFeatures, modelled: KernelTiming) -> KernelTiming | None:
        """The model's time, scaled as that of the profiled kernels that are nearest; None where there are none.

        The error is that of the same prediction for the profiled kernels; for a family of one kernel, its correction,
        as far as a kernel at that distance differs from it (`cost.kriging`).
        """
        if features.comparable_key not in self._samples_by_family:
            return None
        neighbourhood = self._neighbourhood(features.comparable_key)
        factor = neighbourhood.anchored_factor(features)
        error = neighbourhood.error
        if len(neighbourhood.log_ratios) == 1:
            error = abs(factor - 1.0) * (1.0 - neighbourhood.correlation(features))
        return replace(
            modelled,
            seconds=modelled.seconds * factor,
            provenance=provenance_of(self._origin, Provenance.FITTED),
            error=local_error(self._origin, error),
        )

    def _extrapolate(self, modelled: KernelTiming, family_name: str | None) -> KernelTiming:
        """Time by the model fitted to the record, or by the accelerator's own."""
        if self._fit is None:
            return modelled
        left_out = {name: residual.leave_one_out_error for name, residual in self._fit.residuals.items()}
        error = left_out.get(family_name or "", max(left_out.values(), default=None))
        seconds = modelled.seconds * self._fit.factors.get(family_name or "", 1.0)
        return replace(
            modelled,
            seconds=seconds,
            provenance=provenance_of(self._origin, Provenance.FITTED),
            error=local_error(self._origin, error),
        )


@dataclass(frozen=True)
class _FamilySamples:
    """Measured samples of one family.

    log_sizes: [samples, sizes]; log_ratios: [samples] logarithms of measured over modelled seconds; layouts:
    one of each.
    """

    log_sizes: FloatArray
    log_ratios: FloatArray
    layouts: Sequence[tuple[object, ...]]

    def encloses(self, features: KernelFeatures) -> bool:
        """Whether the samples of the same layout enclose a kernel (convex hull)."""
        return is_in_convex_hull(self._points_of(features.layout), np.array(features.log_sizes))

    @cached_method
    def _points_of(self, layout: tuple[object, ...]) -> FloatArray:
        """[samples, sizes] of the samples of a layout."""
        points: FloatArray = self.log_sizes[np.array([other == layout for other in self.layouts])]
        return points

    def factor(self, features: KernelFeatures) -> float:
        """Interpolated ratio of measured to modelled seconds."""
        point = np.append(features.log_sizes, self._layout_coordinates([features.layout])[0])
        return math.exp(self._kriging.predict(point))

    def anchored_factor(self, features: KernelFeatures) -> float:
        """Ratio of measured to modelled seconds, interpolated as differences from the mean of all samples.

        Far from all samples it is their mean, where `factor` approaches the model.
        """
        point = np.append(features.log_sizes, self._layout_coordinates([features.layout])[0])
        mean = float(self.log_ratios.mean())
        return math.exp(mean + replace(self._kriging, values=self.log_ratios - mean).predict(point))

    def correlation(self, features: KernelFeatures) -> float:
        """Correlation of a kernel's ratio with that of the nearest sample, as `cost.kriging` assumes it."""
        distances = np.linalg.norm(self.log_sizes - np.array(features.log_sizes), axis=1)
        return smooth_correlation(float(distances.min()))

    @cached_property
    def error(self) -> float:
        """Mean leave-one-out error of the samples, relative to the measured time."""
        return float(np.abs(np.expm1(self._kriging.leave_one_out() - self.log_ratios)).mean())

    @cached_property
    def _kriging(self) -> Kriging:
        return Kriging(np.hstack([self.log_sizes, self._layout_coordinates(self.layouts)]), self.log_ratios)

    @cached_property
    def _layout_features(self) -> tuple[tuple[int, object], ...]:
        """All (position, value) pairs that occur in layouts."""
        return tuple(dict.fromkeys(feature for layout in self.layouts for feature in enumerate(layout)))

    def _layout_coordinates(self, layouts: Sequence[tuple[object, ...]]) -> FloatArray:
        """One-hot coordinates of layouts, scaled so that one difference is LAYOUT_DISTANCE: [layouts, features]."""
        one_hot = [[layout[position] == value for position, value in self._layout_features] for layout in layouts]
        return np.array(one_hot, dtype=np.float64).reshape(len(layouts), -1) * LAYOUT_DISTANCE / math.sqrt(2.0)


@dataclass(frozen=True, slots=True)
class _MeasuredKernel:
    """A measured kernel, its features, and its seconds."""

    features: KernelFeatures
    kernel: Kernel
    seconds: Seconds


def _family_samples(samples: Sequence[_MeasuredKernel], model: Roofline) -> _FamilySamples:
    """Samples of one family, relative to a model."""
    log_sizes = np.array([sample.features.log_sizes for sample in samples])
    log_ratios = np.array([math.log(sample.seconds / model.time_kernel(sample.kernel).seconds) for sample in samples])
    return _FamilySamples(log_sizes, log_ratios, [sample.features.layout for sample in samples])


def _with_time(samples: Iterable[KernelSample]) -> Iterable[tuple[KernelSample, TimeStatistics]]:
    return (
        (sample, sample.time)
        for sample in samples
        if sample.outcome is MeasurementOutcome.MEASURED and sample.time is not None
    )


def _group_by_family(samples: Iterable[KernelSample]) -> Mapping[Hashable, list[_MeasuredKernel]]:
    samples_by_family: dict[Hashable, list[_MeasuredKernel]] = {}
    for sample, time in _with_time(samples):
        features = extract_features(sample.signature)
        samples_by_family.setdefault(features.comparable_key, []).append(
            _MeasuredKernel(features, sample.kernel, time.seconds)
        )
    return samples_by_family
