"""How does a user get numbers as columns? As a table: NumPy arrays by name, which pyarrow and pandas take over.

    table["seconds"]        an array, one entry a row
    table.schema["seconds"] its type, and what it is, with its unit
    table.to_arrow()        a pyarrow.Table, with those meanings as metadata of its fields
    table.to_pandas()       a pandas.DataFrame

Missing values are integers below 0, NaN and empty texts in the arrays; null and NA in the other two.
pyarrow and pandas need an extra: `pip install 'clustersim[table]'`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clustersim.common.errors import InputError

Values = NDArray[Any]
Columns = dict[str, Values]


class ColumnType(Enum):
    """Type of a column's values: int64, float64, or texts as objects."""

    INTEGER = "integer"
    NUMBER = "number"
    TEXT = "text"


class Column(NamedTuple):
    """A column: the type of its values and what they are, with their unit."""

    type: ColumnType
    meaning: str


Schema = Mapping[str, Column]
_NUMPY_TYPES: Final = {ColumnType.INTEGER: np.int64, ColumnType.NUMBER: np.float64, ColumnType.TEXT: object}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Table(Mapping[str, Values]):
    """Columns of one length, by name, in the order of the schema.

    schema: type and meaning of each column; columns: [rows] each, int64, float64 or texts as objects.
    """

    schema: Schema
    columns: Mapping[str, Values]

    @classmethod
    def from_rows(cls, schema: Schema, rows: Iterable[tuple[Any, ...]]) -> "Table":
        """A table of rows, each with a value for every column of the schema, in order."""
        listed = list(rows)
        columns = zip(*listed, strict=True) if listed else ([] for _ in schema)
        return cls(
            schema,
            {
                name: np.array(values, dtype=_NUMPY_TYPES[column.type])
                for (name, column), values in zip(schema.items(), columns, strict=True)
            },
        )

    @classmethod
    def concatenate(cls, schema: Schema, tables: Iterable[Columns]) -> "Table":
        """A table of the rows of at least one, one after the other."""
        listed = list(tables)
        return cls(schema, {name: np.concatenate([columns[name] for columns in listed]) for name in schema})

    def __getitem__(self, name: str) -> Values:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.schema)

    def __len__(self) -> int:
        """The number of columns, as of any mapping; rows: `row_count`."""
        return len(self.schema)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.row_count:,} rows: {', '.join(self)}>"

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values())))

    def to_arrow(self) -> Any:
        """A pyarrow.Table; texts are dictionary encoded. Raises InputError without pyarrow."""
        schema = arrow_schema(self.schema)
        batch = arrow_batch(schema, self.schema, self.columns)
        return import_table_library("pyarrow").Table.from_batches([batch], schema)

    def to_pandas(self) -> Any:
        """A pandas.DataFrame; integers are Int64, which has missing values. Raises InputError without pandas."""
        pandas = import_table_library("pandas")
        series: dict[str, Any] = {}
        for name, column in self.schema.items():
            values, missing = self.columns[name], is_missing(column, self.columns[name])
            match column.type:
                case ColumnType.INTEGER:
                    series[name] = pandas.arrays.IntegerArray(values.astype(np.int64), missing)
                case ColumnType.NUMBER:
                    series[name] = values
                case ColumnType.TEXT:
                    series[name] = values.copy()
                    series[name][missing] = None
        return pandas.DataFrame(series)


def is_missing(column: Column, values: Values) -> Values:
    """[n] where a column's value is missing."""
    match column.type:
        case ColumnType.INTEGER:
            return np.asarray(values < 0)
        case ColumnType.NUMBER:
            return np.asarray(np.isnan(values))
        case ColumnType.TEXT:
            return np.asarray(values == "")


def arrow_schema(schema: Schema) -> Any:
    """The schema for pyarrow, with the meanings as metadata of the fields. Raises InputError without pyarrow."""
    arrow = import_table_library("pyarrow")
    types = {
        ColumnType.INTEGER: arrow.int64(),
        ColumnType.NUMBER: arrow.float64(),
        ColumnType.TEXT: arrow.dictionary(arrow.int32(), arrow.string()),
    }
    return arrow.schema(
        arrow.field(name, types[column.type], metadata={"meaning": column.meaning}) for name, column in schema.items()
    )


def arrow_batch(schema: Any, columns: Schema, values: Mapping[str, Values]) -> Any:
    """A pyarrow.RecordBatch of columns; its texts have a dictionary of their own. schema: `arrow_schema(columns)`."""
    arrow, arrays = import_table_library("pyarrow"), []
    for field in schema:
        column, array = columns[field.name], values[field.name]
        is_text = column.type is ColumnType.TEXT
        encoded = arrow.array(array, arrow.string() if is_text else field.type, mask=is_missing(column, array))
        arrays.append(encoded.dictionary_encode() if is_text else encoded)
    return arrow.record_batch(arrays, schema=schema)


def import_table_library(name: str) -> Any:
    """The module pyarrow or pandas; raises InputError that names the extra where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(f"this table needs {name}: pip install 'clustersim[table]'") from error
