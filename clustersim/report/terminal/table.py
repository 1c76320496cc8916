"""How do tables look on a terminal? Columns without lines between them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # deferred: rich is imported only when something is printed
    from rich.table import Table
    from rich.text import Text

    Cell = str | Text


def build_table(
    headers: Sequence["Cell"], rows: Iterable[Sequence["Cell"]], right_aligned: Iterable[int] = ()
) -> "Table":
    """A table with dim headers, if there are any. right_aligned: indices of the columns of numbers."""
    from rich.table import Table

    number_columns = set(right_aligned)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=any(headers))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in number_columns else "left", overflow="fold")
    for row in rows:
        table.add_row(*(plain_text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def warning_lines(warnings: Iterable[str]) -> Iterator["Text"]:
    """A line for each setting that is legal and still likely a mistake."""
    return (plain_text(f"warning: {warning}", "yellow") for warning in warnings)


def plain_text(content: str, style: str = "") -> "Text":
    """Text that is not parsed as rich markup."""
    from rich.text import Text

    return Text(content, style=style)
