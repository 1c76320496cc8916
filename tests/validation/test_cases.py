"""Validation tables as users provide them, valid and invalid."""

from pathlib import Path

import pytest

from clustersim.common.errors import InputError
from clustersim.validation.cases import CannotPredictError, read_cases
from tests.validation.sample_cases import step_case, step_row, write_rows


def test_cells_are_read_by_column(tmp_path: Path) -> None:
    cases = read_cases(write_rows(tmp_path / "t.csv", step_row(), step_row(tp=" 4 ", notes="")), ["tp"])
    assert [validation_case.positive_int("tp") for validation_case in cases] == [2, 4]
    assert [item.line_number for item in cases] == [2, 3]
    assert cases[0].text("no such column") == ""


def test_spreadsheet_csv_is_read(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends, a cell with a comma."""
    path = tmp_path / "t.csv"
    path.write_bytes('\ufeffcase_id,notes\r\n"a","b, c"\r\n'.encode())
    assert read_cases(path, ["case_id"])[0].text("notes") == "b, c"


def test_a_changed_table_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for value in ("1", "2"):
        path.write_text(f"case_id,tp\na,{value}\n")
        cases = read_cases(path, ["tp"])
        assert [item.text("tp") for item in cases] == [value]
        cases.clear()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "missing column case_id"),
        (b"case_id\n", "no rows"),
        (b"name\nx\n", "missing column case_id; it has name"),
        (b"case_id\nx,y\n", "line 2 has more cells"),
        (b'case_id\n"x\n', "is not a CSV table"),
        (bytes(range(256)), "not UTF-8 text"),
    ],
)
def test_an_unreadable_table_is_rejected_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"t\.csv") as refused:
        read_cases(path, ["case_id"])
    assert message in str(refused.value)


def test_a_missing_file_and_a_directory_are_rejected(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_cases(path, [])


@pytest.mark.parametrize("text", ["abc", "nan", "-inf", "-1", "0"])
def test_non_positive_numbers_are_rejected_with_their_line(text: str) -> None:
    with pytest.raises(CannotPredictError, match=rf"line 2: step_time_s '{text}' is not a number above 0") as refused:
        step_case(step_time_s=text).positive_float("step_time_s")
    assert not refused.value.is_expressible


@pytest.mark.parametrize("text", ["inf", "1e300", "1e-320"])
def test_out_of_range_numbers_are_rejected(text: str) -> None:
    with pytest.raises(CannotPredictError, match=rf"step_time_s '{text}' is not within 1e-18 to 1e\+18"):
        step_case(step_time_s=text).positive_float("step_time_s")


def test_integers_may_have_defaults_and_fractions_are_rejected() -> None:
    with pytest.raises(CannotPredictError, match=r"tp '2\.5' is not a whole number"):
        step_case(tp="2.5").positive_int("tp")
    with pytest.raises(CannotPredictError, match="tp is not stated"):
        step_case(tp="").positive_int("tp")
    assert step_case(tp="").positive_int("tp", 1) == 1
