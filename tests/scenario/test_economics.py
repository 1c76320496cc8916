"""The `economics` section: prices, energy, carbon and power."""

from collections.abc import Callable
from typing import Any

import pytest

from clustersim import Scenario
from clustersim.hardware.power import PowerOverrides
from clustersim.hardware.prices import Price
from clustersim.scenario.settings import EconomicsSettings
from tests.sentences import parts

Refusal = Callable[..., str]


def economics_settings(mapping: dict[str, Any], *overrides: str) -> EconomicsSettings:
    """The economics settings of a scenario; checks that the written scenario reads back equal."""
    scenario = Scenario.from_mapping(mapping, [f"economics.{override}" for override in overrides])
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    return scenario.economics


def test_economics_defaults(mapping: dict[str, Any]) -> None:
    assert economics_settings(mapping) == EconomicsSettings(None, 1.0, None, None, PowerOverrides())


def test_all_keys_are_read_in_si_units(mapping: dict[str, Any]) -> None:
    settings = economics_settings(
        mapping,
        "price_per_gpu_hour=2.49 EUR",
        "pue=1.2",
        "carbon_intensity=360 g/kWh",
        "tokens=15.6T",
        "power={tdp: 0.5 kW, idle: 90 W, rest: 0 W, matmul: 90 %, memory_bound: 0.6, exposed_communication: 0.4}",
    )
    powers = PowerOverrides(500.0, 90.0, 0.0, 0.9, 0.6, 0.4)
    assert settings == EconomicsSettings(Price(2.49, "EUR"), 1.2, pytest.approx(1e-4), 15.6e12, powers)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("15.6T", 15.6e12), ("300B", 3e11), ("1.5e13", 1.5e13), ("1.5e+13", 1.5e13), ("2 M", 2e6), ("1000", 1e3)],
)
def test_token_counts_accept_suffixes(mapping: dict[str, Any], text: str, tokens: float) -> None:
    assert economics_settings(mapping, f"tokens={text}").training_tokens == pytest.approx(tokens)


def test_scalar_power_is_tdp_and_name_is_price_list(mapping: dict[str, Any]) -> None:
    assert economics_settings(mapping, "power=500 W").powers == PowerOverrides(tdp=500.0)
    assert economics_settings(mapping, "price_per_gpu_hour=oci").gpu_hour_price == "oci"


@pytest.mark.parametrize(
    ("override", "expected_words"),
    [
        ("price_per_gpu_hour=2.49", ["price_per_gpu_hour: 2.49 has no currency", "'2.49 USD'"]),
        ("price_per_gpu_hour=-1 USD", ["'-1 USD' is below zero"]),
        ("price_per_gpu_hour=.nan", ["nan has no currency"]),
        ("price_per_gpu_hour=nan USD", ["'nan USD' is not a price"]),
        ("price_per_gpu_hour=[2 USD]", ["is not a price"]),
        ("price_per_gpu_hour=ocii", ["there is no price list 'ocii'; did you mean oci?"]),
        ("price_per_hour=2 USD", ["economics.price_per_hour: unknown key; did you mean", "price_per_gpu_hour"]),
        ("pue=0.9", ["economics.pue: 0.9 is not between 1 and 10"]),
        ("pue=.nan", ["economics.pue: nan is not between 1 and 10"]),
        ("pue=20 %", ["economics.pue: '20 %' is not between"]),
        ("carbon_intensity=400", ["economics.carbon_intensity: 400 ... no unit ... '400 g/kWh'"]),
        ("carbon_intensity=-1 g/kWh", ["'-1 g/kWh' is below zero"]),
        ("tokens=0", ["0 is not a number of tokens above zero; write e.g. 15.6T"]),
        ("tokens=.nan", ["nan is not a number of tokens"]),
        ("tokens=15.6 trillion", ["'15.6 trillion' is not a number of tokens"]),
        ("power.tdp=700", ["economics.power.tdp: 700 has no unit", "'700 W'"]),
        ("power.tdp=0 W", ["economics.power.tdp: '0 W' is not above zero"]),
        ("power.rest=-1 W", ["economics.power.rest: '-1 W' is below zero"]),
        ("power.matmul=80", ["economics.power.matmul", "write 80 %"]),
        ("power.matmul=110 %", ["'110 %' is not between 0 % and 100 %"]),
        ("power.memory_bound=1 %", ["economics.power: memory_bound draws 7 W ... idle"]),
        ("power.idle=1 kW", ["economics.power: idle 1 kW is above tdp 700 W"]),
        ("power.tpd=1 kW", ["economics.power.tpd: unknown key; did you mean tdp?"]),
    ],
)
def test_invalid_economics_are_rejected_with_a_correction(
    refusal: Refusal, override: str, expected_words: list[str]
) -> None:
    sentence = refusal(f"economics.{override}")
    assert sentence.startswith("plan.yaml: economics.")
    assert all(parts(words).search(sentence) for words in expected_words), sentence


def test_price_list_must_contain_the_cluster_accelerators(refusal: Refusal) -> None:
    sentence = refusal("economics.price_per_gpu_hour=lambda", "cluster.name=mi300x")
    assert parts("economics.price_per_gpu_hour: lambda ... mi300x; it has").search(sentence)


def test_misplaced_economics_keys_are_suggested(refusal: Refusal) -> None:
    assert "did you mean economics?" in refusal("economic.pue=1.2")
    assert "did you mean economics.price_per_gpu_hour?" in refusal("price_per_gpu_hour=2 USD")
