"""The measurement method against clocks with known times."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from calibrate.devices.stopwatch import Action
from calibrate.kernels.timing import MeasurementMethod, measure_action, time_statistics


@dataclass
class FakeStopwatch:
    """A stopwatch with given seconds per run; the last value repeats."""

    runs: list[float]
    clock: float = 0.0
    repeat_counts: list[int] = field(default_factory=list)

    def now(self) -> float:
        return self.clock

    def time(self, action: Action, repeats: int) -> float:
        self.repeat_counts.append(repeats)
        elapsed = 0.0
        for _ in range(repeats):
            action()
            elapsed += self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]
        self.clock += elapsed
        return elapsed


def _no_action() -> None:
    pass


def test_constant_times_need_the_minimum_number_of_samples() -> None:
    statistics = measure_action(
        FakeStopwatch([2e-3]), _no_action, MeasurementMethod(min_samples=5, min_span_seconds=0.0)
    )
    assert (statistics.seconds, statistics.p5, statistics.p95) == pytest.approx((2e-3, 2e-3, 2e-3))
    assert (statistics.repetitions, statistics.dropped) == (5, 0)


def test_sample_has_enough_runs_for_its_minimum_duration() -> None:
    """0.3 ms a run: 4 of them take at least 1 ms."""
    stopwatch = FakeStopwatch([0.3e-3])
    measure_action(stopwatch, _no_action, MeasurementMethod(min_sample_seconds=1e-3, min_span_seconds=0.0))
    assert stopwatch.repeat_counts[2:] == [4] * 5


def test_sample_has_at_most_the_maximum_number_of_runs() -> None:
    stopwatch = FakeStopwatch([1e-6])
    measure_action(stopwatch, _no_action, MeasurementMethod(min_sample_seconds=1e-3, max_runs_per_sample=16))
    assert set(stopwatch.repeat_counts[2:]) == {16}


def test_warm_up_continues_until_times_stop_decreasing() -> None:
    """Compilation, page faults, clocks: 8, 4, 2 and then 1 s; the median excludes the warm-up runs."""
    statistics = measure_action(
        FakeStopwatch([8.0, 4.0, 2.0, 1.0, 1.0]), _no_action, MeasurementMethod(max_seconds=100.0)
    )
    assert statistics.p95 == 1.0


def test_warm_up_runs_all_operand_copies() -> None:
    stopwatch = FakeStopwatch([1e-3])
    measure_action(stopwatch, _no_action, MeasurementMethod(), rotation_length=7)
    assert stopwatch.repeat_counts[:2] == [7, 7]


def test_outlier_is_dropped_and_counted() -> None:
    statistics = time_statistics([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 50.0])
    assert (statistics.repetitions, statistics.dropped) == (8, 1)
    assert statistics.p95 < 1.03


def test_no_outlier_is_dropped_from_few_samples() -> None:
    assert time_statistics([1.0, 1.0, 1.0, 9.0]).dropped == 0


def test_equal_samples_up_to_rounding_are_retained() -> None:
    """The median absolute deviation of a coarse clock is zero."""
    assert time_statistics([1.0] * 20 + [1.0005]).dropped == 0


def test_percentiles_of_uniform_values() -> None:
    """0, 1, ..., 100: the median is 50, 5 % lie below 5 and above 95."""
    statistics = time_statistics([float(value) for value in range(101)])
    assert (statistics.p5, statistics.seconds, statistics.p95) == (5.0, 50.0, 95.0)


@pytest.mark.parametrize(("seconds", "spanned"), [(0.5, 0.2), (0.05, 0.05)])
def test_samples_span_the_minimum_duration_if_time_allows(seconds: float, spanned: float) -> None:
    """2 ms without variation, in samples of 6 ms: 34 of them are 0.2 s."""
    stopwatch = FakeStopwatch([2e-3])
    statistics = measure_action(stopwatch, _no_action, MeasurementMethod(max_seconds=seconds, min_span_seconds=0.2))
    assert statistics.repetitions * 6e-3 == pytest.approx(spanned, abs=6e-3)


def test_sampling_ends_at_the_time_limit() -> None:
    """Samples of 1 s that vary by half: a limit of 10 s allows 10 samples, not 200."""
    rng = np.random.default_rng(1)
    stopwatch = FakeStopwatch(list(rng.uniform(0.5, 1.5, 300)))
    statistics = measure_action(
        stopwatch, _no_action, MeasurementMethod(max_seconds=10.0, min_samples=5, target_error=1e-6)
    )
    assert 8 <= statistics.repetitions + statistics.dropped <= 13


def test_sampling_ends_at_the_target_error() -> None:
    """1.2533 s / sqrt(n) = 1 % of the median, with s = 5 % of it: n = 39."""
    rng = np.random.default_rng(2)
    stopwatch = FakeStopwatch(list(1.0 + 0.05 * rng.standard_normal(2000)))
    statistics = measure_action(
        stopwatch,
        _no_action,
        MeasurementMethod(max_seconds=1e9, target_error=0.01, max_samples=1000, min_sample_seconds=0.0),
    )
    assert 20 <= statistics.repetitions + statistics.dropped <= 70
    assert statistics.seconds == pytest.approx(1.0, abs=0.03)


def test_action_longer_than_its_limit_is_run_once() -> None:
    statistics = measure_action(FakeStopwatch([60.0]), _no_action, MeasurementMethod(max_seconds=0.5, min_samples=5))
    assert statistics.repetitions == 1


def test_method_description_states_its_settings() -> None:
    assert "5 to 200 samples" in str(MeasurementMethod())
    assert "warm" in str(replace(MeasurementMethod(), cold_cache=False))
