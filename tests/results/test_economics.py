"""Money and energy of a step, from numbers by hand and from small steps."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.common.dtypes import DType
from clustersim.cost.timing import Provenance
from clustersim.hardware.power import GpuActivity, PowerDraw
from clustersim.hardware.prices import Price, PriceQuote
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.parallel.mesh import DATA, HOST_AXIS
from clustersim.program.task import CommOp, CommOverlap
from clustersim.results.economics import Economics, GpuGroup, mean_activity_seconds
from clustersim.results.provenance import BusyTimeItem
from clustersim.results.time_breakdown import TimeBreakdown
from clustersim.results.time_categories import EXPOSED_CATEGORIES, TIME_CATEGORIES, TimeCategory
from tests.results.trace_cases import KERNEL, exchange
from tests.small_pipeline import simulated

SECONDS = {
    GpuActivity.MATMUL: 2.0,
    GpuActivity.MEMORY_BOUND: 1.0,
    GpuActivity.COMMUNICATING: 0.5,
    GpuActivity.WAITING: 0.5,
}
WATTS = (700.0, 400.0, 300.0, 100.0)
DRAW = PowerDraw(dict(zip(GpuActivity, WATTS, strict=True)), 350.0)
GPUS = GpuGroup("h100", 8, SECONDS, PriceQuote(Price(9.0, "USD"), "given"), DRAW)
STEP = Economics((GPUS,), step_time=4.0, tokens=1e6, pue=1.25, carbon_intensity=400.0 / 3.6e6, run_tokens=5e12)


def test_costs_are_gpus_times_hours_times_price() -> None:
    """8 GPUs, 4 s, 9 USD an hour: 8 * 4 / 3600 * 9 = 0.08 USD, for a million tokens; a trillion are a million steps."""
    assert STEP.cost_per_step == pytest.approx(0.08)
    assert STEP.cost_per_trillion_tokens == pytest.approx(80_000)
    assert STEP.run_cost == pytest.approx(400_000)


def test_energy_is_seconds_times_watts_of_what_gpus_do_and_of_all_around_them() -> None:
    """A GPU: 2 * 700 + 400 + 150 + 50 = 2000 J, its node 4 * 350 = 1400 J; 8 of them 27.2 kJ, the facility 1/4."""
    parts = STEP.energy_by_activity
    assert parts == {
        "products": 8 * 1400.0, "streaming": 8 * 400.0, "communicating": 8 * 150.0, "waiting": 8 * 50.0,
        "rest of nodes": 8 * 1400.0, "facility": pytest.approx(27_200.0 / 4),
    }  # fmt: skip
    assert STEP.energy_per_step == pytest.approx(34_000.0)
    assert STEP.energy_per_trillion_tokens == pytest.approx(34e9)
    assert STEP.run_energy == pytest.approx(170e9)
    assert STEP.gpu_power == pytest.approx(500.0)
    assert STEP.power_per_gpu == pytest.approx(850.0)
    assert STEP.power == pytest.approx(8 * 850.0 * 1.25)


def test_carbon_is_energy_times_what_a_kwh_makes() -> None:
    """34 kJ are 34 / 3600 kWh, of 400 g each."""
    assert STEP.carbon_per_step == pytest.approx(34 / 3600 * 400)
    assert STEP.to_json()["carbon_of_run_t"] == pytest.approx(170e9 / 3.6e6 * 400 / 1e6)
    assert replace(STEP, carbon_intensity=None).to_json()["carbon_per_trillion_tokens_t"] is None


def test_plain_data_is_in_kwh() -> None:
    plain = STEP.to_json()
    assert plain["energy_per_trillion_tokens_kwh"] == pytest.approx(34e9 / 3.6e6)
    assert sum(plain["energy_per_step_by_activity_kwh"].values()) == pytest.approx(plain["energy_per_step_kwh"])
    assert (plain["currency"], plain["price_per_gpu_hour"], plain["price_source"]) == ("USD", 9.0, "given")
    assert plain["missing"] == []


def test_gpus_of_two_kinds_count_each_by_its_own() -> None:
    """4 at 9 USD and 12 at 1 USD are 48 USD an hour, 3 USD on average."""
    cheap = replace(
        GPUS,
        name="a100",
        gpu_count=12,
        quote=PriceQuote(Price(1.0, "USD"), "oci"),
        power_draw=replace(DRAW, node_rest=0.0),
    )
    both = replace(STEP, gpu_groups=(replace(GPUS, gpu_count=4), cheap), pue=1.0)
    assert both.price_per_gpu_hour == Price(3.0, "USD")
    assert both.price_source == "given; oci"
    assert both.cost_per_step == pytest.approx(48 * 4 / 3600)
    assert both.energy_per_step == pytest.approx(4 * 3400.0 + 12 * 2000.0)


def test_what_is_not_known_is_none_and_said() -> None:
    unknown = replace(STEP, gpu_groups=(replace(GPUS, quote=None, power_draw=None),))
    plain = unknown.to_json()
    assert plain["cost_per_step"] is plain["cost_of_run"] is plain["energy_per_step_kwh"] is plain["power_w"] is None
    assert plain["price_source"] == ""
    assert plain["missing"] == [
        "no list price of h100 is known; economics.price_per_gpu_hour says one",
        "what h100 draws is not known; economics.power.tdp says it",
    ]
    mixed = replace(STEP, gpu_groups=(GPUS, replace(GPUS, quote=PriceQuote(Price(1.0, "EUR"), "given"))))
    assert mixed.cost_per_step is None
    assert "several currencies" in mixed.missing_prices[0]
    alone = replace(STEP, gpu_groups=(replace(GPUS, power_draw=replace(DRAW, node_rest=None)),))
    assert alone.power_per_gpu == alone.gpu_power == pytest.approx(500.0)
    assert "count as GPUs alone" in alone.missing_node_power[0]


def _item(does: Kernel | CommOverlap | CommOp, seconds: float) -> BusyTimeItem:
    return BusyTimeItem(does, Provenance.ROOFLINE, None, 1.0, seconds)


def test_parts_of_a_breakdown_are_activities() -> None:
    """Kernels (6 s, 1 s slowed among them) are products by their part of all: 3 of 4 s, an overlapped one too."""
    seconds = np.zeros((2, len(TIME_CATEGORIES)))
    for part, value in (
        (TimeCategory.COMPUTE, 3.0), (TimeCategory.RECOMPUTE, 1.0), (TimeCategory.OPTIMIZER, 1.0), (TimeCategory.SLOWED, 1.0), (EXPOSED_CATEGORIES[DATA], 2.0),
        (TimeCategory.LAUNCH, 0.25), (EXPOSED_CATEGORIES[HOST_AXIS], 0.25), (TimeCategory.BUBBLE_STEADY, 0.5), (TimeCategory.WAIT, 1.0),
    ):  # fmt: skip
        seconds[0, part.index] = value
    seconds[1, TimeCategory.WAIT.index] = 10.0
    parts = TimeBreakdown(np.array([0, 2]), seconds, np.array([2.0, 1.0]), np.array([0, 0, 2]))
    norm = Kernel("norm", KernelKind.NORM, DType.BF16, 1.0, 1.0)
    overlap = CommOverlap(exchange("tp"), KERNEL, 2.0)
    found = (_item(KERNEL, 1.0), _item(overlap, 2.0), _item(norm, 1.0), _item(exchange("dp"), 9.0))
    first = mean_activity_seconds(parts, found, np.array([0, 1]))
    assert list(first.values()) == pytest.approx([4.5, 1.5, 2.0, 2.0])
    assert sum(first.values()) == pytest.approx(10.0)
    everyone = mean_activity_seconds(parts, found, np.arange(3))
    assert everyone[GpuActivity.WAITING] == pytest.approx((2.0 + 2.0 + 10.0) / 3)
    assert mean_activity_seconds(parts, (), np.array([0]))[GpuActivity.MEMORY_BOUND] == pytest.approx(6.0)


def test_activities_of_a_step_sum_to_it_and_its_energy_is_between_idle_and_the_limit() -> None:
    result = simulated()
    (gpus,) = result.economics.gpu_groups
    assert sum(gpus.activity_seconds.values()) == pytest.approx(result.step_time)
    assert gpus.power_draw is not None
    assert gpus.power_draw.node_rest is not None
    assert gpus.power_draw.by_activity[GpuActivity.WAITING] < (result.economics.gpu_power or 0.0) < 700.0
    assert (result.economics.power_per_gpu or 0.0) < 700.0 + gpus.power_draw.node_rest
    assert result.economics.cost_per_trillion_tokens == pytest.approx(
        result.gpu_hours_per_trillion_tokens * result.to_json()["economics"]["price_per_gpu_hour"]
    )


def test_what_is_said_of_costs_moves_no_time() -> None:
    said = ("economics.price_per_gpu_hour=1 EUR", "economics.pue=2", "economics.power=300 W", "economics.tokens=1T")
    plain, priced = simulated(), simulated(*said)
    assert np.array_equal(plain.step_times, priced.step_times)
    assert np.array_equal(plain.trace.end, priced.trace.end)
    assert plain.mfu() == priced.mfu()
    assert priced.economics.run_cost == pytest.approx(priced.gpu_hours_per_trillion_tokens)


def test_several_steps_cost_what_one_costs() -> None:
    one, three = simulated().economics, simulated("steps=3").economics
    assert three.cost_per_step == pytest.approx(one.cost_per_step, rel=0.05)
    assert sum(three.gpu_groups[0].activity_seconds.values()) == pytest.approx(three.step_time)


def test_nodes_with_other_gpus_draw_their_own() -> None:
    found = simulated("cluster.mixed=[{nodes: [1], accelerator: a100-sxm-80gb}]").economics
    assert [(gpu_group.name, gpu_group.gpu_count) for gpu_group in found.gpu_groups] == [
        ("h100-sxm-80gb", 8),
        ("a100-sxm-80gb", 8),
    ]
    prices = [item.quote.price.amount for item in found.gpu_groups if item.quote]
    assert found.price_per_gpu_hour == Price(sum(prices) / 2, "USD")
    assert all(sum(element.activity_seconds.values()) == pytest.approx(found.step_time) for element in found.gpu_groups)
