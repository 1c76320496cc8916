"""Tables of named columns: mapping access, and round trips through pyarrow and pandas with missing values."""

import sys
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from clustersim.common.errors import InputError
from clustersim.common.table import Column, ColumnType, Table

SCHEMA = {
    "index": Column(ColumnType.INTEGER, "some index"),
    "seconds": Column(ColumnType.NUMBER, "seconds of it"),
    "name": Column(ColumnType.TEXT, "its name"),
}
INSTALL = "is not installed: pip install 'clustersim[table]'"
Rows = Sequence[tuple[int, float, str]]
ROWS = st.lists(
    st.tuples(
        st.integers(-1, 2**62),
        st.floats(allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=3),
    ),
    max_size=5,
)


def present(rows: Rows) -> list[list[object]]:
    """The columns, with None for missing values."""
    return [
        [None if index < 0 else index for index, _, _ in rows],
        [None if np.isnan(seconds) else seconds for _, seconds, _ in rows],
        [name or None for _, _, name in rows],
    ]


def test_columns_are_arrays_by_name() -> None:
    table = Table.from_rows(SCHEMA, [(3, 0.5, "a"), (-1, np.nan, "")])
    assert (list(table), len(table), table.row_count) == (["index", "seconds", "name"], 3, 2)
    assert [table[name].dtype for name in table] == [np.int64, np.float64, object]
    assert dict(table)["name"].tolist() == ["a", ""]
    assert repr(table) == "<Table of 2 rows: index, seconds, name>"
    assert "nothing" not in table
    twice = Table.concatenate(SCHEMA, [dict(table), dict(table)])
    assert twice["name"].tolist() == ["a", "", "a", ""]


@given(ROWS)
def test_arrow_round_trip(rows: Rows) -> None:
    pytest.importorskip("pyarrow", reason=f"pyarrow {INSTALL}")
    arrow = Table.from_rows(SCHEMA, rows).to_arrow()
    assert [arrow.column(name).to_pylist() for name in SCHEMA] == present(rows)
    assert [field.metadata[b"meaning"].decode() for field in arrow.schema] == [each.meaning for each in SCHEMA.values()]


@given(ROWS)
def test_pandas_round_trip(rows: Rows) -> None:
    pandas = pytest.importorskip("pandas", reason=f"pandas {INSTALL}")
    frame = Table.from_rows(SCHEMA, rows).to_pandas()
    assert list(frame) == list(SCHEMA)
    columns = [[None if pandas.isna(value) else value for value in frame[name].tolist()] for name in SCHEMA]
    assert columns == present(rows)
    assert (str(frame["index"].dtype), str(frame["seconds"].dtype)) == ("Int64", "float64")


@pytest.mark.parametrize(("library", "method"), [("pyarrow", "to_arrow"), ("pandas", "to_pandas")])
def test_missing_library_names_the_extra(library: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"{library}.*pip install .clustersim\[table\]"):
        getattr(Table.from_rows(SCHEMA, []), method)()
