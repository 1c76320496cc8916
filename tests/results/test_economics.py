"""Cost and energy of a step, from numbers by hand and from small simulated steps."""

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
from tests.results.trace_cases import KERNEL, comm_op
from tests.sentences import parts
from tests.small_pipeline import simulate_pipeline

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


def test_energy_is_power_times_time_by_activity_plus_node_and_facility() -> None:
    """A GPU: 2 * 700 + 400 + 150 + 50 = 2000 J, the node 4 * 350 = 1400 J per GPU; 8 are 27.2 kJ, PUE adds 1/4."""
    energy_by_activity = STEP.energy_by_activity
    assert energy_by_activity == {
        "matmul": 8 * 1400.0, "memory_bound": 8 * 400.0, "exposed_communication": 8 * 150.0, "idle": 8 * 50.0,
        "node_rest": 8 * 1400.0, "facility": pytest.approx(27_200.0 / 4),
    }  # fmt: skip
    assert STEP.energy_per_step == pytest.approx(34_000.0)
    assert STEP.energy_per_trillion_tokens == pytest.approx(34e9)
    assert STEP.run_energy == pytest.approx(170e9)
    assert STEP.gpu_power == pytest.approx(500.0)
    assert STEP.power_per_gpu == pytest.approx(850.0)
    assert STEP.power == pytest.approx(8 * 850.0 * 1.25)


def test_carbon_is_energy_times_carbon_intensity() -> None:
    """34 kJ are 34 / 3600 kWh, at 400 g each."""
    assert STEP.carbon_per_step == pytest.approx(34 / 3600 * 400)
    assert STEP.to_json()["carbon_of_run_t"] == pytest.approx(170e9 / 3.6e6 * 400 / 1e6)
    assert replace(STEP, carbon_intensity=None).to_json()["carbon_per_trillion_tokens_t"] is None


def test_json_energy_is_in_kwh() -> None:
    report = STEP.to_json()
    assert report["energy_per_trillion_tokens_kwh"] == pytest.approx(34e9 / 3.6e6)
    assert sum(report["energy_per_step_by_activity_kwh"].values()) == pytest.approx(report["energy_per_step_kwh"])
    assert (report["currency"], report["price_per_gpu_hour"], report["price_source"]) == ("USD", 9.0, "given")
    assert report["missing"] == []


def test_mixed_gpus_use_their_own_price_and_power() -> None:
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


def test_unknown_values_are_none_and_listed_as_missing() -> None:
    unknown = replace(STEP, gpu_groups=(replace(GPUS, quote=None, power_draw=None),))
    report = unknown.to_json()
    assert (
        report["cost_per_step"] is report["cost_of_run"] is report["energy_per_step_kwh"] is report["power_w"] is None
    )
    assert report["price_source"] == ""
    price, power = report["missing"]
    assert parts("price of h100 ... economics.price_per_gpu_hour").search(price)
    assert parts("power draw ... h100 ... economics.power.tdp").search(power)
    reasons = {"price": "nobody lists it", "power": "nobody measured it"}
    (group,) = unknown.gpu_groups
    reasoned = replace(unknown, gpu_groups=(replace(group, unknown=reasons),))
    assert "(nobody lists it)" in reasoned.missing_prices[0]
    assert "(nobody measured it)" in reasoned.missing_power[0]
    mixed = replace(STEP, gpu_groups=(GPUS, replace(GPUS, quote=PriceQuote(Price(1.0, "EUR"), "given"))))
    assert mixed.cost_per_step is None
    assert "several currencies" in mixed.missing_prices[0]
    gpus_only = replace(STEP, gpu_groups=(replace(GPUS, power_draw=replace(DRAW, node_rest=None)),))
    assert gpus_only.power_per_gpu == gpus_only.gpu_power == pytest.approx(500.0)
    assert "count as GPUs alone" in gpus_only.missing_node_power[0]


def _busy_item(body: Kernel | CommOverlap | CommOp, seconds: float) -> BusyTimeItem:
    return BusyTimeItem(body, Provenance.ROOFLINE, None, 1.0, seconds, runs=1)


