"""The page that shows predictions beside measurements: what it holds, and that it draws."""

import json
import math
import re

import pytest

from clustersim.report.validation_page import (
    TextTable,
    ValidationPoint,
    ValidationSection,
    factor_figure,
    hover_text,
    scatter_figure,
    validation_page,
)

HOSTILE = "</script><b>bold"


def point(number: int, source: str = "a paper", **factors: str) -> ValidationPoint:
    return ValidationPoint(f"case-{number}", source, 1.0 + number, 1.1 + number, factors)


def part(*points: ValidationPoint, unit: str = "s") -> ValidationSection:
    table = TextTable(("source", "cases"), [("a paper", "2")], [("all cases", "2")])
    return ValidationSection("Step time", unit, points, table, {"no such GPU": ("x", "y")}, ("All are predicted.",))


def test_every_case_is_a_mark_of_its_source() -> None:
    figure = scatter_figure(part(point(1), point(2), point(3, "a blog")), "scatter")
    marks = {trace["name"]: trace["x"] for trace in figure.traces if trace["mode"] == "markers"}
    assert marks == {"a paper": [2.0, 3.0], "a blog": [4.0]}


def test_sources_have_looks_of_their_own() -> None:
    """Up to the least common multiple of 7 colours and 8 symbols."""
    figure = scatter_figure(part(*(point(n, f"source {n}") for n in range(40))), "scatter")
    looks = [(trace["marker"]["color"], trace["marker"]["symbol"]) for trace in figure.traces[2:]]
    assert len(set(looks)) == 40


def test_the_axes_are_logarithmic_alike_and_hold_all_cases() -> None:
    points = [ValidationPoint("small", "s", 1e-6, 2e-6, {}), ValidationPoint("large", "s", 100.0, 50.0, {})]
    figure = scatter_figure(part(*points), "scatter")
    x, y = figure.layout["xaxis"], figure.layout["yaxis"]
    assert x["type"] == y["type"] == "log"
    assert x["range"] == y["range"]
    assert x["range"][0] < math.log10(1e-6)
    assert x["range"][1] > math.log10(100.0)


def test_bytes_are_drawn_in_gibibytes() -> None:
    figure = scatter_figure(part(ValidationPoint("m", "s", 2.0**31, 2.0**30, {}), unit="B"), "scatter")
    assert figure.traces[2]["x"] == [2.0]
    assert figure.layout["xaxis"]["ticktext"] == ["1 GiB", "2 GiB"]
    assert "measured 2 GiB, predicted 1 GiB" in figure.traces[2]["text"][0]


def test_pointing_at_a_case_names_it_and_its_factors() -> None:
    words = hover_text(ValidationPoint("case-7", "s", 2.0, 1.0, {"gpu": "b200"}), "s")
    for expected in ("case-7", "measured 2 s", "predicted 1 s", "-50.0%", "gpu: b200"):
        assert expected in words


def test_a_factor_has_a_row_for_each_value_most_cases_first() -> None:
    points = [point(n, gpu="old" if n < 3 else "new", scale="small") for n in range(4)]
    figure = factor_figure(points, "factor")
    choices = dict(figure.choices)
    assert [trace["y"][0] for trace in choices["gpu"]] == ["old (3)", "new (1)"]
    assert choices["gpu"][1]["x"] == pytest.approx([100 * (4.1 / 4.0 - 1)])


def test_rare_values_of_a_factor_are_drawn_together() -> None:
    points = [point(n, software=f"version {n}") for n in range(40)]
    rows = dict(factor_figure(points, "factor").choices)["software"]
    assert len(rows) == 15
    assert rows[-1]["y"][0] == "all others (26)"


def test_names_of_a_users_table_stay_text() -> None:
    text = validation_page(HOSTILE, [part(point(1, HOSTILE, **{HOSTILE: HOSTILE}))], TextTable((HOSTILE,), ()))
    assert "<b>bold" not in text
    assert HOSTILE not in text


def test_a_table_without_predictions_has_its_reasons_and_no_figure() -> None:
    text = validation_page("nothing", [part()])
    assert "2 × no such GPU" in text
    figures = re.search(r'id="figures">(.*?)</script>', text)
    assert figures is not None
    assert json.loads(figures[1]) == []


def test_layouts_have_a_table_where_there_are_sets() -> None:
    table = TextTable(("source", "sets"), [("a paper", "3")])
    assert "Which layout is fastest" in validation_page("t", [part(point(1))], table)
    assert "Which layout is fastest" not in validation_page("t", [part(point(1))])
