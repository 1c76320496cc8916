"""A collective's time over its payload: measured, between, beyond."""

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
from tests.cost.records import line, spread

ALPHA, BETA = 2e-5, 1e11
PAYLOADS = [2.0**power for power in range(10, 31)]


def straight(payload: float) -> float:
    return ALPHA + payload / BETA


CURVE = PayloadCurve({payload: spread(straight(payload), 0.05) for payload in PAYLOADS}, line(ALPHA, BETA, 0.07))


def test_a_measured_payload_takes_its_median_and_errs_by_its_dispersion():
    reading = CURVE.estimate(2.0**20)
    assert reading is not None
    assert (reading.seconds, reading.provenance) == (straight(2.0**20), Provenance.MEASURED)
    assert reading.error == pytest.approx(0.05)


def test_a_payload_that_was_measured_once_errs_as_if_it_lay_between_others():
    """nccl-tests prints means, of which nobody knows how far they lie apart."""
    once = {payload: replace(time, repetitions=1) for payload, time in CURVE.times.items()}
    known, between = PayloadCurve(once, CURVE.fit).estimate(2.0**20), CURVE.estimate(3e6)
    assert known is not None
    assert between is not None
    assert known.error == between.error > 0


def test_between_two_payloads_a_power_law_comes_back_exactly():
    curve = PayloadCurve({size: spread(1e-9 * size**0.8) for size in PAYLOADS}, None)
    reading = curve.estimate(3e6)
    assert reading is not None
    assert reading.provenance is Provenance.INTERPOLATED
    assert reading.seconds == pytest.approx(1e-9 * 3e6**0.8)
    assert reading.error == pytest.approx(0.0, abs=1e-12)


def test_between_two_payloads_alpha_and_beta_come_back_within_the_stated_error():
    """Errors left out are of gaps twice as wide, so they are larger than what is left between; at the knee,

    2 MB, they are largest: all within 25 % of the time.
    """
    errors = []
    for size in (1.5 * payload for payload in PAYLOADS[:-1]):
        reading = CURVE.estimate(size)
        assert reading is not None
        errors.append(abs(reading.seconds / straight(size) - 1.0))
    assert sum(errors) / len(errors) <= reading.error < 0.25


def test_beyond_the_payloads_the_fit_answers_with_its_residual():
    for size in (1.0, 1e12):
        reading = CURVE.estimate(size)
        assert reading is not None
        assert reading.seconds == pytest.approx(straight(size))
        assert (reading.provenance, reading.error) == (Provenance.FITTED, 0.07)


SWITCHED = 2.0**24  # bytes at which a library changes its protocol


def switched(payload: float) -> float:
    """A protocol of little latency and a fifth of the bandwidth, and one of twice the latency above."""
    return 1e-5 + payload / 2e10 if payload < SWITCHED else 2e-5 + payload / 1e11


def test_above_the_payloads_bandwidth_is_the_last_measured_one_and_not_that_of_all_protocols():
    """Alpha is a part of 1e-3 of the last time, so 1 / bandwidth comes back to that; one line would be 6 % off."""
    rows = [
        CollectiveSample(CollectiveCall(CollectiveType.ALL_REDUCE, size, 8, 1), spread(switched(size)))
        for size in PAYLOADS
    ]
    (fit,) = fit_collectives(rows)
    curve = PayloadCurve({row.call.payload: row.time for row in rows}, fit)
    for size in (2.0**31, 2.0**34):
        reading = curve.estimate(size)
        assert reading is not None
        assert reading.seconds == pytest.approx(switched(size), rel=2e-3)
        assert fit.alpha + size / fit.beta > 1.06 * switched(size)
        assert (reading.provenance, reading.error) == (Provenance.FITTED, fit.residual.left_out)


@examples(200)
@given(
    st.dictionaries(st.floats(1e3, 1e9), st.floats(1e-6, 1.0), min_size=3, max_size=6),
    st.floats(0.0, 1.0),
    st.floats(1.0, 1e3),
)
def test_beyond_the_payloads_time_goes_on_where_it_was_and_grows_with_them(times, alpha, factor):
    """Whatever was measured, also times that fall with the payload and an alpha above them all."""
    curve = PayloadCurve({size: spread(time) for size, time in times.items()}, line(alpha, 1e9, 0.07))
    for end, beyond in ((max(times), factor), (min(times), 1.0 / factor)):
        near, far = (curve.estimate(size) for size in (end * beyond**1e-9, end * beyond))
        assert near is not None and far is not None
        assert near.seconds == pytest.approx(times[end], rel=1e-6)
        assert far.seconds <= times[end] * (1 + 1e-9) if beyond < 1.0 else far.seconds >= times[end] * (1 - 1e-9)
        assert far.seconds <= times[end] * max(1.0, beyond) * (1 + 1e-9), "as many calls of the largest one"


def test_beyond_the_payloads_nothing_answers_without_a_fit():
    assert PayloadCurve(CURVE.times, None).estimate(1.0) is None


def test_two_payloads_err_by_half_of_what_lies_between_them():
    """From 1 ms to 4 ms: 2 ms in the middle, which may be twice too long or too short, an error of one."""
    reading = PayloadCurve({1e6: spread(1e-3), 4e6: spread(4e-3)}, None).estimate(2e6)
    assert reading is not None
    assert reading.seconds == pytest.approx(2e-3)
    assert reading.error == pytest.approx(math.sqrt(4.0) - 1.0)


def test_of_one_payload_measured_once_nobody_knows_the_error():
    once = PayloadCurve({1e6: replace(spread(1e-3), repetitions=1)}, None).estimate(1e6)
    assert once is not None
    assert once.error is None
