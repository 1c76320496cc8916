"""Cost and energy labels on the terminal and on the page, with unknown values."""

from dataclasses import replace

import pytest

from clustersim.report.economics_labels import cost_row, describe_power, describe_price, energy_row
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
    assert description == "per trillion tokens, 8.44 USD/GPU h (list)"
    assert "median of 6 clouds' list prices" in describe_price(list_price_economics)


def test_configured_price_and_carbon_of_the_run(configured_economics: Economics) -> None:
    value, description = cost_row(configured_economics)[1:]
    assert value.endswith(" EUR")
    assert "2.5 EUR/GPU h;" in description
    assert description.endswith(" EUR for the run")
    energy = energy_row(configured_economics)[2]
    assert "W/GPU" in energy
    assert "PUE 1.2" in energy
    assert energy.count("t CO2") == 2
    assert energy.endswith("for the run")
    assert "for the job, PUE 1.2" in describe_power(configured_economics)


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
    lines = render_terminal(simulate_pipeline(), 80).splitlines()
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
    assert "cost/T tokens" not in verdict_panel(override_result(simulate_pipeline(), economics=unknown)).html
