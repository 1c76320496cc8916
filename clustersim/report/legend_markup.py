"""What stands in tables and legends? The mark of a category, and quantities that stay on one line.

The mark is a square in the category's colour, hatched where its fill is. Text that is not `Markup` is escaped.
"""

from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from clustersim.report.theme import LISTED_LOOKS, PART_LOOKS, Category
from clustersim.results.time_categories import PARTS, Part


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
