"""Schedules from CSV: what is read, what is refused, and the reported position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.schedules.csv_format import format_order, parse_csv
from clustersim.schedules.csv_schedule import CsvSchedule, csv_schedule
from clustersim.schedules.registry import SCHEDULE_NAMES, build_schedule
from tests.conftest import examples
from tests.sentences import parts

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def read_csv_schedule(text: str, stages: list[int] | None = None) -> CsvSchedule:
    return csv_schedule("my.csv", parse_csv(text, "my.csv"), stages)


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(1, 3))
@examples(60)
def test_built_in_orders_survive_csv_with_their_placement(name: str, ranks: int, rounds: int) -> None:
    built_in, microbatches = build_schedule(name), 2 * ranks * rounds  # V schedules need as many microbatches as stages
    csv_read = read_csv_schedule(format_order(built_in.order(ranks, microbatches)))
    assert csv_read.order(ranks, microbatches) == built_in.order(ranks, microbatches)
    assert csv_read.placement(ranks).stage_ranks == built_in.placement(ranks).stage_ranks
    assert read_csv_schedule("\n".join(csv_read.csv_lines), list(csv_read.stage_placement.stage_ranks)) == csv_read


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "my.csv, row 1 has neither 0B1 nor 0I1 and 0W1"),
        ("0F0,0I0\n1F0,1B0\n", "my.csv, row 1 has no 0W0"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", "my.csv, row 2 has no 1F1"),
        ("0F0,,0B0,0F0\n1F0,1B0\n", "my.csv, row 1, cell 4: 0F0 runs a second time"),
        ("0F0,,0B0\n1B0,1F0\n", "my.csv, row 2, cell 1: 1B0 runs before 1F0"),
        (
            "0F0,,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
            "my.csv deadlocks: my.csv, row 1, cell 3 (0B0) waits for 1B0 ... my.csv, row 2, cell 1 (1F1) waits for 0F1",
        ),
        ("0F0,0B0\n1F0,,7F0,1B0\n", "my.csv, row 2, cell 3: stage 7 ... no row has stage 2 ... from 0 ..."),
        ("0F0,0B0\n,0F0,1B0\n", "my.csv, row 2, cell 2: 0F0 ... stage 0, which row 1 has (cell 1) ..."),
        ("0F0,0B0\n1F0,1X0\n", "my.csv, row 2, cell 2: '1X0' ... stage, F, B, I or W, and microbatch, such as '0F0'"),
        ("0F0,0B0\n\n1F0,1B0\n", "my.csv, row 2 has no actions ..."),
        ("\n", "my.csv has no rows ... such as 0F0,0B0"),
        (
            "0F0,0B0\n2F0,2B0\n1F0,1B0\n3F0,3B0\n",
            "my.csv: placement (0, 2, 1, 3): stages 0 and 1 ... pipeline ranks 0 and 2 ... neighbours",
        ),
        ('"0F0', "my.csv ..."),
    ],
)
def test_violations_are_reported_with_row_and_cell(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        read_csv_schedule(text)
    assert parts(sentence).fullmatch(str(refused.value))


def test_a_deadlock_of_many_ranks_names_the_first_ones() -> None:
    lines = [f"{stage}F1,{stage}F0,{stage}B1,{stage}B0" for stage in range(1, 6)]
    with pytest.raises(InputError, match=r"^my.csv deadlocks: my.csv, row 1.*row 3, .*; and 3 others wait$"):
        read_csv_schedule("\n".join(["0F0,0B0,0F1,0B1", *lines]))


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ([1, 0], "my.csv, row 1, cell 1: 0F0 is not of this rank's stages 1"),
        ([0, 1, 1, 0], "my.csv, row 1 has no 3F0"),
        ([0, 1, 2], "my.csv has 2 rows, but its placement is on 3 pipeline ranks"),
        ([0, 2], r"my\.csv: placement \(0, 2\):.*0 to 2.*stage"),
    ],
)
def test_an_explicit_placement_must_match_the_rows(stages: list[int], sentence: str) -> None:
    assert read_csv_schedule(GOOD, [0, 1]) == read_csv_schedule(GOOD)
    with pytest.raises(InputError, match=sentence):
        read_csv_schedule(GOOD, stages)


def test_a_csv_schedule_is_only_for_its_ranks_and_microbatches() -> None:
    csv_read = read_csv_schedule(GOOD)
    with pytest.raises(InputError, match=r"^my.csv has 2 rows, .* but layout.pp is 4$"):
        csv_read.placement(4)
    with pytest.raises(
        InputError,
        match=r"^my\.csv is for 2 microbatches.*3: training\.global_batch.*2 x dp x",
    ):
        csv_read.order(2, 3)
