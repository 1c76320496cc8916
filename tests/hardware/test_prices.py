"""List prices are sourced and dated, and a price that is none is refused with an example."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.hardware.prices import (
    Price,
    is_price_list_name,
    load_price_list,
    parse_price,
    quote_from_list,
    quote_list_price,
)

LISTS = data_files.list_names("prices")


@pytest.mark.parametrize("name", LISTS)
def test_every_list_has_a_source_a_day_and_a_currency(name: str) -> None:
    found = load_price_list(name)
    assert date(2026, 1, 1) < found.read_date < date(2100, 1, 1)
    assert set(found.sources) == {"gpu_hour"}
    assert "http" in found.sources["gpu_hour"]
    assert {price.currency for price in found.price_per_gpu_hour.values()} == {"USD"}, "a median is of one currency"
    assert all(price.amount > 0.1 for price in found.price_per_gpu_hour.values())


def test_clusters_of_lists_are_shipped_and_each_is_of_one_cloud() -> None:
    named = [cluster for name in LISTS for cluster in load_price_list(name).clusters]
    assert len(set(named)) == len(named)
    assert set(named) <= set(data_files.list_names("clusters"))


def test_a_cluster_of_a_cloud_has_that_cloud_s_price_and_others_the_median() -> None:
    own = quote_list_price("h100-sxm-80gb", "aws-p5")
    assert own is not None
    assert own == quote_from_list("aws", "h100-sxm-80gb")
    prices = sorted(found.price_per_gpu_hour["h100-sxm-80gb"].amount for found in map(load_price_list, LISTS))
    other = quote_list_price("h100-sxm-80gb", "dgx-h100")
    assert other is not None
    assert len(prices) == 6
    assert other.price == Price((prices[2] + prices[3]) / 2, "USD")
    assert f"({prices[0]:g} to {prices[-1]:g} USD)" in other.source


def test_a_gpu_that_its_own_cloud_does_not_list_has_the_median_and_one_that_nobody_lists_none() -> None:
    assert quote_list_price("h200-sxm-141gb", "aws-p5en") == quote_list_price("h200-sxm-141gb", "hgx-h200")
    assert quote_list_price("cpu-laptop", "laptop") is None
    assert quote_list_price("h800-sxm-80gb", "dgx-h800") is None


def test_a_single_list_is_named() -> None:
    found = quote_list_price("mi300x", "mi300x")
    assert found is not None
    assert "Oracle" in found.source


def test_a_list_without_the_accelerator_names_those_that_it_has() -> None:
    with pytest.raises(InputError, match="lambda has no price of mi300x; it has those of a100-sxm-40gb"):
        quote_from_list("lambda", "mi300x")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (2.49, "2.49 has no currency; write e.g. '2.49 USD'"),
        (float("nan"), "nan has no currency"),
        ("2.49", "'2.49' is not a price; write an amount and a currency such as '2.49 USD'"),
        ("$2.49", "is not a price"),
        ("2.49 dollars", "is not a price"),
        ("nan USD", "is not a price"),
        ("-2 USD", "'-2 USD' is below zero"),
        ("1e999 USD", "is not finite"),
        (True, "true is not a price"),
        (None, "nothing is not a price"),
    ],
)
def test_what_is_no_price_is_refused(value: object, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_price(value)
    assert words in str(caught.value)


@pytest.mark.parametrize(("text", "amount"), [("2.49 USD", 2.49), ("2.49USD", 2.49), (" .5 EUR ", 0.5), ("0 USD", 0.0)])
def test_an_amount_and_three_letters_are_a_price(text: str, amount: float) -> None:
    assert parse_price(text) == Price(amount, text.strip()[-3:])
    assert parse_price(str(parse_price(text))) == parse_price(text)


def test_words_are_lists_and_prices_are_none() -> None:
    assert all(map(is_price_list_name, LISTS))
    assert not any(map(is_price_list_name, ["2.49 USD", "nan", "inf", "USD", "$3", 3, None]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu_hour": {"h100-sxm-80gb": 3}}, "gpu_hour.h100-sxm-80gb: 3 has no currency"),
        ({"gpu_hour": {"h100-sxm-80": "3 USD"}}, "did you mean h100-sxm-80gb"),
        ({"read": "yesterday"}, "read: 'yesterday' is not a day"),
        ({"sources": {}}, "sources"),
        ({"raed": "2026-01-01"}, "raed: unknown key; did you mean read?"),
    ],
)
def test_a_list_that_is_wrong_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data_files.read_mapping(data_files.find_file("prices", "oci")) | change))
    with pytest.raises(InputError) as caught:
        load_price_list(str(path))
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
