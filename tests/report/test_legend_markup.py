"""HTML escaping and legend markup."""

import re
from pathlib import Path

from markupsafe import Markup

from clustersim import report
from clustersim.report.legend_markup import swatch_and_label
from clustersim.report.theme import CategoryStyle
from clustersim.report.validation_page import TextTable, validation_page


def test_text_of_a_table_is_escaped_once_and_html_stays() -> None:
    rows, sums = [("a & b", "<0.1%", Markup("<b>x</b>"))], [("c", "&lt;", "")]
    text = validation_page("", [], TextTable(("<head>", "", ""), rows, sums))
    assert re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", text.split("<script")[0]) == [
        "&lt;head&gt;", "", "",
        "a &amp; b", "&lt;0.1%", "<b>x</b>",
        "c", "&amp;lt;", "",
    ]  # fmt: skip
    assert text.count('<tr class="sum">') == 1


def test_legend_mark_of_hatched_category() -> None:
    for category in (CategoryStyle.FORWARD, CategoryStyle.WAIT):
        mark = swatch_and_label(category, "<words>")
        assert (" hatched" in mark) == bool(category.pattern)
        assert category.colour in mark
        assert mark.endswith("</i>&lt;words&gt;")


def test_all_prose_macros_are_used() -> None:
    package_dir = Path(report.__file__).parent
    macros = re.findall(r"\{% macro (\w+)\(", (package_dir / "templates" / "words.html").read_text(encoding="utf-8"))
    used = [
        name
        for file in package_dir.rglob("*.py")
        for name in re.findall(r'render_text\(\s*"(\w+)"', file.read_text("utf-8"))
    ]
    assert sorted(macros) == sorted(used)
