"""A collective's time over its payload: measured, interpolated, extrapolated."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.fit.alpha_beta import fit_collectives
from clustersim.cost.calibration_record import CollectiveCall, CollectiveSample
from clustersim.cost.payload_curve import PayloadCurve
from clustersim.cost.timing import Provenance
from clustersim.program.task import CollectiveType
from tests.conftest import examples
from tests.cost.records import collective_fit, spread

ALPHA, BETA = 2e-5, 1e11
PAYLOADS = [2.0**power for power in range(10, 31)]


def linear_seconds(payload: float) -> float:
    return ALPHA + payload / BETA


CURVE = PayloadCurve(
    {payload: spread(linear_seconds(payload), 0.05) for payload in PAYLOADS}, collective_fit(ALPHA, BETA, 0.07)
)


def test_a_measured_payload_takes_its_median_and_errs_by_its_dispersion():
    reading = CURVE.estimate(2.0**20)
    assert reading is not None
    assert (reading.seconds, reading.provenance) == (linear_seconds(2.0**20), Provenance.MEASURED)
    assert reading.error == pytest.approx(0.05)


def test_a_payload_measured_once_has_the_interpolation_error():
    """nccl-tests prints means without their dispersion."""
    single_samples = {payload: replace(time, repetitions=1) for payload, time in CURVE.times.items()}
    at_payload, interpolated = PayloadCurve(single_samples, CURVE.fit).estimate(2.0**20), CURVE.estimate(3e6)
    assert at_payload is not None
    assert interpolated is not None
    assert at_payload.error == interpolated.error > 0


def test_interpolation_reproduces_a_power_law_exactly():
    curve = PayloadCurve({size: spread(1e-9 * size**0.8) for size in PAYLOADS}, None)
    reading = curve.estimate(3e6)
    assert reading is not None
    assert reading.provenance is Provenance.INTERPOLATED
    assert reading.seconds == pytest.approx(1e-9 * 3e6**0.8)
    assert reading.error == pytest.approx(0.0, abs=1e-12)


def test_interpolation_of_alpha_beta_is_within_the_stated_error():
    """Leave-one-out errors are of gaps twice as wide, so they exceed the true ones.

    At the knee, 2 MB, they are largest: all within 25 % of the time.
    """
    errors = []
    for size in (1.5 * payload for payload in PAYLOADS[:-1]):
        reading = CURVE.estimate(size)
        assert reading is not None
        errors.append(abs(reading.seconds / linear_seconds(size) - 1.0))
    assert sum(errors) / len(errors) <= reading.error < 0.25


def test_extrapolation_uses_the_fit_and_its_residual():
    for size in (1.0, 1e12):
        reading = CURVE.estimate(size)
        assert reading is not None
        assert reading.seconds == pytest.approx(linear_seconds(size))
        assert (reading.provenance, reading.error) == (Provenance.FITTED, 0.07)


SWITCH_PAYLOAD = 2.0**24  # bytes at which a library changes its protocol


def two_protocol_seconds(payload: float) -> float:
    """A protocol of low latency and a fifth of the bandwidth, and one of twice the latency above."""
    return 1e-5 + payload / 2e10 if payload < SWITCH_PAYLOAD else 2e-5 + payload / 1e11


def test_extrapolation_uses_the_bandwidth_of_the_largest_payloads():
    """Alpha is 1e-3 of the last time, so 1 / bandwidth is met to that; a single line would be 6 % off."""
    samples = [
        CollectiveSample(CollectiveCall(CollectiveType.ALL_REDUCE, size, 8, 1), spread(two_protocol_seconds(size)))
        for size in PAYLOADS
    ]
    (fit,) = fit_collectives(samples)
    curve = PayloadCurve({sample.call.payload: sample.time for sample in samples}, fit)
    for size in (2.0**31, 2.0**34):
        reading = curve.estimate(size)
        assert reading is not None
        assert reading.seconds == pytest.approx(two_protocol_seconds(size), rel=2e-3)
        assert fit.alpha + size / fit.beta > 1.06 * two_protocol_seconds(size)
        assert (reading.provenance, reading.error) == (Provenance.FITTED, fit.residual.leave_one_out_error)


@examples(200)
@given(
    st.dictionaries(st.floats(1e3, 1e9), st.floats(1e-6, 1.0), min_size=3, max_size=6),
    st.floats(0.0, 1.0),
    st.floats(1.0, 1e3),
)
def test_extrapolation_is_continuous_and_monotonic(times, alpha, factor):
    """For any samples, also times that fall with the payload and an alpha above them all."""
    curve = PayloadCurve({size: spread(time) for size, time in times.items()}, collective_fit(alpha, 1e9, 0.07))
    for boundary, ratio in ((max(times), factor), (min(times), 1.0 / factor)):
        near, far = (curve.estimate(size) for size in (boundary * ratio**1e-9, boundary * ratio))
        assert near is not None and far is not None
        assert near.seconds == pytest.approx(times[boundary], rel=1e-6)
        assert (
            far.seconds <= times[boundary] * (1 + 1e-9) if ratio < 1.0 else far.seconds >= times[boundary] * (1 - 1e-9)
        )
        assert far.seconds <= times[boundary] * max(1.0, ratio) * (1 + 1e-9), "as many calls of the largest one"


def test_extrapolation_without_a_fit_gives_none():
    assert PayloadCurve(CURVE.times, None).estimate(1.0) is None


def test_the_error_between_two_payloads_is_half_their_ratio():
    """From 1 ms to 4 ms: 2 ms in the middle, which may be twice too long or too short, an error of one."""
    reading = PayloadCurve({1e6: spread(1e-3), 4e6: spread(4e-3)}, None).estimate(2e6)
    assert reading is not None
    assert reading.seconds == pytest.approx(2e-3)
    assert reading.error == pytest.approx(math.sqrt(4.0) - 1.0)


def test_a_single_sample_has_no_error_estimate():
    reading = PayloadCurve({1e6: replace(spread(1e-3), repetitions=1)}, None).estimate(1e6)
    assert reading is not None
    assert reading.error is None
