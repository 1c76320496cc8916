"""How are two results compared on the terminal? The verdict first, then inputs, key numbers and time categories."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.common.units import format_step_time
from clustersim.report.result_difference import ResultDifference, format_input, headline, number_rows
from clustersim.report.row_selection import sample_rows
from clustersim.report.terminal.table import build_table, plain_text
from clustersim.report.terminal.what_helps import what_helps_lines
from clustersim.report.theme import TIME_CATEGORY_STYLES
from clustersim.results.time_categories import TIME_CATEGORIES

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from clustersim.report.terminal.table import Cell
    from clustersim.results.what_if import WhatIfReport

MAX_CATEGORIES: Final = 3  # category columns of the stage table
MAX_STAGES: Final = 16
_RESULT_NAMES: Final = ("A", "B")


def render_difference(difference: ResultDifference, what_ifs: "WhatIfReport | None" = None) -> "Group":
    """Rich renderable: coloured on a terminal, plain elsewhere. what_ifs: simulated changes of B."""
    from rich.console import Group

    inputs = [(change.key, format_input(change.first), format_input(change.second)) for change in difference.inputs]
    renderables: list[RenderableType] = [
        plain_text(headline(difference), "bold"),
        *(plain_text(f"{name}: {title}") for name, title in zip(_RESULT_NAMES, difference.titles, strict=True)),
        plain_text(""),
        build_table(("input", *_RESULT_NAMES), inputs) if inputs else plain_text("no key of the input differs"),
        plain_text(""),
        build_table(("", *_RESULT_NAMES, "change"), number_rows(difference), right_aligned=(1, 2, 3)),
        plain_text(""),
        plain_text("difference by time category, mean over ranks"),
        build_table(("", *_RESULT_NAMES, "B - A"), _category_rows(difference), right_aligned=(1, 2, 3)),
        plain_text(""),
        plain_text("what keeps the step from the ideal"),
        build_table(("", *_RESULT_NAMES, "B - A"), difference.loss_rows, right_aligned=(1, 2, 3)),
    ]
    if len(difference.row_labels) > 1 and difference.changed_categories:
        renderables += [
            plain_text(""),
            plain_text(f"B - A by {difference.row_labels[0].rpartition(' ')[0]}"),
            _stage_table(difference),
        ]
    renderables += [plain_text(""), *what_helps_lines(what_ifs, "B")]
    renderables += [plain_text(f"note: {note}", "yellow") for note in difference.notes]
    return Group(*renderables)


def _category_rows(difference: ResultDifference) -> "Iterator[Sequence[Cell]]":
    for category in difference.nonzero_categories:
        yield plain_text(category.value, TIME_CATEGORY_STYLES[category].colour), *difference.format_category(category)
    steps = map(format_step_time, difference.step_times.tolist())
    yield [plain_text(text, "bold") for text in ("step", *steps, difference.format_delta(difference.step_time_delta))]


def largest_category_changes(difference: ResultDifference) -> list[int]:
    """Indices of the time categories with the largest change on any stage, largest first."""
    max_changes = np.abs(difference.row_deltas).max(axis=0, initial=0.0)
    order = np.argsort(-max_changes, kind="stable")[:MAX_CATEGORIES]
    return [index for index in order.tolist() if max_changes[index] > 0.0]


def _stage_table(difference: ResultDifference) -> "Table":
    """Table of pipeline ranks by the categories that change most; the last column is the sum of all others."""
    changes, categories = difference.row_deltas, largest_category_changes(difference)
    rows = []
    for row in sample_rows(len(changes), MAX_STAGES).tolist():
        selected = changes[row, categories]
        remainder = float(changes[row].sum() - selected.sum())
        rows.append((difference.row_labels[row], *map(difference.format_delta, (*selected.tolist(), remainder))))
    headers = ("", *(TIME_CATEGORIES[category].value for category in categories), "other")
    return build_table(headers, rows, right_aligned=range(1, len(headers)))
