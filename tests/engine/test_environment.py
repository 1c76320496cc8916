"""Events in time."""

from collections.abc import Callable
from typing import Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from clustersim.engine.kernel.environment import SimEnvironment

WAITS = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0]), max_size=5), min_size=1, max_size=5)
Log = list[tuple[float, int, int]]


def logged(environment: simpy.Environment, waits: list[list[float]], wait: Callable[[float], simpy.Event]) -> Log:
    """Processes that wait for so long, then wake the one before them; who went on when, in this order."""
    log: Log = []
    gates = [environment.event() for _ in waits]

    def process(number: int) -> simpy.events.ProcessGenerator:
        for step, seconds in enumerate(waits[number]):
            yield wait(seconds)
            log.append((environment.now, number, step))
        gates[number].succeed()
        yield gates[(number + 1) % len(gates)]
        log.append((environment.now, number, -1))

    for number in range(len(waits)):
        environment.process(process(number))
    return log


@given(WAITS)
def test_events_happen_when_and_in_the_order_in_which_simpy_runs_them(waits: list[list[float]]) -> None:
    plain, clock = simpy.Environment(), SimEnvironment()
    expected, found = logged(plain, waits, plain.timeout), logged(clock, waits, clock.event_after)
    plain.run()
    clock.run_all()
    assert found == expected
    assert clock.now == plain.now


def test_an_error_of_a_process_ends_the_run() -> None:
    clock = SimEnvironment()

    def process() -> Any:
        yield clock.event_after(1.0)
        raise RuntimeError("out of order")

    clock.process(process())
    with pytest.raises(RuntimeError, match="out of order"):
        clock.run_all()


def test_an_event_is_set_for_a_time_to_the_last_digit() -> None:
    clock = SimEnvironment()
    clock.event_after(0.1)
    times: list[float] = []
    clock.event_at(0.3).callbacks.append(lambda _: times.append(clock.now))
    clock.run_all()
    assert times == [0.3]


def test_the_end_of_an_instant_comes_behind_all_that_happens_in_it() -> None:
    clock = SimEnvironment()
    log: list[tuple[float, str]] = []

    def note(word: str) -> Callable[[simpy.Event], None]:
        return lambda _: log.append((clock.now, word))

    def begin(_: simpy.Event) -> None:
        clock.end_of_instant().callbacks.append(note("last"))
        clock.event_after(0.0).callbacks.append(lambda _: clock.event_after(0.0).callbacks.append(note("set later")))

    clock.event_after(1.0).callbacks.append(begin)
    clock.event_at(1.0).callbacks.append(note("set before"))
    clock.event_after(2.0).callbacks.append(note("later"))
    clock.run_all()
    assert log == [(1.0, "set before"), (1.0, "set later"), (1.0, "last"), (2.0, "later")]
