"""What breaks when: rates, distributions, and that nobody's choices change it."""

import math
from dataclasses import replace
from itertools import islice, pairwise, takewhile

import pytest

from clustersim.hardware.failures import FailureComponent, FailureMode, FailureRate
from clustersim.reliability.failure_events import draw_rate_factor, generate_failures
from clustersim.scenario.reliability import SparePool
from tests.reliability.job_helpers import DAY, HOUR, breaking, said, site

GPUS = FailureMode("gpu", FailureRate(FailureComponent.GPU, 1.0 / (512 * 6 * HOUR)))


def times(
    failure: FailureMode, until: float, run: int = 0, window: float = 5.0 * DAY, scale: float = 1.0
) -> list[float]:
    events = generate_failures(said([failure], scale=scale), site(), 3, run, window)
    return [event.time for event in takewhile(lambda event: event.time <= until, events)]


def test_of_all_components_so_many_break() -> None:
    """512 GPUs, one failure every 6 hours among them: 4 a day. Of 40 runs of 30 days, Poisson: sigma is sqrt(4800)."""
    counts = [len(times(GPUS, 30.0 * DAY, run)) for run in range(40)]
    assert sum(counts) == pytest.approx(40 * 120, abs=4.0 * math.sqrt(4800))
    variance = sum((count - 120.0) ** 2 for count in counts) / 40
    assert variance == pytest.approx(120.0, rel=0.7)  # chi-squared of 40: sigma is 22 %


def test_they_come_in_order_whatever_the_window() -> None:
    found = times(GPUS, 20.0 * DAY)
    assert found == sorted(found)
    assert times(GPUS, 20.0 * DAY, window=0.7 * DAY) == pytest.approx(found, rel=1e-12)
    few, many = (
        islice(generate_failures(said([GPUS]), site(), 3, 0, window), 50) for window in (0.7 * DAY, 20.0 * DAY)
    )
    assert [event[1:] for event in few] == [event[1:] for event in many]


def test_half_the_rate_is_twice_the_time() -> None:
    assert times(GPUS, 20.0 * DAY, scale=0.5) == pytest.approx([2.0 * time for time in times(GPUS, 10.0 * DAY)])


def test_other_kinds_and_spares_change_nothing() -> None:
    other = replace(breaking(HOUR), name="other")
    alone = generate_failures(said([GPUS]), site(), 3, 0, DAY)
    both = generate_failures(said([other, GPUS], spares=SparePool(8)), site(), 3, 0, DAY)
    first = [event[:1] + event[2:] for event in islice(alone, 30)]
    assert [event[:1] + event[2:] for event in islice((item for item in both if item.failure_index == 1), 30)] == first


def test_weibull_lives_have_the_mean_that_the_rate_says() -> None:
    """In the long run a component is replaced once in its mean life; at 0.5 the young ones break."""
    for shape in (0.5, 1.0, 3.0):
        failure = replace(GPUS, weibull_shape=shape)
        late = times(failure, 4000.0 * DAY)
        assert len([item for item in late if item > 2000.0 * DAY]) == pytest.approx(8000, rel=0.1)
    young, old = (len(times(replace(GPUS, weibull_shape=shape), 10.0 * DAY)) for shape in (0.5, 3.0))
    assert young > 100
    assert old < 5


def test_a_trace_comes_again_from_a_time_that_is_drawn() -> None:
    """Failures after 1, 2 and 5 hours of a trace of 10: of any 10 hours three, with the same gaps between them."""
    failure = FailureMode(
        "it",
        FailureRate(FailureComponent.JOB, 0.3 / HOUR),
        event_times=(HOUR, 2 * HOUR, 5 * HOUR),
        trace_duration=10 * HOUR,
    )
    found = times(failure, 100.0 * HOUR, window=7.0 * HOUR)
    assert len(found) == 30
    gaps = sorted({round((b - a) / HOUR, 6) for a, b in pairwise(found)})
    assert gaps == [1.0, 3.0, 6.0]
    assert times(failure, 100.0 * HOUR, run=1) != found


def test_rates_of_a_run_are_lognormal_around_what_is_said() -> None:
    factors = sorted(draw_rate_factor(2.0, 5, run) for run in range(999))
    assert factors[499] == pytest.approx(1.0, rel=0.1)
    assert factors[840] == pytest.approx(2.0, rel=0.2)  # 84 % are below one deviation
    assert draw_rate_factor(1.0, 5, 0) == 1.0


def test_where_nothing_breaks_there_are_no_events() -> None:
    assert [
        *generate_failures(said([replace(GPUS, rate=FailureRate(FailureComponent.GPU, 0.0))]), site(), 0, 0, DAY)
    ] == []
