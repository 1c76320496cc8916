"""CSV tables of measurements as users provide them."""

import csv
from collections.abc import Mapping
from pathlib import Path


def write_table(path: Path, *rows: Mapping[str, str]) -> Path:
    """A CSV file with the columns of all rows."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path
