"""What stands in tables and legends? The mark of a category, and quantities that stay on one line.

The mark is a square in the category's colour, hatched where its fill is.
"""

from collections.abc import Iterable, Sequence
from html import escape

from clustersim.analysis.parts import PARTS
from clustersim.report.theme import Category


def key(category: Category) -> str:
    """The mark, as HTML."""
    hatched = " hatched" if category.pattern else ""
    return f'<i class="key{hatched}" style="background-color:{category.colour}"></i>'


def part_keys(places: Iterable[int], looks: Sequence[Category]) -> str:
    """A line of marks and words for some parts of the breakdown, by their places. looks: [parts] their categories."""
    words = (f'<span class="named">{key(looks[place])}{escape(PARTS[place].value)}</span> ' for place in places)
    return f'<p class="lead">{"".join(words)}</p>'


def unbroken(words: str) -> str:
    """Words that stay on one line, such as a number and its unit."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")
