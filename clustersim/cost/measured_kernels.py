"""How long does a kernel take, from what was measured on this hardware?

What was timed takes what it took (the median). A kernel between measured ones (inside the convex hull of those of its
family, in logarithms of sizes: `cost.kernel_features`, `cost.convex_hull`) takes what the fitted kernel model says, times what
its neighbours took relative to the model (`cost.kriging`). What lies beyond takes what the fitted model says. Errors
are the dispersion of the row; the mean error of the rows that it was compared with, each predicted from the others
(those on the hull too, so it is rather too large); and the model's residual, of each row from the fit to the others.

Rows are of kernels by themselves; where the record has measured what real layers do to them, that comes on top
(`cost.in_situ`). They are device time, without what the host takes to launch. Where a record says what its host needs for
each launch of a step, `cost.host_launch` finds when the device waits for it, and kernels take what the device does: a
floor under each would count launches twice, and those too that the host is ahead with. Without such rows no kernel
takes less than its launches do, one after the other; on a CPU none ever does, as the thread that launches is the one
that computes.

Assumed: a measured row stands for the kernel wherever it runs in a step, with caches as in training (what else a step
does to its pace is `cost.sustained_rate`'s). What a record of published or derived rows says is never called measured or
interpolated, and its errors, which are of other machines, do not count.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import KernelFit, KernelRow, Origin, Outcome, Record, Spread, family, signature
from clustersim.cost.convex_hull import inside
from clustersim.cost.in_situ import InChain
from clustersim.cost.kernel_features import LAYOUT_DISTANCE, Place, place
from clustersim.cost.kriging import Kriging
from clustersim.cost.measured_host import computes, host_rows
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import Bound, Provenance, Timing
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import Kernel

_STANDING: Final = {Origin.PUBLISHED: Provenance.PUBLISHED, Origin.DERIVED: Provenance.DERIVED}


def standing(origin: Origin, provenance: Provenance) -> Provenance:
    """What a duration rests on, if it was found so in a record of this origin."""
    return _STANDING.get(origin, provenance)


def own_error(origin: Origin, error: float | None) -> float | None:
    """What a record's error says of this machine: nothing, where others measured, or another machine."""
    return error if origin is Origin.MEASURED else None


def fitted_model(fit: KernelFit | None, accelerator: Accelerator) -> Roofline:
    """The kernel model with a record's constants, or with the accelerator's own where the record has none."""
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


def _launched_each(accelerator: Accelerator, interval: Seconds) -> Roofline:
    """The kernel model of a host that launches a kernel each so often."""
    return Roofline(replace(accelerator, efficiency=replace(accelerator.efficiency, launch_interval=interval)))


class RecordedKernels:
    """A source of kernel durations for one accelerator (a `KernelCost`); remembers the kernels that it has timed.

    record: of this accelerator (the door has checked); accelerator: gives what the record's fit does not. model: the
    kernel model of what was measured, launches included.
    """

    def __init__(self, record: Record, accelerator: Accelerator) -> None:
        self._origin, self._fit = record.origin, record.kernel_fit
        fitted = fitted_model(record.kernel_fit, accelerator).accelerator
        measured, own = record.launch_interval, fitted.efficiency.launch_interval
        hidden = bool(host_rows(record)) and not computes(record)
        self._interval = 0.0 if hidden else own if measured is None else measured
        self.model = _launched_each(fitted, self._interval)
        self._model = _launched_each(fitted, 0.0)
        self._rows = {row.signature: time for row, time in _timed(record.kernels)}
        self._chain = InChain.of(record)
        self._kin = _by_kin(record.kernels)
        self._kindred: dict[Hashable, _Kindred] = {}
        self._timings: dict[Kernel, Timing] = {}

    def kernel(self, kernel: Kernel) -> Timing:
        """Time one kernel on one accelerator: alone, or in a step where the record says how that differs."""
        timing = self._timings.get(kernel)
        if timing is None:
            within = self._chain.timing(self._time(kernel), kernel.kind, signature(kernel))
            timing = self._timings[kernel] = self._launched(within, kernel.launches)
        return timing

    def _launched(self, timing: Timing, launches: int) -> Timing:
        """No kernel takes less than the host needs to launch it."""
        floor = launches * self._interval
        return timing if floor <= timing.seconds else replace(timing, seconds=floor, bound=Bound.LAUNCH)

    def _time(self, kernel: Kernel) -> Timing:
        modelled, sought = self._model.kernel(kernel), signature(kernel)
        if sought is None:
            return self._beyond(modelled, None)
        row = self._rows.get(sought)
        if row is not None:
            return self._recorded(modelled, row.seconds, self._dispersion(row, family(sought)), Provenance.MEASURED)
        between = self._between(place(sought), modelled.seconds)
        if between is not None:
            return self._recorded(modelled, *between, Provenance.INTERPOLATED)
        return self._beyond(modelled, family(sought))

    def _dispersion(self, row: Spread, named: str) -> float | None:
        """How far repetitions of a row lie apart; where there is one alone, the family's residual."""
        if row.dispersion is not None:
            return row.dispersion
        residual = None if self._fit is None else self._fit.residuals.get(named)
        return None if residual is None else residual.left_out

    def _recorded(self, modelled: Timing, seconds: Seconds, error: float | None, provenance: Provenance) -> Timing:
        return Timing(seconds, standing(self._origin, provenance), modelled.bound, own_error(self._origin, error))

    def _between(self, sought: Place, modelled: Seconds) -> tuple[Seconds, float] | None:
        """Seconds and their error, where measured rows lie around."""
        if sought.kin not in self._kin:
            return None
        if sought.kin not in self._kindred:
            self._kindred[sought.kin] = _kindred(self._kin[sought.kin], self._model)
        kindred = self._kindred[sought.kin]
        return (modelled * kindred.factor(sought), kindred.error) if kindred.around(sought) else None

    def _beyond(self, modelled: Timing, named: str | None) -> Timing:
        """What the model says, which was fitted to the record or is the accelerator's own."""
        if self._fit is None:
            return modelled
        left_out = {name: residual.left_out for name, residual in self._fit.residuals.items()}
        error = left_out.get(named or "", max(left_out.values(), default=None))
        seconds = modelled.seconds * self._fit.factors.get(named or "", 1.0)
        return replace(
            modelled,
            seconds=seconds,
            provenance=standing(self._origin, Provenance.FITTED),
            error=own_error(self._origin, error),
        )


