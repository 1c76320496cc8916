"""The validation page: measured against predicted values in tables and figures."""

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

HTML_INJECTION = "</script><b>bold"


def build_point(case_index: int, source: str = "a paper", **factors: str) -> ValidationPoint:
    return ValidationPoint(f"case-{case_index}", source, 1.0 + case_index, 1.1 + case_index, factors)


def build_section(*points: ValidationPoint, unit: str = "s") -> ValidationSection:
    table = TextTable(("source", "cases"), [("a paper", "2")], [("all cases", "2")])
    return ValidationSection("Step time", unit, points, table, {"no such GPU": ("x", "y")}, ("All are predicted.",))


def test_cases_are_grouped_by_source() -> None:
    figure = scatter_figure(build_section(build_point(1), build_point(2), build_point(3, "a blog")), "scatter")
    marks = {trace["name"]: trace["x"] for trace in figure.traces if trace["mode"] == "markers"}
    assert marks == {"a paper": [2.0, 3.0], "a blog": [4.0]}


def test_sources_have_distinct_markers() -> None:
    """Up to the least common multiple of 7 colours and 8 symbols."""
    figure = scatter_figure(build_section(*(build_point(n, f"source {n}") for n in range(40))), "scatter")
    markers = [(trace["marker"]["color"], trace["marker"]["symbol"]) for trace in figure.traces[2:]]
    assert len(set(markers)) == 40


def test_log_axes_are_equal_and_include_all_cases() -> None:
    points = [ValidationPoint("small", "s", 1e-6, 2e-6, {}), ValidationPoint("large", "s", 100.0, 50.0, {})]
    figure = scatter_figure(build_section(*points), "scatter")
    x, y = figure.layout["xaxis"], figure.layout["yaxis"]
    assert x["type"] == y["type"] == "log"
    assert x["range"] == y["range"]
    assert x["range"][0] < math.log10(1e-6)
    assert x["range"][1] > math.log10(100.0)


def test_bytes_are_drawn_in_gibibytes() -> None:
    figure = scatter_figure(build_section(ValidationPoint("m", "s", 2.0**31, 2.0**30, {}), unit="B"), "scatter")
    assert figure.traces[2]["x"] == [2.0]
    assert figure.layout["xaxis"]["ticktext"] == ["1 GiB", "2 GiB"]
    assert "measured 2 GiB, predicted 1 GiB" in figure.traces[2]["text"][0]


def test_hover_text_of_a_case() -> None:
    text = hover_text(ValidationPoint("case-7", "s", 2.0, 1.0, {"gpu": "b200"}), "s")
    for expected in ("case-7", "measured 2 s", "predicted 1 s", "-50.0%", "gpu: b200"):
        assert expected in text


def test_factor_rows_are_ordered_by_case_count() -> None:
    points = [build_point(n, gpu="old" if n < 3 else "new", scale="small") for n in range(4)]
    figure = factor_figure(points, "factor")
    choices = dict(figure.choices)
    assert [trace["y"][0] for trace in choices["gpu"]] == ["old (3)", "new (1)"]
    assert choices["gpu"][1]["x"] == pytest.approx([100 * (4.1 / 4.0 - 1)])


def test_rare_factor_values_are_merged() -> None:
    points = [build_point(n, software=f"version {n}") for n in range(40)]
    rows = dict(factor_figure(points, "factor").choices)["software"]
    assert len(rows) == 15
    assert rows[-1]["y"][0] == "all others (26)"


def test_validation_names_are_escaped() -> None:
    text = validation_page(
        HTML_INJECTION,
        [build_section(build_point(1, HTML_INJECTION, **{HTML_INJECTION: HTML_INJECTION}))],
        TextTable((HTML_INJECTION,), ()),
    )
    assert "<b>bold" not in text
    assert HTML_INJECTION not in text


def test_section_without_predictions_lists_reasons() -> None:
    text = validation_page("nothing", [build_section()])
    assert "2 × no such GPU" in text
    figures = re.search(r'id="figures">(.*?)</script>', text)
    assert figures is not None
    assert json.loads(figures[1]) == []


def test_layout_ranking_table_is_optional() -> None:
    table = TextTable(("source", "sets"), [("a paper", "3")])
    assert "Which layout is fastest" in validation_page("t", [build_section(build_point(1))], table)
    assert "Which layout is fastest" not in validation_page("t", [build_section(build_point(1))])
