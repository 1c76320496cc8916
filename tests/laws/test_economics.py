"""Laws of money and energy, for any machine and any step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.hardware.power import GpuActivity, PowerOverrides, PowerSpec
from clustersim.hardware.prices import Price, PriceQuote
from clustersim.results.economics import Economics, GpuGroup
from tests.conftest import examples

SECONDS = st.floats(1e-3, 1e3)
SHARES = st.floats(0.3, 1.0)


@st.composite
def gpus(draw: st.DrawFn) -> GpuGroup:
    tdp = draw(st.floats(50.0, 2000.0))
    power = PowerSpec(
        tdp, draw(st.floats(0.05, 0.3)) * tdp, draw(st.none() | st.floats(1.0, 2.0).map(lambda more: more * tdp))
    )
    powers = PowerOverrides(streaming=draw(SHARES), communicating=draw(SHARES))
    seconds = {activity: draw(SECONDS) for activity in GpuActivity}
    price = PriceQuote(Price(draw(st.floats(0.1, 100.0)), "USD"), "given")
    return GpuGroup("gpu", draw(st.integers(1, 20_000)), seconds, price, powers.resolve_draw(power))


@st.composite
def steps(draw: st.DrawFn) -> Economics:
    one = draw(gpus())
    time = sum(one.activity_seconds.values())
    return Economics(
        (one,), time, draw(st.floats(1.0, 1e9)), draw(st.floats(1.0, 2.0)), 1e-4, draw(st.floats(1.0, 1e14))
    )


def priced(step: Economics, times: float) -> Economics:
    (one,) = step.gpu_groups
    assert one.quote is not None
    dearer = replace(one.quote, price=replace(one.quote.price, amount=times * one.quote.price.amount))
    return replace(step, gpu_groups=(replace(one, quote=dearer),))


@given(steps())
@examples(200)
def test_twice_the_price_is_twice_the_cost_and_the_same_energy(step: Economics) -> None:
    twice = priced(step, 2.0)
    assert twice.cost_per_step == pytest.approx(2 * (step.cost_per_step or 0.0))
    assert twice.run_cost == pytest.approx(2 * (step.run_cost or 0.0))
    assert twice.energy_per_step == step.energy_per_step


@given(steps())
@examples(200)
def test_power_is_between_idle_and_the_limit_with_the_rest_of_the_node(step: Economics) -> None:
    (one,) = step.gpu_groups
    assert one.power_draw is not None
    idle, most = one.power_draw.by_activity[GpuActivity.WAITING], one.power_draw.by_activity[GpuActivity.MATMUL]
    assert idle * (1 - 1e-9) <= (step.gpu_power or 0.0) <= most * (1 + 1e-9)
    assert step.power_per_gpu == pytest.approx((step.gpu_power or 0.0) + (one.power_draw.node_rest or 0.0))
    assert step.power == pytest.approx(step.gpu_count * (step.power_per_gpu or 0.0) * step.pue)


@given(steps())
@examples(200)
def test_parts_sum_and_what_is_told_of_tokens_is_one_rate(step: Economics) -> None:
    parts, energy, cost = step.energy_by_activity, step.energy_per_step, step.cost_per_step
    assert parts is not None
    assert energy is not None
    assert cost is not None
    assert sum(parts.values()) == pytest.approx(energy)
    assert step.run_energy == pytest.approx(energy * (step.run_tokens or 0.0) / step.tokens)
    assert step.cost_per_trillion_tokens == pytest.approx(cost * 1e12 / step.tokens)
    assert step.run_carbon == pytest.approx((step.run_energy or 0.0) * 1e-4)


@given(steps(), st.integers(1, 50))
@examples(200)
def test_a_job_cut_in_two_kinds_that_are_alike_is_the_whole_job(step: Economics, first: int) -> None:
    (one,) = step.gpu_groups
    both = replace(step, gpu_groups=(replace(one, gpu_count=first), one))
    assert both.cost_per_step == pytest.approx((step.cost_per_step or 0.0) * both.gpu_count / one.gpu_count)
    assert both.energy_per_step == pytest.approx((step.energy_per_step or 0.0) * both.gpu_count / one.gpu_count)
