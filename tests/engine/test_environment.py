"""The simulation environment's event queue."""

from collections.abc import Callable
from typing import Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from clustersim.engine.kernel.environment import SimEnvironment

WAITS = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0]), max_size=5), min_size=1, max_size=5)
Log = list[tuple[float, int, int]]


def run_logged(environment: simpy.Environment, waits: list[list[float]], wait: Callable[[float], simpy.Event]) -> Log:
    """Processes that wait and then wake their successor; log of (time, process, step) in execution order."""
    log: Log = []
    gates = [environment.event() for _ in waits]

    def process(process_id: int) -> simpy.events.ProcessGenerator:
        for step, seconds in enumerate(waits[process_id]):
            yield wait(seconds)
            log.append((environment.now, process_id, step))
        gates[process_id].succeed()
        yield gates[(process_id + 1) % len(gates)]
        log.append((environment.now, process_id, -1))

    for process_id in range(len(waits)):
        environment.process(process(process_id))
    return log


@given(WAITS)
def test_events_run_in_simpy_order(waits: list[list[float]]) -> None:
    reference, clock = simpy.Environment(), SimEnvironment()
    expected, log = run_logged(reference, waits, reference.timeout), run_logged(clock, waits, clock.event_after)
    reference.run()
    clock.run_all()
    assert log == expected
    assert clock.now == reference.now


def test_an_error_of_a_process_ends_the_run() -> None:
    clock = SimEnvironment()

    def process() -> Any:
        yield clock.event_after(1.0)
        raise RuntimeError("out of order")

    clock.process(process())
    with pytest.raises(RuntimeError, match="out of order"):
        clock.run_all()


def test_an_event_is_scheduled_at_an_exact_time() -> None:
    clock = SimEnvironment()
    clock.event_after(0.1)
    times: list[float] = []
    clock.event_at(0.3).callbacks.append(lambda _: times.append(clock.now))
    clock.run_all()
    assert times == [0.3]


def test_the_last_event_of_an_instant_runs_after_all_others() -> None:
    clock = SimEnvironment()
    log: list[tuple[float, str]] = []

    def log_label(label: str) -> Callable[[simpy.Event], None]:
        return lambda _: log.append((clock.now, label))

    def begin(_: simpy.Event) -> None:
        clock.end_of_instant().callbacks.append(log_label("last"))
        clock.event_after(0.0).callbacks.append(
            lambda _: clock.event_after(0.0).callbacks.append(log_label("set later"))
        )

    clock.event_after(1.0).callbacks.append(begin)
    clock.event_at(1.0).callbacks.append(log_label("set before"))
    clock.event_after(2.0).callbacks.append(log_label("later"))
    clock.run_all()
    assert log == [(1.0, "set before"), (1.0, "set later"), (1.0, "last"), (2.0, "later")]
