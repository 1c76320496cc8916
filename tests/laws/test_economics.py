"""Invariants of cost and energy, for any cluster and any step."""

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
def gpu_groups(draw: st.DrawFn) -> GpuGroup:
    tdp = draw(st.floats(50.0, 2000.0))
    power = PowerSpec(
        tdp, draw(st.floats(0.05, 0.3)) * tdp, draw(st.none() | st.floats(1.0, 2.0).map(lambda factor: factor * tdp))
    )
    powers = PowerOverrides(memory_bound=draw(SHARES), exposed_communication=draw(SHARES))
    seconds = {activity: draw(SECONDS) for activity in GpuActivity}
    price = PriceQuote(Price(draw(st.floats(0.1, 100.0)), "USD"), "given")
    return GpuGroup("gpu", draw(st.integers(1, 20_000)), seconds, price, powers.resolve_draw(power))


@st.composite
def step_economics(draw: st.DrawFn) -> Economics:
    group = draw(gpu_groups())
    time = sum(group.activity_seconds.values())
    return Economics(
        (group,), time, draw(st.floats(1.0, 1e9)), draw(st.floats(1.0, 2.0)), 1e-4, draw(st.floats(1.0, 1e14))
    )


def with_price_factor(step: Economics, factor: float) -> Economics:
    (group,) = step.gpu_groups
    assert group.quote is not None
    quote = replace(group.quote, price=replace(group.quote.price, amount=factor * group.quote.price.amount))
    return replace(step, gpu_groups=(replace(group, quote=quote),))


@given(step_economics())
@examples(200)
def test_twice_the_price_is_twice_the_cost_and_the_same_energy(step: Economics) -> None:
    twice = with_price_factor(step, 2.0)
    assert twice.cost_per_step == pytest.approx(2 * (step.cost_per_step or 0.0))
    assert twice.run_cost == pytest.approx(2 * (step.run_cost or 0.0))
    assert twice.energy_per_step == step.energy_per_step


@given(step_economics())
@examples(200)
def test_power_is_between_idle_and_the_limit_plus_node_overhead(step: Economics) -> None:
    (group,) = step.gpu_groups
    assert group.power_draw is not None
    idle_power, max_power = (
        group.power_draw.by_activity[GpuActivity.WAITING],
        group.power_draw.by_activity[GpuActivity.MATMUL],
    )
    assert idle_power * (1 - 1e-9) <= (step.gpu_power or 0.0) <= max_power * (1 + 1e-9)
    assert step.power_per_gpu == pytest.approx((step.gpu_power or 0.0) + (group.power_draw.node_rest or 0.0))
    assert step.power == pytest.approx(step.gpu_count * (step.power_per_gpu or 0.0) * step.pue)


@given(step_economics())
@examples(200)
def test_activity_energies_sum_and_token_rates_agree(step: Economics) -> None:
    energy_shares, energy, cost = step.energy_by_activity, step.energy_per_step, step.cost_per_step
    assert energy_shares is not None
    assert energy is not None
    assert cost is not None
    assert sum(energy_shares.values()) == pytest.approx(energy)
    assert step.run_energy == pytest.approx(energy * (step.run_tokens or 0.0) / step.tokens)
    assert step.cost_per_trillion_tokens == pytest.approx(cost * 1e12 / step.tokens)
    assert step.run_carbon == pytest.approx((step.run_energy or 0.0) * 1e-4)


@given(step_economics(), st.integers(1, 50))
@examples(200)
def test_two_equal_gpu_groups_cost_as_much_as_one(step: Economics, first_count: int) -> None:
    (group,) = step.gpu_groups
    split_job = replace(step, gpu_groups=(replace(group, gpu_count=first_count), group))
    assert split_job.cost_per_step == pytest.approx((step.cost_per_step or 0.0) * split_job.gpu_count / group.gpu_count)
    assert split_job.energy_per_step == pytest.approx(
        (step.energy_per_step or 0.0) * split_job.gpu_count / group.gpu_count
    )
