"""What stands in tables and legends? The mark of a category, quantities that stay on one line, and tables themselves.

The mark is a square in the category's colour, hatched where its fill is. Text that is not `Markup` is escaped.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from clustersim.analysis.parts import PARTS, Part
from clustersim.report.document import render
from clustersim.report.theme import LISTED_LOOKS, PART_LOOKS, Category
from clustersim.units import Seconds, format_seconds


@dataclass(frozen=True, slots=True)
class Cells:
    """A row of a table, plain text or `Markup`, its name first; look: a class of the page's style, such as "sum"."""

    words: Sequence[str]
    look: str = ""


def table(heads: Iterable[str], rows: Iterable[Cells], *, words: Collection[int] = ()) -> Markup:
    """A table. words: the columns that hold words, which may break, and not quantities."""
    return render("table.html", heads=heads, rows=rows, words=words)


def wide(content: str) -> Markup:
    """What may be wider than a small screen."""
    return Markup('<div class="scrolls">{}</div>').format(content)


def key(category: Category) -> Markup:
    """The mark."""
    hatched = " hatched" if category.pattern else ""
    return Markup('<i class="key{}" style="background-color:{}"></i>').format(hatched, category.colour)


def named(category: Category, words: str) -> Markup:
    """The mark, and words for what it stands for."""
    return key(category) + escape(words)


def part_keys(places: NDArray[np.integer[Any]]) -> Markup:
    """A line of marks and words for the parts of the breakdown at these places, each once."""
    named = Markup('<span class="named">{}</span> ').format
    words = Markup("").join(named(part_name(PARTS[place])) for place in np.unique(places).tolist())
    return Markup('<p class="lead">{}</p>').format(words)


def part_name(part: Part) -> Markup:
    """The mark and the name of a part of the breakdown."""
    return named(PART_LOOKS[part], part.value)


def axis_name(axis: str) -> Markup:
    """The mark and the words of an axis or role, as it is listed."""
    words, look = LISTED_LOOKS[axis]
    return named(look, words)


def unbroken(words: str) -> str:
    """Words that stay on one line, such as a number and its unit."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def signed(seconds: Seconds) -> str:
    """A difference of times, with its sign."""
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
