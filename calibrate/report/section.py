"""What is a section of a report, before it is printed, drawn or written as JSON?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Content = Mapping[str, Any] | list[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A table, and the same as plain data in SI units.

    key: in JSON; lead: an introductory sentence; text_columns: indices of columns that hold text, not quantities.
    """

    key: str
    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    content: Content
    lead: str = ""
    text_columns: tuple[int, ...] = ()
