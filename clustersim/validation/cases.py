"""Which cases are there? Tables of measurements, one CSV row each, as shipped or as a user brings them.

The columns are those of the shipped tables (`published/README.md`). An empty cell means that the source does not state
the value, never zero. A table that lacks a needed column is refused as a whole; a row that cannot be read or predicted
is skipped with the reason, so that one bad row does not cost the others.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clustersim.common.errors import InputError, format_value

MAX_VALUE: Final = 1e18  # beyond which no count, size or time is; and below its inverse
_TableRow = dict[str | Any, str | Any]
PUBLISHED_FOLDER: Final = Path(__file__).with_name("published")


class CannotPredictError(Exception):
    """Why a row has no prediction. owed: whether there should be one, since the row itself is complete and legal."""

    def __init__(self, reason: str, *, is_expressible: bool = True) -> None:
        super().__init__(reason)
        self.is_expressible = is_expressible


@dataclass(frozen=True, slots=True)
class ValidationCase:
    """One row of a table, by column; line: its number in the file."""

    cells: dict[str, str]
    line_number: int

    def text(self, column: str) -> str:
        """The cell, empty if the source does not state it or the table has no such column."""
        return self.cells.get(column, "")

    def boolean(self, column: str, default: bool = False) -> bool:
        """Whether the cell says yes; the default where it says nothing; raise CannotPredictError for other words."""
        text = self.text(column)
        if text not in ("", "yes", "no"):
            raise CannotPredictError(self._describe_invalid(column, text, "yes or no"), is_expressible=False)
        return text == "yes" if text else default

    def positive_float(self, column: str, default: float | None = None) -> float:
        """A number above zero; raise CannotPredictError if it is none, or missing without a default."""
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
        """A whole number above zero; raise CannotPredictError if it is none, or missing without a default."""
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
    """The rows of a table; raise InputError that names the file and what it lacks."""
    columns, rows = _read_csv(path)
    missing = missing_columns(columns, required_columns)
    if missing:
        raise InputError(
            f"{path}: lacks {'column' if len(missing) == 1 else 'columns'} {', '.join(missing)}; it has "
            f"{', '.join(columns) or 'none'}"
        )
    if not rows:
        raise InputError(f"{path}: has no rows below its header")
    return [_parse_case(path, line, row) for line, row in rows]


def read_columns(path: Path) -> Sequence[str]:
    """What a table's header names; raise InputError that names the file where it is none."""
    return _read_csv(path)[0]


def missing_columns(columns: Sequence[str], required: Sequence[str]) -> list[str]:
    """What is needed and not among the columns."""
    return [column for column in required if column not in columns]


def _read_csv(path: Path) -> tuple[Sequence[str], list[tuple[int, _TableRow]]]:
    """Columns, and rows with their numbers in the file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines, strict=True)
            columns = reader.fieldnames or ()
            return columns, [(reader.line_num, row) for row in reader]
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read (not UTF-8 text)") from error
    except csv.Error as error:
        raise InputError(f"{path}: is not a CSV table ({error})") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _parse_case(path: Path, line_number: int, row: _TableRow) -> ValidationCase:
    if None in row:
        raise InputError(f"{path}: line {line_number} has more cells than the header has columns")
    return ValidationCase({str(column): str(cell or "").strip() for column, cell in row.items()}, line_number)
