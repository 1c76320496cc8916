"""Which cases are there? Reader of validation tables, packaged or a user's: one measurement per CSV row.

The columns are those of the packaged tables (`published/README.md`). An empty cell means that the source
does not state the value, never zero. A table that lacks a required column is rejected; a row that cannot be
parsed or predicted is skipped with a reason, and the other rows are still used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from clustersim.common.errors import InputError, format_value
from clustersim.common.input_files import parse_table, quote_cell, read_text

MAX_VALUE: Final = 1e18  # largest valid count, size or time; its inverse is the smallest
PUBLISHED_FOLDER: Final = Path(__file__).with_name("published")


class CannotPredictError(Exception):
    """Why a case has no prediction.

    is_expressible: whether a scenario can express the case, which counts it against coverage: the row is
    complete and valid, and only the simulator's models fall short. False where the row is incomplete or
    invalid, or the case is out of scope.
    """

    def __init__(self, reason: str, *, is_expressible: bool = True) -> None:
        super().__init__(reason)
        self.is_expressible = is_expressible


@dataclass(frozen=True, slots=True)
class ValidationCase:
    """One row of a validation table. cells: text by column; line_number: its line in the file."""

    cells: dict[str, str]
    line_number: int

    def text(self, column: str) -> str:
        """The text of a cell; empty if the source does not state it or the table has no such column."""
        return self.cells.get(column, "")

    def boolean(self, column: str, default: bool = False) -> bool:
        """A yes/no cell as a boolean; the default if it is empty. Raises CannotPredictError for any other text."""
        text = self.text(column)
        if text not in ("", "yes", "no"):
            raise CannotPredictError(self._describe_invalid(column, text, "yes or no"), is_expressible=False)
        return text == "yes" if text else default

    def positive_float(self, column: str, default: float | None = None) -> float:
        """A positive number; raises CannotPredictError if the cell is not one, or is empty and there is no default."""
        text = self.text(column)
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if value > MAX_VALUE or 0.0 < value < 1.0 / MAX_VALUE:
            raise CannotPredictError(
                self._describe_invalid(column, text, f"within {1 / MAX_VALUE:g} to {MAX_VALUE:g}"), is_expressible=False
            )
        if not value > 0.0:  # nor NaN
            raise CannotPredictError(self._describe_invalid(column, text, "a number above 0"), is_expressible=False)
        return value

    def positive_int(self, column: str, default: int | None = None) -> int:
        """A positive integer; raises CannotPredictError if the cell is not one, or is empty and there is no default."""
        value = self.positive_float(column, default)
        if value != int(value):
            raise CannotPredictError(
                self._describe_invalid(column, self.text(column), "a whole number"), is_expressible=False
            )
        return int(value)

    def _describe_invalid(self, column: str, text: str, expected: str) -> str:
        problem = f"{format_value(text)} is not {expected}" if text else "is not stated"
        return f"line {self.line_number}: {column} {problem}"


def read_cases(path: Path, required_columns: Sequence[str]) -> list[ValidationCase]:
    """Read the rows of a table; raises InputError that names the file and its missing columns."""
    text = read_text(path, encoding="utf-8-sig", any_digits=True)
    columns, rows = _parse_csv(path, text)
    missing = missing_columns(columns, required_columns)
    if missing:
        listed = [column if column in required_columns else quote_cell(column, "a-z_").strip("'") for column in columns]
        raise InputError(
            f"{path}: missing {'column' if len(missing) == 1 else 'columns'} {', '.join(missing)}; it has "
            f"{', '.join(listed) or 'none'}"
        )
    if not rows:
        raise InputError(f"{path}: has no rows below its header")
    return list(_parse_cases(path, text))


def read_columns(path: Path) -> Sequence[str]:
    """The column names in a table's header; raises InputError that names the file if it cannot be read."""
    return _parse_csv(path, read_text(path, encoding="utf-8-sig", any_digits=True))[0]


def missing_columns(columns: Sequence[str], required: Sequence[str]) -> list[str]:
    """The required columns that a table does not have."""
    return [column for column in required if column not in columns]


@lru_cache(maxsize=8)
def _parse_csv(path: Path, text: str) -> tuple[Sequence[str], Sequence[tuple[int, dict[str, str]]]]:
    """The columns, and the rows with their line numbers."""
    try:
        return parse_table(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


@lru_cache(maxsize=8)
def _parse_cases(path: Path, text: str) -> Sequence[ValidationCase]:
    """The rows as cases; cached by the text, since the same tables are read for many purposes."""
    return tuple(
        ValidationCase({column: cell.strip() for column, cell in row.items()}, line)
        for line, row in _parse_csv(path, text)[1]
    )
