import math

import pytest

from clustersim.common.units import Dimension, format_bytes, format_number, format_seconds, parse_quantity


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (120.0, "120 s"),
        (120.4, "2 min 0 s"),
        (3599.6, "60 min 0 s"),
        (7199.9, "120 min 0 s"),
        (7200.0, "2 h 0 min"),
        (86_399.0, "24 h 0 min"),
        (2.736e5, "3 d 4 h"),
        (1e9, "11,574 d 2 h"),
        (-754.0, "-12 min 34 s"),
    ],
)
def test_long_times_have_two_units_and_round_correctly(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(math.inf, "inf s"), (math.nan, "nan ns"), (0.0, "0 s")])
def test_infinite_and_nan_times_are_formatted(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_large_numbers_have_no_exponent() -> None:
    assert format_number(8.258e4) == "82,580"
    assert format_number(2.602156e6) == "2,602,000"


@pytest.mark.parametrize("seconds", [1.5e-9, 2.5e-6, 0.125, 1.0, 119.5])
def test_formatted_short_times_parse_back(seconds: float) -> None:
    assert parse_quantity(format_seconds(seconds), Dimension.TIME) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("size", [1.0, 2.0**10, 80 * 2.0**30, 1023 * 2.0**30, 3.5 * 2.0**40])
def test_formatted_sizes_parse_back(size: float) -> None:
    assert parse_quantity(format_bytes(size), Dimension.SIZE) == size
