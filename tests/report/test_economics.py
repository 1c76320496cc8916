"""Money and energy in words: on the terminal, on the page, and what is not known."""

from dataclasses import replace

import pytest

from clustersim.report.economics_labels import cost_row, describe_power, describe_price, energy_row
from clustersim.report.panels.verdict import verdict_panel
from clustersim.results.economics import Economics
from tests.small_pipeline import printed, said, simulated

SAID = (
    "economics.price_per_gpu_hour=2.5 EUR",
    "economics.tokens=15T",
    "economics.carbon=400 g/kWh",
    "economics.pue=1.2",
)


@pytest.fixture(scope="module")
def listed() -> Economics:
    return simulated().economics


@pytest.fixture(scope="module")
def spoken() -> Economics:
    return simulated(*SAID).economics


def test_a_list_price_is_called_one_and_its_source_is_told(listed: Economics) -> None:
    name, value, words = cost_row(listed)
    assert name == "cost"
    assert value.endswith(" USD")
    assert words == "per trillion tokens, 8.44 USD/GPU h (list)"
    assert "median of 6 clouds' list prices" in describe_price(listed)


def test_what_somebody_says_is_told_for_the_run_with_its_carbon(spoken: Economics) -> None:
    value, words = cost_row(spoken)[1:]
    assert value.endswith(" EUR")
    assert "2.5 EUR/GPU h;" in words
    assert words.endswith(" EUR for the run")
    energy = energy_row(spoken)[2]
    assert "W/GPU" in energy
    assert "PUE 1.2" in energy
    assert energy.count("t CO2") == 2
    assert energy.endswith("for the run")
    assert "for the job, PUE 1.2" in describe_power(spoken)


def test_what_is_not_known_is_said_in_its_place(listed: Economics) -> None:
    unknown = replace(
        listed, gpu_groups=tuple(replace(gpu_group, quote=None, power_draw=None) for gpu_group in listed.gpu_groups)
    )
    assert cost_row(unknown) == ("cost", "unknown", "; ".join(unknown.missing_prices))
    assert energy_row(unknown) == ("energy", "unknown", "; ".join(unknown.missing_power))
    assert describe_price(unknown) == describe_power(unknown) == ""


def test_the_terminal_shows_both_in_a_line_each() -> None:
    lines = printed(simulated(), 80).splitlines()
    (hours,) = (number for number, line in enumerate(lines) if line.startswith("GPU hours"))
    assert [line.split()[0] for line in lines[hours + 1 : hours + 4]] == ["cost", "energy", "MFU"]


def test_the_page_shows_both_behind_gpu_hours_where_they_are_known(listed: Economics) -> None:
    card = verdict_panel(simulated(*SAID)).html
    assert "<dt>cost/T tokens</dt>" in card
    assert "<dt>energy/T tokens</dt>" in card
    assert card.index("<dt>GPU hours") < card.index("cost/T tokens") < card.index("<dt>bubble")
    unknown = replace(
        listed, gpu_groups=tuple(replace(gpu_group, quote=None, power_draw=None) for gpu_group in listed.gpu_groups)
    )
    assert "cost/T tokens" not in verdict_panel(said(simulated(), economics=unknown)).html
