"""How long does one collective take for any payload, given some measured payloads?

A measured payload takes its measured time; where its repetitions are unknown, it gets the interpolation
error. Between two measured payloads, log(time) is linear in log(payload); the error is the mean over inner
payloads of each predicted from its neighbours (with two payloads only, half of the range between them).
Outside the measured range the latency is the fitted alpha, and the bandwidth that of the nearest measured
payload n, which takes t: alpha + (t - alpha) * payload / n. So a payload above all others moves at the rate
of the largest one, whatever protocols are used below (alpha + payload / beta is one line through all points
and passes through none), and there is no jump at the ends of the measured range. The error is the residual
of the fit, which spans the protocols. Without a fit there is no extrapolation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.calibration_record import CollectiveFit, TimeStatistics
from clustersim.cost.timing import Provenance


@dataclass(frozen=True, slots=True)
class CurveEstimate:
    """Estimated time of one payload."""

    seconds: Seconds
    provenance: Provenance
    error: float | None


@dataclass(frozen=True)
class PayloadCurve:
    """Measured times of one collective, for one group size and node count.

    times: by payload; fit: latency-bandwidth fit, None if there is none.
    """

    times: Mapping[Bytes, TimeStatistics]
    fit: CollectiveFit | None

    def estimate(self, payload: Bytes) -> CurveEstimate | None:
        """Estimate for a payload; None outside the measured range without a fit."""
        time = self.times.get(payload)
        if time is not None:
            error = time.dispersion
            return CurveEstimate(time.seconds, Provenance.MEASURED, self._error if error is None else error)
        if self._payloads[0] < payload < self._payloads[-1]:
            seconds = float(_interpolate_loglog(np.array([payload]), self._payloads, self._seconds)[0])
            return CurveEstimate(seconds, Provenance.INTERPOLATED, self._error)
        if self.fit is None:
            return None
        return CurveEstimate(
            self._extrapolate(payload, self.fit.alpha), Provenance.FITTED, self.fit.residual.leave_one_out_error
        )

    def _extrapolate(self, payload: Bytes, alpha: Seconds) -> Seconds:
        """Seconds of a payload below or above all measured ones."""
        measured = self.nearest_payload(payload)
        seconds = self.times[measured].seconds
        latency = min(alpha, seconds)
        return latency + (seconds - latency) * payload / measured

    def nearest_payload(self, payload: Bytes) -> Bytes:
        """The measured payload that is nearest to one below or above all of them."""
        return float(self._payloads[0 if payload < self._payloads[0] else -1])

    @property
    def smallest_payload_seconds(self) -> Seconds:
        """Seconds of the smallest measured payload: nearly all latency."""
        return float(self._seconds[0])

    @cached_property
    def _payloads(self) -> FloatArray:
        return np.array(sorted(self.times))

    @cached_property
    def _seconds(self) -> FloatArray:
        return np.array([self.times[payload].seconds for payload in self._payloads.tolist()])

    @cached_property
    def _error(self) -> float | None:
        """Mean relative error of inner payloads, each predicted from its neighbours; None with a single payload."""
        payloads, seconds = self._payloads, self._seconds
        if len(payloads) < 2:
            return None
        if len(payloads) < 3:
            return math.sqrt(float(seconds.max() / seconds.min())) - 1.0
        inner = range(1, len(payloads) - 1)
        neighbours = ((payloads[[index - 1, index + 1]], seconds[[index - 1, index + 1]]) for index in inner)
        left_out = [
            _interpolate_loglog(payloads[[index]], *neighbour)[0]
            for index, neighbour in zip(inner, neighbours, strict=True)
        ]
        return float(np.abs(np.array(left_out) / seconds[1:-1] - 1.0).mean())


def _interpolate_loglog(payload: FloatArray, payloads: FloatArray, seconds: FloatArray) -> FloatArray:
    """Linear interpolation of log(seconds) over log(payload), payloads above zero."""
    return np.exp(np.interp(np.log(payload), np.log(payloads), np.log(seconds)))
