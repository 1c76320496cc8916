"""Days and costs of a run: failures alone, and with the step's prediction interval; contract and list price."""

from dataclasses import replace
from statistics import median

import pytest

from clustersim.common.errors import MemoryFitError
from clustersim.common.units import Seconds
from clustersim.hardware.prices import Price, PriceKind, PriceQuote
from clustersim.reliability import simulate_goodput
from clustersim.report.terminal.goodput import change_rows, cost_rows, describe_changes, headline
from clustersim.results.goodput import INTERVAL, GoodputResult
from tests.planning.layouts.search_scenarios import search_scenario

CONTRACT = PriceQuote(Price(2.0, "EUR"), "economics.price_per_gpu_hour", PriceKind.CONTRACT)
LIST = PriceQuote(Price(8.0, "USD"), "a cloud")


@pytest.fixture(scope="module")
def result() -> GoodputResult:
    return simulate_goodput(search_scenario("economics.tokens=100B", "reliability.rates=100"), 8)


@pytest.fixture(scope="module")
def failure_free() -> GoodputResult:
    return simulate_goodput(search_scenario("economics.tokens=100B", "reliability.rates=0"), 2, curves=False)


def with_interval(result: GoodputResult, low: Seconds, high: Seconds) -> GoodputResult:
    return replace(result, step_time_interval=(low, high))


def test_without_failures_days_have_the_interval_of_the_step(failure_free: GoodputResult) -> None:
    days, with_step_error = failure_free.days["p50"], failure_free.days_with_step_error
    assert failure_free.days["p5"] == failure_free.days["p95"] == days
    relative_interval = [bound / failure_free.step_time for bound in failure_free.step_time_interval]
    assert [with_step_error[name] / days for name in INTERVAL] == pytest.approx(relative_interval)


def test_a_certain_step_leaves_failures_alone(result: GoodputResult) -> None:
    certain = with_interval(result, result.step_time, result.step_time)
    assert certain.days_with_step_error == pytest.approx(
        {name: result.days[name] for name in result.days if name != "mean"}
    )
    assert result.days["p5"] < result.days["p95"]


def test_the_step_s_interval_widens_the_days(result: GoodputResult) -> None:
    low, high = (result.days_with_step_error[name] for name in INTERVAL)
    assert low < result.days["p5"] < result.days["p95"] < high


def test_headline_has_both_intervals(result: GoodputResult) -> None:
    text = headline(result)
    total, failures = text.split(" days, ")[1].split("; ")
    assert "with the step's uncertainty" in total
    assert "failures alone" in failures
    for values, clause in ((result.days_with_step_error, total), (result.days, failures)):
        assert all(f"{values[name]:.1f}" in clause for name in INTERVAL)


def test_cost_is_days_times_nodes_with_spares_times_price(result: GoodputResult) -> None:
    gpus = 8 * (result.nodes + result.spare_nodes)
    assert result.cost_of({"p50": 3.0}, CONTRACT) == pytest.approx({"p50": 3.0 * 24.0 * gpus * 2.0})


def test_contract_and_list_cost_stand_side_by_side(result: GoodputResult) -> None:
    priced = replace(result, price_quotes=(CONTRACT, LIST))
    report = priced.to_json()["cost"]
    assert {name: (cost["price_per_gpu_hour"], cost["currency"]) for name, cost in report.items()} == {
        "contract": (2.0, "EUR"),
        "list": (8.0, "USD"),
    }
    for name in (*INTERVAL, "p50"):
        assert report["list"][name] == pytest.approx(4.0 * report["contract"][name])
    assert report["list"]["with_step_error"]["p95"] / report["list"]["p50"] == pytest.approx(
        result.days_with_step_error["p95"] / result.days["p50"]
    )
    contract_row, list_row = cost_rows(priced)
    assert "contract price" in contract_row[0]
    assert "2 EUR/GPU h" in contract_row[2]
    assert "list price" in list_row[0]
    assert "8 USD/GPU h" in list_row[2]


def test_no_price_is_no_cost(result: GoodputResult) -> None:
    unpriced = replace(result, price_quotes=())
    assert unpriced.to_json()["cost"] == {}
    assert cost_rows(unpriced) == []


def test_what_ifs_start_from_the_headline_s_days(result: GoodputResult) -> None:
    baseline = result.days["p50"]
    for change in result.to_json()["what_if"]:
        assert change["days_before"] == baseline
        assert change["days"] - change["days_before"] == pytest.approx(change["difference"])
        assert change["runs"] == 8
    assert change_rows(result)[0][1] == f"{baseline + result.changes[0].days:.1f}"
    assert f"{baseline:.1f} days" in describe_changes(result)


def test_what_if_is_the_median_change_of_the_same_runs() -> None:
    """Half the failures, simulated directly, with a checkpoint interval and spares that do not depend on them."""
    fixed = ("economics.tokens=1T", "reliability.checkpoint.interval=10 min", "reliability.spares=1")
    runs_by_rate = {
        rate: simulate_goodput(search_scenario(*fixed, f"reliability.rates={rate}"), 6) for rate in (100, 50)
    }
    (change,) = (change for change in runs_by_rate[100].changes if change.description == "half the failures")
    pairs = zip(runs_by_rate[50].runs, runs_by_rate[100].runs, strict=True)
    assert change.days < 0.0
    assert change.days == pytest.approx(median((after.wall - before.wall) / 86400.0 for after, before in pairs))


def test_goodput_refuses_a_job_that_does_not_fit() -> None:
    with pytest.raises(MemoryFitError, match=r"does not fit in memory.*of.*GiB"):
        simulate_goodput(search_scenario("economics.tokens=100B", "training.sequence=4194304"), 1)
