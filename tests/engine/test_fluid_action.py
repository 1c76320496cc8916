"""Fluid actions end when the work is done that their rates add up to, whatever changes in between."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.fluid_action import FluidAction
from tests.conftest import examples

RateChange = tuple[float, float]
"""(time, rate from then on)."""
RATES = st.sampled_from([0.125, 0.5, 0.75, 1.0])


def waiters_ends(seconds: float, changes: list[RateChange], wait_times: list[float]) -> list[float]:
    """When processes that begin to wait at given times for an action, which begins at 0, go on."""
    environment, ends = SimEnvironment(), []
    action = FluidAction(environment, seconds)

    def change_rates() -> Iterator[simpy.Event]:
        for time, rate in changes:
            yield environment.event_at(time)
            if not action.done.processed:
                action.set_rate_bound(rate)

    def wait(since: float) -> Iterator[simpy.Event]:
        yield environment.event_at(since)
        yield action.done
        ends.append(environment.now)

    environment.process(change_rates())
    for since in wait_times:
        environment.process(wait(since))
    environment.run()
    return ends


def closed_form_end(seconds: float, changes: list[RateChange]) -> float:
    """The time at which the integral of the rate reaches the work."""
    for (time, rate), (next_time, _) in pairwise(changes):
        if seconds <= (next_time - time) * rate:
            return time + seconds / rate
        seconds -= (next_time - time) * rate
    return changes[-1][0] + seconds / changes[-1][1]


@given(st.floats(0.1, 20.0), st.lists(st.tuples(st.integers(1, 30), RATES), max_size=6), RATES, st.data())
@examples(300)
def test_an_action_ends_when_its_work_is_done(
    seconds: float, later: list[tuple[int, float]], rate: float, data: st.DataObject
) -> None:
    """And every process that waits for it goes on then, or at once where it is over."""
    changes = [(0.0, rate), *sorted((float(time), rate) for time, rate in later)]
    wait_times = data.draw(st.lists(st.floats(0.0, 40.0), min_size=1, max_size=3))
    end = closed_form_end(seconds, changes)
    expected = sorted(max(end, since) for since in wait_times)
    assert sorted(waiters_ends(seconds, changes, wait_times)) == pytest.approx(expected, rel=1e-12)


def test_an_action_whose_rate_never_changes_takes_exactly_its_time() -> None:
    environment = SimEnvironment(0.1)
    action = FluidAction(environment, 1 / 3)
    action.set_rate(1.0)
    environment.run(until=action.done)
    assert environment.now == 0.1 + 1 / 3


def test_other_remaining_work_replaces_what_was_left() -> None:
    """Of 5 s at half rate 4 are left at 2; then it is 1 s at rate 1, and at 2.5 another 3 s."""
    environment, ends = SimEnvironment(), []
    action = FluidAction(environment, 5.0)
    action.done.callbacks.append(lambda _: ends.append(environment.now))
    action.set_rate(0.5)
    environment.timeout(2.0).callbacks.append(lambda _: action.set_remaining(1.0))
    environment.timeout(2.5).callbacks.append(lambda _: action.set_remaining(3.0))
    environment.run()
    assert ends == [5.5]
