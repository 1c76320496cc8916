"""Selection of the ranks to export, and their labels and order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.parallel.layout import Layout
from clustersim.report.export import rank_selection as module
from clustersim.report.export.rank_selection import (
    default_ranks,
    describe_trace_ranks,
    select_ranks_by_terms,
    validate_rank_selection,
)
from tests.conftest import examples
from tests.report.small_trace import simulated


@pytest.mark.parametrize(
    ("choice", "ranks"),
    [
        ("5", [5]),
        ("0:8", [*range(8)]),
        ("all", [*range(8)]),
        ("stage:1", [4, 5, 6, 7]),
        ("stage:0,6", [0, 1, 2, 3, 6]),
        (" 2 , 0:2 ,2", [0, 1, 2]),
        ("slowest:8", [*range(8)]),
    ],
)
def test_rank_selection_expressions(choice: str, ranks: list[int]) -> None:
    assert select_ranks_by_terms(simulated(), choice) == ranks


def test_slowest_selects_stragglers_by_kernel_time() -> None:
    slow = ["degradations.slow=[{gpu: 6, speed: 0.5}, {gpu: 1, speed: 0.8}]"]
    result = simulated(*slow)
    assert select_ranks_by_terms(result, "slowest:1") == [6]
    assert select_ranks_by_terms(result, "slowest:2") == [1, 6]
    assert [rank.name.startswith("slow") for rank in describe_trace_ranks(result, [0, 1, 6])] == [False, True, True]


@pytest.mark.parametrize(
    "choice",
    ["8", "0:9", "3:3", "5:2", "stage:2", "slowest:0", "slowest:9", "x", "0,,1", ",", "all:3", "-1", "1.5", "²"],
)
def test_invalid_rank_selections_are_rejected(choice: str) -> None:
    layout = Layout(tp=2, dp=2, pp=2)
    with pytest.raises(
        InputError, match=r"does not name ranks from 0 to 7; .*stage:1 .*0 to 1\), slowest:4 \(at most 8\)"
    ):
        validate_rank_selection(layout, choice)


@given(st.text(alphabet="0123456789:,alstgeow ", max_size=8))
@examples(200)
def test_any_text_is_a_selection_or_rejected(choice: str) -> None:
    try:
        validate_rank_selection(Layout(tp=2, dp=2, pp=2), choice)
    except InputError as error:
        assert choice in str(error)


def test_equivalent_rank_has_correct_id_and_coordinates() -> None:
    result = simulated()
    [rank] = describe_trace_ranks(result, [7])
    assert (rank.rank, rank.representative, rank.stage) == (7, 4, "stage 1")
    assert rank.coordinates == {"tp": 1, "cp": 0, "dp": 1, "pp": 1}
    assert rank.name == "rank 7 (tp 1, for 4 ranks)"
    assert [describe_trace_rank.name for describe_trace_rank in describe_trace_ranks(result, [4, 7])] == [
        "rank 4 (tp 0)",
        "rank 7 (tp 1)",
    ]


def test_default_ranks_above_the_limit_are_the_shown_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    result = simulated("cost.symmetry=off", "degradations.slow={gpu: 6, speed: 0.8}")
    assert default_ranks(result) == [*range(8)]
    monkeypatch.setattr(module, "MAX_RANKS", 7)
    assert len(default_ranks(result)) == 3
    assert [rank.rank for rank in describe_trace_ranks(result, default_ranks(result)) if "slow" in rank.name] == [6]


def test_ranks_are_ordered_by_replica_stage_and_id() -> None:
    keys = [
        (describe_trace_rank.replica_index, describe_trace_rank.stage, describe_trace_rank.rank)
        for describe_trace_rank in describe_trace_ranks(simulated(), range(8))
    ]
    assert keys == sorted(keys)
    assert {replica for replica, _, _ in keys} == {0, 1}