def test_breakdown_categories_map_to_activities() -> None:
    """Kernels (6 s, 1 s of overlap delay) are matmuls by their share of kernel time: 3 of 4 s, with overlapped ones."""
    seconds = np.zeros((2, len(TIME_CATEGORIES)))
    for category, value in (
        (TimeCategory.COMPUTE, 3.0),
        (TimeCategory.RECOMPUTE, 1.0),
        (TimeCategory.OPTIMIZER, 1.0),
        (TimeCategory.SLOWED, 1.0),
        (EXPOSED_CATEGORIES[DATA], 2.0),
        (TimeCategory.LAUNCH, 0.25),
        (EXPOSED_CATEGORIES[HOST_AXIS], 0.25),
        (TimeCategory.BUBBLE_STEADY, 0.5),
        (TimeCategory.WAIT, 1.0),
    ):
        seconds[0, category.index] = value
    seconds[1, TimeCategory.WAIT.index] = 10.0
    breakdown = TimeBreakdown(np.array([0, 2]), seconds, np.array([2.0, 1.0]), np.array([0, 0, 2]))
    norm = Kernel("norm", KernelKind.NORM, DType.BF16, 1.0, 1.0)
    overlap = CommOverlap(comm_op("tp"), KERNEL, 2.0)
    busy_items = (
        _busy_item(KERNEL, 1.0),
        _busy_item(overlap, 2.0),
        _busy_item(norm, 1.0),
        _busy_item(comm_op("dp"), 9.0),
    )
    first_class = mean_activity_seconds(breakdown, busy_items, np.array([0, 1]))
    assert list(first_class.values()) == pytest.approx([4.5, 1.5, 2.0, 2.0])
    assert sum(first_class.values()) == pytest.approx(10.0)
    all_ranks = mean_activity_seconds(breakdown, busy_items, np.arange(3))
    assert all_ranks[GpuActivity.WAITING] == pytest.approx((2.0 + 2.0 + 10.0) / 3)
    assert mean_activity_seconds(breakdown, (), np.array([0]))[GpuActivity.MEMORY_BOUND] == pytest.approx(6.0)


def test_activities_sum_to_the_step_and_power_is_between_idle_and_tdp() -> None:
    result = simulate_pipeline()
    (gpus,) = result.economics.gpu_groups
    assert sum(gpus.activity_seconds.values()) == pytest.approx(result.step_time)
    assert gpus.power_draw is not None
    assert gpus.power_draw.node_rest is not None
    assert gpus.power_draw.by_activity[GpuActivity.WAITING] < (result.economics.gpu_power or 0.0) < 700.0
    assert (result.economics.power_per_gpu or 0.0) < 700.0 + gpus.power_draw.node_rest
    assert result.economics.cost_per_trillion_tokens == pytest.approx(
        result.gpu_hours_per_trillion_tokens * result.to_json()["economics"]["price_per_gpu_hour"]
    )


def test_economics_settings_do_not_change_the_timing() -> None:
    overrides = (
        "economics.price_per_gpu_hour=1 EUR",
        "economics.pue=2",
        "economics.power=300 W",
        "economics.tokens=1T",
    )
    baseline, priced = simulate_pipeline(), simulate_pipeline(*overrides)
    assert np.array_equal(baseline.step_times, priced.step_times)
    assert np.array_equal(baseline.trace.end, priced.trace.end)
    assert baseline.mfu == priced.mfu
    assert priced.economics.run_cost == pytest.approx(priced.gpu_hours_per_trillion_tokens)


def test_cost_per_step_does_not_depend_on_the_step_count() -> None:
    one, three = simulate_pipeline().economics, simulate_pipeline("steps=3").economics
    assert three.cost_per_step == pytest.approx(one.cost_per_step, rel=0.05)
    assert sum(three.gpu_groups[0].activity_seconds.values()) == pytest.approx(three.step_time)


def test_a_mixed_cluster_has_one_gpu_group_per_accelerator() -> None:
    economics = simulate_pipeline("cluster.mixed=[{nodes: [1], accelerator: a100-sxm-80gb}]").economics
    assert [(gpu_group.name, gpu_group.gpu_count) for gpu_group in economics.gpu_groups] == [
        ("h100-sxm-80gb", 8),
        ("a100-sxm-80gb", 8),
    ]
    prices = [item.quote.price.amount for item in economics.gpu_groups if item.quote]
    assert economics.price_per_gpu_hour == Price(sum(prices) / 2, "USD")
    assert all(
        sum(element.activity_seconds.values()) == pytest.approx(economics.step_time) for element in economics.gpu_groups
    )
