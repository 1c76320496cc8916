"""The strength of a cause is found with few simulations, for piecewise linear and discontinuous step times."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.validation.explain_root_finding import TOLERANCE, StepTimeGap, find_strength

MAX_SIMULATIONS = 16


def piecewise_step_time(slopes: list[float], bends: list[float], calls: list[float]) -> Callable[[float], float]:
    """A step time that grows by each slope from each bend on: convex, as where something else becomes the slowest."""

    def step_time(strength: float) -> float:
        calls.append(strength)
        return 1.0 + sum(slope * max(0.0, strength - bend) for slope, bend in zip(slopes, bends, strict=True))

    return step_time


@given(
    slopes=st.lists(st.floats(0.01, 5.0), min_size=3, max_size=3),
    bends=st.lists(st.floats(1.0, 8.0), min_size=3, max_size=3),
    share=st.floats(0.01, 0.99),
)
def test_a_strength_within_the_limits_is_found_in_few_simulations(
    slopes: list[float], bends: list[float], share: float
) -> None:
    calls: list[float] = []
    step_time = piecewise_step_time(slopes, bends, calls)
    gap = StepTimeGap(expected=1.0, measured=1.0 + share * (step_time(10.0) - 1.0))
    strength = bisect_strength(step_time, gap.measured)
    calls.clear()
    result = find_strength(step_time, gap, neutral=1.0, limit=10.0)
    assert result.explains_gap
    assert len(calls) <= MAX_SIMULATIONS
    assert abs(gap.explained_share(result.step_time) - 1.0) <= TOLERANCE or result.strength == pytest.approx(
        strength, rel=2 * TOLERANCE
    )


def bisect_strength(step_time: Callable[[float], float], target: float) -> float:
    """The strength by plain bisection."""
    low, high = 1.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if step_time(middle) < target else (low, middle)
    return high


@given(slope=st.floats(0.01, 5.0), share=st.floats(0.01, 0.99))
def test_a_straight_line_takes_three_simulations(slope: float, share: float) -> None:
    calls: list[float] = []
    step_time = piecewise_step_time([slope], [1.0], calls)
    strength = 1.0 + 9.0 * share
    result = find_strength(step_time, StepTimeGap(1.0, 1.0 + slope * (strength - 1.0)), neutral=1.0, limit=10.0)
    assert result.strength == pytest.approx(strength, rel=2 * TOLERANCE)
    assert len(calls) <= 3


def test_an_insufficient_cause_returns_its_limit() -> None:
    result = find_strength(lambda strength: 1.0 + 0.01 * strength, StepTimeGap(1.0, 3.0), neutral=0.0, limit=10.0)
    assert not result.explains_gap
    assert result.strength == 10.0
    assert result.step_time == pytest.approx(1.1)


def test_steps_get_shorter_towards_a_limit_below() -> None:
    result = find_strength(lambda strength: 2.0 + strength, StepTimeGap(3.0, 2.75), neutral=1.0, limit=0.5)
    assert result.strength == pytest.approx(0.75, rel=TOLERANCE)


def test_a_cause_without_effect_explains_nothing() -> None:
    result = find_strength(lambda _: 1.0, StepTimeGap(1.0, 2.0), neutral=1.0, limit=10.0)
    assert not result.explains_gap
    assert result.step_time == 1.0


def test_a_step_time_that_jumps_gives_the_strength_of_the_jump() -> None:
    result = find_strength(
        lambda strength: 1.0 if strength < 4.0 else 3.0, StepTimeGap(1.0, 2.5), neutral=1.0, limit=10.0
    )
    assert result.explains_gap
    assert result.strength == pytest.approx(4.0, rel=0.01)
    assert result.step_time == 3.0
