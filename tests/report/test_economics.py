"""Cost and energy labels on the terminal and on the page, with unknown values."""

from dataclasses import replace

import pytest

from clustersim.report.economics_labels import cost_row, describe_power, describe_price, energy_row, training_run_rows
from clustersim.report.panels.verdict import verdict_panel
from clustersim.results.economics import Economics
from tests.small_pipeline import override_result, render_terminal, simulate_pipeline

ECONOMICS_OVERRIDES = (
    "economics.price_per_gpu_hour=2.5 EUR",
    "economics.tokens=15T",
    "economics.carbon_intensity=400 g/kWh",
    "economics.pue=1.2",
)


@pytest.fixture(scope="module")
def list_price_economics() -> Economics:
    return simulate_pipeline().economics


@pytest.fixture(scope="module")
def configured_economics() -> Economics:
    return simulate_pipeline(*ECONOMICS_OVERRIDES).economics


def test_list_price_label_and_source(list_price_economics: Economics) -> None:
    name, value, description = cost_row(list_price_economics)
    assert name == "cost"
    assert value.endswith(" USD")
    assert description == "per trillion tokens, 8.44 USD/GPU h (list price)"
    assert "median of 6 clouds' list prices" in describe_price(list_price_economics)


def test_configured_price_and_carbon_of_the_run(configured_economics: Economics) -> None:
    value, description = cost_row(configured_economics)[1:]
    assert value.endswith(" EUR")
    assert "2.5 EUR/GPU h (contract price)" in description
    assert " EUR for the run" in description
    energy = energy_row(configured_economics)[2]
    assert "W/GPU" in energy
    assert "PUE 1.2" in energy
    assert energy.count("t CO2") == 2
    assert energy.endswith("for the run")
    assert "for the job, PUE 1.2" in describe_power(configured_economics)


def test_a_contract_price_stands_beside_the_list_price(
    configured_economics: Economics, list_price_economics: Economics
) -> None:
    """Contract: 2.5 EUR. List: the median of six clouds, as without a contract."""
    description = cost_row(configured_economics)[2]
    list_cost = cost_row(list_price_economics)[1]
    assert f"{list_cost} at 8.44 USD/GPU h (list price)" in description
    assert [quote.kind.value for quote in configured_economics.price_quotes] == ["contract", "list"]
    report = configured_economics.to_json()
    assert (report["price_kind"], report["price_per_gpu_hour"], report["currency"]) == ("contract", 2.5, "EUR")
    assert report["list_price"]["cost_per_trillion_tokens"] == pytest.approx(
        list_price_economics.cost_per_trillion_tokens
    )
    run_prices = [meaning for _, meaning in training_run_rows(configured_economics, 1.0)[1:]]
    assert run_prices == ["at 2.5 EUR/GPU h (contract price)", "at 8.44 USD/GPU h (list price)"]


def test_a_list_price_is_said_once(list_price_economics: Economics) -> None:
    assert [quote.kind.value for quote in list_price_economics.price_quotes] == ["list"]
    report = list_price_economics.to_json()
    assert report["price_kind"] == "list"
    assert report["list_price"]["cost_per_step"] == report["cost_per_step"]


def test_unknown_cost_and_energy(list_price_economics: Economics) -> None:
    unknown = replace(
        list_price_economics,
        gpu_groups=tuple(
            replace(gpu_group, quote=None, power_draw=None) for gpu_group in list_price_economics.gpu_groups
        ),
    )
    assert cost_row(unknown) == ("cost", "unknown", "; ".join(unknown.missing_prices))
    assert energy_row(unknown) == ("energy", "unknown", "; ".join(unknown.missing_power))
    assert describe_price(unknown) == describe_power(unknown) == ""


def test_terminal_lines_of_cost_and_energy() -> None:
    lines = [line for line in render_terminal(simulate_pipeline(), 80).splitlines() if line and line[0] != " "]
    (hours_index,) = (line_index for line_index, line in enumerate(lines) if line.startswith("GPU hours"))
    assert [line.split()[0] for line in lines[hours_index + 1 : hours_index + 4]] == ["cost", "energy", "MFU"]


def test_page_shows_cost_and_energy_after_gpu_hours(list_price_economics: Economics) -> None:
    card = verdict_panel(simulate_pipeline(*ECONOMICS_OVERRIDES)).html
    assert "<dt>cost/T tokens</dt>" in card
    assert "<dt>energy/T tokens</dt>" in card
    assert card.index("<dt>GPU hours") < card.index("cost/T tokens") < card.index("<dt>bubble")
    unknown = replace(
        list_price_economics,
        gpu_groups=tuple(
            replace(gpu_group, quote=None, power_draw=None) for gpu_group in list_price_economics.gpu_groups
        ),
    )
    unknown_card = verdict_panel(override_result(simulate_pipeline(), economics=unknown)).html
    assert "<dt>cost/T tokens</dt><dd>unknown</dd>" in unknown_card
    assert "no list price of h100-sxm-80gb is known" in unknown_card
