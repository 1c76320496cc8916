"""Absolute times and ends of instants, on simpy's public interface."""

from collections.abc import Callable

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from clustersim.engine.kernel.environment import SimEnvironment
from tests.conftest import examples

TIMES = st.floats(0.0, 1e3, allow_subnormal=False)


@given(TIMES, TIMES)
@examples(300)
def test_an_event_occurs_at_its_time(start: float, later: float) -> None:
    """To the last bit from zero, and up to twice the present time; beyond that within its last bit."""
    for now, delay in ((0.0, later), (start, min(start, later)), (start, later)):
        environment = SimEnvironment(now)
        environment.event_at(now + delay)
        environment.run()
        assert environment.now == (now + delay if delay <= now or not now else pytest.approx(now + delay, rel=3e-16))


def test_the_end_of_an_instant_comes_after_all_its_other_events() -> None:
    environment, log = SimEnvironment(), []

    def log_label(label: str) -> Callable[..., None]:
        return lambda *_: log.append((environment.now, label))

    def begin(_: simpy.Event) -> None:
        environment.call_at_end_of_instant(log_label("end"))
        environment.timeout(0.0).callbacks.append(
            lambda _: environment.timeout(0.0).callbacks.append(log_label("set later"))
        )

    environment.timeout(1.0).callbacks.append(begin)
    environment.event_at(1.0).callbacks.append(log_label("set before"))
    environment.timeout(2.0).callbacks.append(log_label("later"))
    environment.run()
    assert log == [(1.0, "set before"), (1.0, "set later"), (1.0, "end"), (2.0, "later")]


def test_what_the_end_of_an_instant_causes_precedes_the_next_one() -> None:
    """An instant with two ends is over at the second, after all that the first caused."""
    environment, log = SimEnvironment(), []

    def first_end() -> None:
        log.append(("first", environment.instant_is_over))
        environment.timeout(0.0).callbacks.append(lambda _: log.append(("caused", environment.instant_is_over)))

    environment.call_at_end_of_instant(first_end)
    environment.call_at_end_of_instant(lambda: log.append(("second", environment.instant_is_over)))
    environment.timeout(1.0)
    environment.run()
    assert log == [("first", False), ("caused", False), ("second", True)]
