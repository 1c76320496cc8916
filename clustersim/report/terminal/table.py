"""How do tables of text look on a terminal? Columns side by side, without lines between them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # nobody waits for rich who prints nothing
    from rich.table import Table
    from rich.text import Text

    Cell = str | Text


def build_table(
    headers: Sequence["Cell"], rows: Iterable[Sequence["Cell"]], right_aligned: Iterable[int] = ()
) -> "Table":
    """A table with its heads, if there are any, in a pale line. right: the columns of numbers."""
    from rich.table import Table

    number_columns = set(right_aligned)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=any(headers))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in number_columns else "left", overflow="fold")
    for row in rows:
        table.add_row(*(plain_text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def plain_text(content: str, style: str = "") -> "Text":
    """Words, which are no markup."""
    from rich.text import Text

    return Text(content, style=style)