@dataclass(frozen=True)
class _Kindred:
    """Measured rows that are compared with each other.

    points: [rows, sizes]; ratios: [rows] logarithms of measured over modelled seconds; layouts: one of each row.
    """

    points: FloatArray
    ratios: FloatArray
    layouts: Sequence[tuple[object, ...]]
    _alike: dict[tuple[object, ...], FloatArray] = field(default_factory=dict, repr=False, compare=False)

    def around(self, sought: Place) -> bool:
        """Whether rows of the same layout lie around."""
        if sought.layout not in self._alike:
            same = np.array([layout == sought.layout for layout in self.layouts])
            self._alike[sought.layout] = self.points[same]
        return inside(self._alike[sought.layout], np.array(sought.point))

    def factor(self, sought: Place) -> float:
        """Measured over modelled seconds, as expected from the rows."""
        point = np.append(sought.point, self._marks([sought.layout])[0])
        return math.exp(self._kriging.at(point))

    @cached_property
    def error(self) -> float:
        """Mean error of rows that are predicted from the others, as a part of what was measured."""
        return float(np.abs(np.expm1(self._kriging.left_out() - self.ratios)).mean())

    @cached_property
    def _kriging(self) -> Kriging:
        return Kriging(np.hstack([self.points, self._marks(self.layouts)]), self.ratios)

    @cached_property
    def _columns(self) -> tuple[tuple[int, object], ...]:
        """What a layout may be, by its place in it."""
        return tuple(dict.fromkeys(item for layout in self.layouts for item in enumerate(layout)))

    def _marks(self, layouts: Sequence[tuple[object, ...]]) -> FloatArray:
        """Coordinates of layouts, which put two that differ in one thing at their distance: [layouts, things]."""
        marked = [[layout[at] == thing for at, thing in self._columns] for layout in layouts]
        return np.array(marked, dtype=np.float64).reshape(len(layouts), -1) * LAYOUT_DISTANCE / math.sqrt(2.0)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A kernel, its place among others, and what it took."""

    place: Place
    kernel: Kernel
    seconds: Seconds


def _kindred(rows: Sequence[_Measured], model: Roofline) -> _Kindred:
    """Rows of one kin, relative to a model."""
    points = np.array([row.place.point for row in rows])
    ratios = np.array([math.log(row.seconds / model.kernel(row.kernel).seconds) for row in rows])
    return _Kindred(points, ratios, [row.place.layout for row in rows])


def _timed(rows: Iterable[KernelRow]) -> Iterable[tuple[KernelRow, Spread]]:
    return ((row, row.time) for row in rows if row.outcome is Outcome.MEASURED and row.time is not None)


def _by_kin(rows: Iterable[KernelRow]) -> Mapping[Hashable, list[_Measured]]:
    found: dict[Hashable, list[_Measured]] = {}
    for row, time in _timed(rows):
        where = place(row.signature)
        found.setdefault(where.kin, []).append(_Measured(where, row.kernel, time.seconds))
    return found
