"""Price lists are sourced and dated, and an invalid price is rejected with an example."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.hardware.accelerator import load_accelerator
from clustersim.hardware.prices import (
    Price,
    PriceKind,
    is_price_list_name,
    load_price_list,
    parse_price,
    quote_from_list,
    quote_list_price,
)
from tests.sentences import parts

PRICE_LISTS = data_files.list_names("prices")


@pytest.mark.parametrize("name", PRICE_LISTS)
def test_every_list_has_a_source_a_day_and_a_currency(name: str) -> None:
    price_list = load_price_list(name)
    assert date(2026, 1, 1) < price_list.read_date < date(2100, 1, 1)
    assert set(price_list.sources) == {"gpu_hour"}
    assert "http" in price_list.sources["gpu_hour"]
    assert {price.currency for price in price_list.price_per_gpu_hour.values()} == {"USD"}, (
        "a median is of one currency"
    )
    assert all(price.amount > 0.1 for price in price_list.price_per_gpu_hour.values())


def test_clusters_of_price_lists_are_packaged_and_unique() -> None:
    clusters = [cluster for name in PRICE_LISTS for cluster in load_price_list(name).clusters]
    assert len(set(clusters)) == len(clusters)
    assert set(clusters) <= set(data_files.list_names("clusters"))


def test_a_cluster_of_a_cloud_has_that_cloud_s_price_and_others_the_median() -> None:
    cloud_quote = quote_list_price("h100-sxm-80gb", "aws-p5")
    assert cloud_quote is not None
    assert cloud_quote == quote_from_list("aws", "h100-sxm-80gb")
    prices = sorted(
        price_list.price_per_gpu_hour["h100-sxm-80gb"].amount for price_list in map(load_price_list, PRICE_LISTS)
    )
    median_quote = quote_list_price("h100-sxm-80gb", "dgx-h100")
    assert median_quote is not None
    assert len(prices) == 6
    assert median_quote.price == Price((prices[2] + prices[3]) / 2, "USD")
    assert f"({prices[0]:g} to {prices[-1]:g} USD)" in median_quote.source


def test_unlisted_gpus_get_the_median_or_no_price() -> None:
    assert quote_list_price("h200-sxm-141gb", "aws-p5en") == quote_list_price("h200-sxm-141gb", "hgx-h200")
    assert quote_list_price("cpu-laptop", "laptop") is None
    assert quote_list_price("h800-sxm-80gb", "dgx-h800") is None


@pytest.mark.parametrize("name", data_files.list_names("accelerators"))
def test_every_accelerator_has_a_price_or_the_reason_why_not(name: str) -> None:
    accelerator = load_accelerator(name)
    quote = quote_list_price(name, "no cloud's")
    assert (quote is None) is ("price" in accelerator.unknown)
    assert not accelerator.unknown or "unknown" in accelerator.sources
    if quote is not None:
        assert quote.kind is PriceKind.LIST
        assert "read 2026-" in quote.source


def test_a_single_list_is_named() -> None:
    single_quote = quote_list_price("mi300x", "mi300x")
    assert single_quote is not None
    assert "Oracle" in single_quote.source


def test_a_list_without_the_accelerator_names_those_that_it_has() -> None:
    with pytest.raises(InputError, match="lambda has no price of mi300x; it has those of a100-sxm-40gb"):
        quote_from_list("lambda", "mi300x")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2.49, "2.49 has no currency; write e.g. '2.49 USD'"),
        (float("nan"), "nan has no currency"),
        ("2.49", "'2.49' ... currency ... '2.49 USD'"),
        ("$2.49", "is not a price"),
        ("2.49 dollars", "is not a price"),
        ("nan USD", "is not a price"),
        ("-2 USD", "'-2 USD' is below zero"),
        ("1e999 USD", "is not finite"),
        (True, "true is not a price"),
        (None, "nothing is not a price"),
    ],
)
def test_invalid_prices_are_rejected(value: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_price(value)
    assert parts(message).search(str(caught.value))


@pytest.mark.parametrize(("text", "amount"), [("2.49 USD", 2.49), ("2.49USD", 2.49), (" .5 EUR ", 0.5), ("0 USD", 0.0)])
def test_an_amount_and_three_letters_are_a_price(text: str, amount: float) -> None:
    assert parse_price(text) == Price(amount, text.strip()[-3:])
    assert parse_price(str(parse_price(text))) == parse_price(text)


def test_price_list_names_are_distinguished_from_prices() -> None:
    assert all(map(is_price_list_name, PRICE_LISTS))
    assert not any(map(is_price_list_name, ["2.49 USD", "nan", "inf", "USD", "$3", 3, None]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_hour": {"h100-sxm-80gb": 3}}, "gpu_hour.h100-sxm-80gb: 3 has no currency"),
        ({"gpu_hour": {"h100-sxm-80": "3 USD"}}, "did you mean h100-sxm-80gb"),
        ({"read": "yesterday"}, "read: 'yesterday' is not a day"),
        ({"sources": {}}, "sources"),
        ({"raed": "2026-01-01"}, "raed: unknown key; did you mean read?"),
    ],
)
def test_an_invalid_price_list_is_rejected(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data_files.read_mapping(data_files.find_file("prices", "oci")) | change))
    with pytest.raises(InputError) as caught:
        load_price_list(str(path))
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
