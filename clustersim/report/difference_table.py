"""What does the terminal say of two answers? The difference first, then the input, the numbers and the parts."""

from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.analysis.parts import PARTS
from clustersim.report.answer_table import PART_LOOKS
from clustersim.report.difference import Difference, headline, lines, words_of
from clustersim.report.rows import shown_rows
from clustersim.units import format_step_time

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

MOST_PARTS: Final = 3  # columns of the stages' table
MOST_STAGES: Final = 16
PARTS_WORDS: Final = "where the difference comes from, the mean over ranks"
NO_INPUTS: Final = "no key of the input differs"


def render_difference(difference: Difference) -> "Group":
    """Something that rich prints: coloured on a terminal, plain elsewhere."""
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = [
        Text(headline(difference), style="bold"),
        *(Text(f"{name}: {title}") for name, title in zip("AB", difference.titles, strict=True)),
        Text(),
        inputs_table(difference) if difference.inputs else Text(NO_INPUTS),
        Text(),
        _numbers(difference),
        Text(),
        Text(PARTS_WORDS),
        _parts(difference),
    ]
    if len(difference.row_labels) > 1 and difference.different:
        shown += [Text(), Text("by how much longer in B"), _stages(difference)]
    shown += [Text(f"note: {note}", style="yellow") for note in difference.notes]
    return Group(*shown)


def most_different(difference: Difference) -> list[int]:
    """The parts that differ most on any stage, most first, as places in PARTS."""
    most = np.abs(difference.stage_deltas).max(axis=0, initial=0.0)
    order = np.argsort(-most, kind="stable")[:MOST_PARTS]
    return [place for place in order.tolist() if most[place] > 0.0]


def inputs_table(difference: Difference) -> "Table":
    """The keys that differ."""
    table = _grid(("input", "A", "B"), numbers=0)
    for each in difference.inputs:
        table.add_row(*map(_text, (each.key, words_of(each.first), words_of(each.second))))
    return table


def _numbers(difference: Difference) -> "Table":
    table = _grid(("", "A", "B", "change"), numbers=3)
    for line in lines(difference):
        table.add_row(line.name, line.first, line.second, line.change)
    return table


def _parts(difference: Difference) -> "Table":
    table = _grid(("", "A", "B", "longer by"), numbers=3)
    for part in difference.present:
        first, second = difference.parts[:, part.place].tolist()
        look = _text(part.value, PART_LOOKS[part].colour)
        table.add_row(look, difference.amount(first), difference.amount(second), difference.words(second - first))
    first, second = map(format_step_time, difference.step_times.tolist())
    table.add_row(*(_text(each, "bold") for each in ("step", first, second, difference.words(difference.longer))))
    return table


def _stages(difference: Difference) -> "Table":
    """The rows of the pipeline and the parts that differ most; the rest is what makes each the step's difference."""
    changes, places = difference.stage_deltas, most_different(difference)
    table = _grid(("", *(PARTS[place].value for place in places), "all else"), numbers=len(places) + 1)
    for row in shown_rows(len(changes), MOST_STAGES).tolist():
        chosen = changes[row, places]
        rest = float(changes[row].sum() - chosen.sum())
        table.add_row(difference.row_labels[row], *map(difference.words, chosen.tolist()), difference.words(rest))
    return table


def _text(words: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(words, style=style)


def _grid(heads: tuple[str, ...], numbers: int) -> "Table":
    """A table whose last so many columns are numbers."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for place in range(len(heads)):
        right = place >= len(heads) - numbers
        table.add_column(justify="right" if right else "left", overflow="fold")
    table.add_row(*(_text(head, "dim") for head in heads))
    return table
