import pytest

from clustersim.reliability.job_clock import JobClock, WallLimitReached


def test_time_passes_and_calls_happen_in_order() -> None:
    clock = JobClock(100.0)
    happened: list[tuple[str, float]] = []
    for name, delay in (("b", 5.0), ("a", 3.0), ("c", 5.0), ("later", 8.0)):
        clock.call_after(delay, lambda name=name: happened.append((name, clock.now)))  # type: ignore[misc]
    assert clock.wait(6.0) is None
    assert clock.now == 6.0
    assert happened == [("a", 3.0), ("b", 5.0), ("c", 5.0)]


def test_an_interrupt_ends_the_wait_and_what_is_due_at_that_time_comes_in_the_next_one() -> None:
    clock = JobClock(100.0)
    clock.call_after(4.0, lambda: clock.interrupt("first"))
    clock.call_after(4.0, lambda: clock.interrupt("second"))
    assert (clock.wait(10.0), clock.now) == ("first", 4.0)
    assert (clock.wait(0.0), clock.now) == ("second", 4.0)
    assert (clock.wait(10.0), clock.now) == (None, 14.0)


def test_what_is_planned_for_the_end_of_a_wait_before_it_comes_first() -> None:
    clock = JobClock(100.0)
    clock.call_after(4.0, lambda: clock.interrupt("due"))
    assert clock.wait(4.0) == "due"
    assert clock.wait(0.0) is None


@pytest.mark.parametrize("delay", [10.0, 11.0, float("inf")])
def test_the_limit_ends_it(delay: float) -> None:
    clock = JobClock(10.0)
    with pytest.raises(WallLimitReached):
        clock.wait(delay)
    assert clock.now == 10.0
