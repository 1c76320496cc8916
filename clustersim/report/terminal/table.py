"""How do tables of text look on a terminal? Columns side by side, without lines between them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # nobody waits for rich who prints nothing
    from rich.table import Table
    from rich.text import Text

    Cell = str | Text


def grid(heads: Sequence["Cell"], rows: Iterable[Sequence["Cell"]], right: Iterable[int] = ()) -> "Table":
    """A table with its heads, if there are any, in a pale line. right: the columns of numbers."""
    from rich.table import Table

    numbers = set(right)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=any(heads))
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(text(item) if isinstance(item, str) else item for item in row))
    return table


def text(words: str, style: str = "") -> "Text":
    """Words, which are no markup."""
    from rich.text import Text

    return Text(words, style=style)
