"""Random failure events: rates, distributions, and independence from other settings."""

import math
from dataclasses import replace
from itertools import islice, pairwise, takewhile

import pytest

from clustersim.common.arrays import FloatArray
from clustersim.hardware.failures import FailureComponent, FailureMode, FailureRate
from clustersim.reliability import failure_events
from clustersim.reliability.failure_events import draw_rate_factor, generate_failures
from clustersim.scenario.reliability import SparePool
from tests.reliability.job_helpers import DAY, HOUR, failure_domains, job_failure, reliability_model

GPUS = FailureMode("gpu", FailureRate(FailureComponent.GPU, 1.0 / (512 * 6 * HOUR)))


def failure_times(
    failure: FailureMode, end_time: float, run_id: int = 0, window: float = 5.0 * DAY, rate_factor: float = 1.0
) -> list[float]:
    events = generate_failures(
        reliability_model([failure], rate_factor=rate_factor), failure_domains(), 3, run_id, window
    )
    return [event.time for event in takewhile(lambda event: event.time <= end_time, events)]


def test_the_failure_count_matches_the_rate() -> None:
    """512 GPUs, one failure every 6 hours among them: 4 a day. In 40 runs of 30 days, Poisson: sigma is sqrt(4800)."""
    counts = [len(failure_times(GPUS, 30.0 * DAY, run)) for run in range(40)]
    assert sum(counts) == pytest.approx(40 * 120, abs=4.0 * math.sqrt(4800))
    variance = sum((count - 120.0) ** 2 for count in counts) / 40
    assert variance == pytest.approx(120.0, rel=0.7)  # chi-squared of 40: sigma is 22 %


def test_events_are_sorted_and_independent_of_the_window() -> None:
    expected = failure_times(GPUS, 20.0 * DAY)
    assert expected == sorted(expected)
    assert failure_times(GPUS, 20.0 * DAY, window=0.7 * DAY) == pytest.approx(expected, rel=1e-12)
    short_window_events, long_window_events = (
        islice(generate_failures(reliability_model([GPUS]), failure_domains(), 3, 0, window), 50)
        for window in (0.7 * DAY, 20.0 * DAY)
    )
    assert [event[1:] for event in short_window_events] == [event[1:] for event in long_window_events]


def test_half_the_rate_doubles_the_failure_times() -> None:
    assert failure_times(GPUS, 20.0 * DAY, rate_factor=0.5) == pytest.approx(
        [2.0 * time for time in failure_times(GPUS, 10.0 * DAY)]
    )


def test_other_failure_modes_and_spares_do_not_change_the_events() -> None:
    other = replace(job_failure(HOUR), name="other")
    gpu_events = generate_failures(reliability_model([GPUS]), failure_domains(), 3, 0, DAY)
    all_events = generate_failures(reliability_model([other, GPUS], spares=SparePool(8)), failure_domains(), 3, 0, DAY)
    expected = [event[:1] + event[2:] for event in islice(gpu_events, 30)]
    assert [
        event[:1] + event[2:] for event in islice((item for item in all_events if item.failure_index == 1), 30)
    ] == expected


def test_weibull_lifetimes_have_the_mean_of_the_rate() -> None:
    """In the long run a component is replaced once per mean lifetime; with shape 0.5 failures are early."""
    for shape in (0.5, 1.0, 3.0):
        failure = replace(GPUS, weibull_shape=shape)
        long_run = failure_times(failure, 4000.0 * DAY)
        assert len([item for item in long_run if item > 2000.0 * DAY]) == pytest.approx(8000, rel=0.1)
    young, old = (len(failure_times(replace(GPUS, weibull_shape=shape), 10.0 * DAY)) for shape in (0.5, 3.0))
    assert young > 100
    assert old < 5


def test_a_failure_trace_repeats_from_a_random_offset() -> None:
    """Failures after 1, 2 and 5 hours of a trace of 10: of any 10 hours three, with the same gaps between them."""
    failure = FailureMode(
        "it",
        FailureRate(FailureComponent.JOB, 0.3 / HOUR),
        event_times=(HOUR, 2 * HOUR, 5 * HOUR),
        trace_duration=10 * HOUR,
    )
    event_times = failure_times(failure, 100.0 * HOUR, window=7.0 * HOUR)
    assert len(event_times) == 30
    gaps = sorted({round((b - a) / HOUR, 6) for a, b in pairwise(event_times)})
    assert gaps == [1.0, 3.0, 6.0]
    assert failure_times(failure, 100.0 * HOUR, run_id=1) != event_times


def test_rate_factors_of_runs_are_lognormal() -> None:
    factors = sorted(draw_rate_factor(2.0, 5, run) for run in range(999))
    assert factors[499] == pytest.approx(1.0, rel=0.1)
    assert factors[840] == pytest.approx(2.0, rel=0.2)  # 84 % are below one deviation
    assert draw_rate_factor(1.0, 5, 0) == 1.0


def test_a_zero_rate_has_no_events() -> None:
    assert [
        *generate_failures(
            reliability_model([replace(GPUS, rate=FailureRate(FailureComponent.GPU, 0.0))]),
            failure_domains(),
            0,
            0,
            DAY,
        )
    ] == []


def test_the_first_failure_of_a_short_job_takes_few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of a minute, a failure in decades: as many draws as doublings, about 24, and the same events."""
    rare = replace(GPUS, rate=FailureRate(FailureComponent.GPU, 1.0 / (512 * 30 * 365 * DAY)))
    counted: list[float] = []
    drawn = failure_events._PoissonArrivals.arrivals_until

    def count(process: failure_events._PoissonArrivals, end: float) -> FloatArray:
        counted.append(end)
        return drawn(process, end)

    monkeypatch.setattr(failure_events._PoissonArrivals, "arrivals_until", count)
    first = next(generate_failures(reliability_model([rare]), failure_domains(), 3, 0, 60.0))
    assert len(counted) <= math.log2(first.time / 60.0) + 2
    expected = next(generate_failures(reliability_model([rare]), failure_domains(), 3, 0, 2.0 * first.time))
    assert first.time == pytest.approx(expected.time, rel=1e-12)
    assert first[1:] == expected[1:]


def test_absurd_rates_are_drawn_in_short_windows() -> None:
    absurd = replace(GPUS, rate=FailureRate(FailureComponent.GPU, 1e12))
    events = islice(generate_failures(reliability_model([absurd]), failure_domains(), 3, 0, 30.0 * DAY), 1000)
    assert [event.time for event in events][-1] == pytest.approx(1000 / 512e12, rel=0.2)
