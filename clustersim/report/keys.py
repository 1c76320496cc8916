"""What stands in tables and legends? The mark of a category, quantities that stay on one line, and tables themselves.

The mark is a square in the category's colour, hatched where its fill is. Text becomes HTML here, once: what is not
`Html` is escaped.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from clustersim.analysis.parts import PARTS
from clustersim.report.theme import Category
from clustersim.units import Seconds, format_seconds


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Cells:
    """A row of a table, plain text or `Html`, its name first; look: a class of the page's style, such as "sum"."""

    words: Sequence[str]
    look: str = ""


def html(words: str) -> Html:
    """Words as HTML."""
    return words if isinstance(words, Html) else Html(escape(words))


def stacked(words: Iterable[str]) -> Html:
    """Words below each other."""
    return Html("<br>".join(map(html, words)))


def noted(words: str, note: str) -> Html:
    """Words, and a note in small letters below them."""
    return stacked((words, Html(f"<small>{html(note)}</small>")))


def table(heads: Iterable[str], rows: Iterable[Cells], *, words: Collection[int] = ()) -> Html:
    """A table. words: the columns that hold words, which may break, and not quantities."""
    head = "".join(f'<th scope="col"{_kind(place, words)}>{html(each)}</th>' for place, each in enumerate(heads))
    body = "".join(_row(row, words) for row in rows)
    return Html(f'<table class="parts"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def _row(row: Cells, words: Collection[int]) -> str:
    name, *cells = map(html, row.words)
    look = f' class="{row.look}"' if row.look else ""
    rest = "".join(f"<td{_kind(place, words)}>{cell}</td>" for place, cell in enumerate(cells, start=1))
    return f'<tr{look}><th scope="row">{name}</th>{rest}</tr>'


def _kind(place: int, words: Collection[int]) -> str:
    return ' class="words"' if place in words else ""


def key(category: Category) -> Html:
    """The mark."""
    hatched = " hatched" if category.pattern else ""
    return Html(f'<i class="key{hatched}" style="background-color:{category.colour}"></i>')


def named(category: Category, words: str) -> Html:
    """The mark, and words for what it stands for."""
    return Html(key(category) + html(words))


def part_keys(places: Iterable[int], looks: Sequence[Category]) -> Html:
    """A line of marks and words for some parts of the breakdown, by their places. looks: [parts] their categories."""
    words = (f'<span class="named">{named(looks[place], PARTS[place].value)}</span> ' for place in places)
    return Html(f'<p class="lead">{"".join(words)}</p>')


def unbroken(words: str) -> str:
    """Words that stay on one line, such as a number and its unit."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def signed(seconds: Seconds) -> str:
    """A difference of times, with its sign."""
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
