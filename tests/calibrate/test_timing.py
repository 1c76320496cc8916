"""The method, held against clocks whose times are known."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from calibrate.devices.stopwatch import Action
from calibrate.kernels.timing import MeasurementMethod, measure_action, time_statistics


@dataclass
class Fake:
    """A clock that says what it is told: seconds of each run in turn, the last one for ever."""

    runs: list[float]
    clock: float = 0.0
    asked: list[int] = field(default_factory=list)

    def now(self) -> float:
        return self.clock

    def time(self, action: Action, repeats: int) -> float:
        self.asked.append(repeats)
        spent = 0.0
        for _ in range(repeats):
            action()
            spent += self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]
        self.clock += spent
        return spent


def _nothing() -> None:
    pass


def test_what_never_varies_is_measured_with_the_least_samples() -> None:
    found = measure_action(Fake([2e-3]), _nothing, MeasurementMethod(min_samples=5, min_span_seconds=0.0))
    assert (found.seconds, found.p5, found.p95) == pytest.approx((2e-3, 2e-3, 2e-3))
    assert (found.repetitions, found.dropped) == (5, 0)


def test_a_sample_is_as_many_runs_as_make_it_long_enough() -> None:
    """0.3 ms a run: 4 of them last at least 1 ms."""
    watch = Fake([0.3e-3])
    measure_action(watch, _nothing, MeasurementMethod(min_sample_seconds=1e-3, min_span_seconds=0.0))
    assert watch.asked[2:] == [4] * 5


def test_a_sample_has_no_more_runs_than_a_batch() -> None:
    watch = Fake([1e-6])
    measure_action(watch, _nothing, MeasurementMethod(min_sample_seconds=1e-3, max_runs_per_sample=16))
    assert set(watch.asked[2:]) == {16}


def test_it_runs_until_it_gets_no_faster_before_it_counts() -> None:
    """Compiling, page faults, clocks: 8, 4, 2 and then 1 s; the median knows nothing of the first four."""
    found = measure_action(Fake([8.0, 4.0, 2.0, 1.0, 1.0]), _nothing, MeasurementMethod(max_seconds=100.0))
    assert found.p95 == 1.0


def test_each_round_of_operands_is_run_as_a_whole_to_warm_up() -> None:
    watch = Fake([1e-3])
    measure_action(watch, _nothing, MeasurementMethod(), rotation_length=7)
    assert watch.asked[:2] == [7, 7]


def test_an_outlier_is_dropped_and_counted() -> None:
    found = time_statistics([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 50.0])
    assert (found.repetitions, found.dropped) == (8, 1)
    assert found.p95 < 1.03


def test_of_few_samples_none_is_dropped() -> None:
    assert time_statistics([1.0, 1.0, 1.0, 9.0]).dropped == 0


def test_equal_samples_but_for_rounding_are_all_kept() -> None:
    """The median absolute deviation of a coarse clock is zero."""
    assert time_statistics([1.0] * 20 + [1.0005]).dropped == 0


def test_percentiles_of_even_steps() -> None:
    """0, 1, ..., 100: the median is 50, 5 % lie below 5 and above 95."""
    found = time_statistics([float(step) for step in range(101)])
    assert (found.p5, found.seconds, found.p95) == (5.0, 50.0, 95.0)


@pytest.mark.parametrize(("seconds", "spanned"), [(0.5, 0.2), (0.05, 0.05)])
def test_samples_span_so_long_where_the_time_allows(seconds: float, spanned: float) -> None:
    """2 ms that never vary, in samples of 6 ms: 34 of them are 0.2 s."""
    watch = Fake([2e-3])
    found = measure_action(watch, _nothing, MeasurementMethod(max_seconds=seconds, min_span_seconds=0.2))
    assert found.repetitions * 6e-3 == pytest.approx(spanned, abs=6e-3)


def test_sampling_ends_when_the_time_is_up() -> None:
    """Samples of 1 s that vary by half: the 10 s that are given are 10 samples, not 200."""
    rng = np.random.default_rng(1)
    watch = Fake(list(rng.uniform(0.5, 1.5, 300)))
    found = measure_action(watch, _nothing, MeasurementMethod(max_seconds=10.0, min_samples=5, target_error=1e-6))
    assert 8 <= found.repetitions + found.dropped <= 13


def test_sampling_ends_when_the_median_is_known() -> None:
    """1.2533 s / sqrt(n) = 1 % of the median, with s = 5 % of it: n = 39."""
    rng = np.random.default_rng(2)
    watch = Fake(list(1.0 + 0.05 * rng.standard_normal(2000)))
    found = measure_action(
        watch, _nothing, MeasurementMethod(max_seconds=1e9, target_error=0.01, max_samples=1000, min_sample_seconds=0.0)
    )
    assert 20 <= found.repetitions + found.dropped <= 70
    assert found.seconds == pytest.approx(1.0, abs=0.03)


def test_what_takes_far_longer_than_its_time_is_run_once() -> None:
    found = measure_action(Fake([60.0]), _nothing, MeasurementMethod(max_seconds=0.5, min_samples=5))
    assert found.repetitions == 1


def test_a_record_can_say_how_it_was_measured() -> None:
    assert "5 to 200 samples" in str(MeasurementMethod())
    assert "warm" in str(replace(MeasurementMethod(), cold_cache=False))
