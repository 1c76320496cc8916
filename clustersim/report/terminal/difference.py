"""What does the terminal say of two answers? The difference first, then the input, the numbers and the parts."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.common.units import format_step_time
from clustersim.report.result_difference import Difference, headline, lines, words_of
from clustersim.report.row_selection import shown_rows
from clustersim.report.terminal.table import grid, text
from clustersim.report.theme import PART_LOOKS
from clustersim.results.time_categories import PARTS

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from clustersim.report.terminal.table import Cell

MOST_PARTS: Final = 3  # columns of the stages' table
MOST_STAGES: Final = 16
_COMPARED: Final = ("A", "B")


def render_difference(difference: Difference) -> "Group":
    """Something that rich prints: coloured on a terminal, plain elsewhere."""
    from rich.console import Group

    inputs = [
        (changed_key.key, words_of(changed_key.first), words_of(changed_key.second))
        for changed_key in difference.inputs
    ]
    shown: list[RenderableType] = [
        text(headline(difference), "bold"),
        *(text(f"{name}: {title}") for name, title in zip(_COMPARED, difference.titles, strict=True)),
        text(""),
        grid(("input", *_COMPARED), inputs) if inputs else text("no key of the input differs"),
        text(""),
        grid(("", *_COMPARED, "change"), lines(difference), right=(1, 2, 3)),
        text(""),
        text("where the difference comes from, the mean over ranks"),
        grid(("", *_COMPARED, "longer by"), _parts(difference), right=(1, 2, 3)),
    ]
    if len(difference.row_labels) > 1 and difference.different:
        shown += [text(""), text("by how much longer in B"), _stages(difference)]
    shown += [text(f"note: {note}", "yellow") for note in difference.notes]
    return Group(*shown)


def _parts(difference: Difference) -> "Iterator[Sequence[Cell]]":
    for part in difference.present:
        yield text(part.value, PART_LOOKS[part].colour), *difference.amounts(part)
    steps = map(format_step_time, difference.step_times.tolist())
    yield [text(item, "bold") for item in ("step", *steps, difference.words(difference.longer))]


def most_different(difference: Difference) -> list[int]:
    """The parts that differ most on any stage, most first, as places in PARTS."""
    most = np.abs(difference.stage_deltas).max(axis=0, initial=0.0)
    order = np.argsort(-most, kind="stable")[:MOST_PARTS]
    return [place for place in order.tolist() if most[place] > 0.0]


def _stages(difference: Difference) -> "Table":
    """The rows of the pipeline and the parts that differ most; the rest is what makes each the step's difference."""
    changes, places = difference.stage_deltas, most_different(difference)
    rows = []
    for row in shown_rows(len(changes), MOST_STAGES).tolist():
        chosen = changes[row, places]
        rest = float(changes[row].sum() - chosen.sum())
        rows.append((difference.row_labels[row], *map(difference.words, (*chosen.tolist(), rest))))
    heads = ("", *(PARTS[place].value for place in places), "all else")
    return grid(heads, rows, right=range(1, len(heads)))
