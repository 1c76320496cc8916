"""Actions and orders as text (CSV)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.program.action import Action, ActionKind, OverlappedPair
from clustersim.schedules.csv_format import format_order, parse_action, parse_csv
from tests.schedules.pipeline_orders import parse_order

ACTIONS = st.builds(Action, st.integers(0, 999), st.sampled_from(ActionKind), st.integers(0, 9999))


@given(ACTIONS)
def test_an_action_survives_its_text_form(action: Action) -> None:
    assert parse_action(str(action)) == action


@pytest.fixture(scope="module")
def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


@given(action=ACTIONS)
def test_torch_parses_and_prints_the_same_text(torch_schedules: Any, action: Action) -> None:
    torch_action = torch_schedules._Action.from_str(str(action))
    assert (torch_action.stage_index, torch_action.computation_type.value, torch_action.microbatch_index) == (
        action.stage,
        action.kind.value,
        action.microbatch,
    )
    assert str(torch_action) == str(action)


def test_empty_cells_and_blanks_are_idle_steps() -> None:
    assert parse_order("\ufeff0F0, ,0B0\r\n,1F0,1B0,\n") == parse_order("0F0,0B0\n1F0,1B0\n")


def test_communication_actions_of_torch_are_ignored() -> None:
    """Torch's `compute_comms` form, and a reduction that its GPipe ends with."""
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert parse_order(text) == parse_order("0F0,0B0\n1F0,1B0\n")


def test_positions_are_those_of_the_file() -> None:
    parsed = parse_csv("0F0,,0B0\n1UNSHARD,(1F0;1B0)OVERLAP_F_B,,1W0\n\n", "my.csv")
    assert len(parsed.order) == 2
    assert [parsed.entry_label(*position) for position in ((0, 0), (0, 1), (1, 0), (1, 1))] == [
        "my.csv, row 1, cell 1", "my.csv, row 1, cell 3", "my.csv, row 2, cell 2", "my.csv, row 2, cell 4",
    ]  # fmt: skip


def test_a_pair_is_one_step() -> None:
    ((pair,),) = parse_order("(0F3;3B1)OVERLAP_F_B\n")
    assert pair == OverlappedPair(Action(0, ActionKind.FORWARD, 3), Action(3, ActionKind.BACKWARD, 1))
    assert format_order(((pair,),)) == "(0F3;3B1)OVERLAP_F_B\n"


@pytest.mark.parametrize("text", ["(0B0;1B0)OVERLAP_F_B", "(0F0;1I0)OVERLAP_F_B", "(1B0;0F0)OVERLAP_F_B"])
def test_a_pair_is_a_forward_and_a_full_backward(text: str) -> None:
    with pytest.raises(InputError, match=r"is no pair.*'\(0F3;3B1\)"):
        parse_order(text + "\n")


def test_an_idle_rank_keeps_its_row() -> None:
    order = parse_order("0F0,0B0\n,,\n")
    assert [len(actions) for actions in order] == [2, 0]


@pytest.mark.parametrize(
    "text",
    ["0X3", "F0", "0F", "0F0F", "-1F0", "0f0", "0F0;1F0", "0SEND_X0", "0F9999999999", "(0F0;1B)OVERLAP_F_B"],
)
def test_invalid_actions_are_reported_with_their_position(text: str) -> None:
    with pytest.raises(InputError, match=r"^mine.csv, row 2, cell 3: .* such as '0F0'$"):
        parse_order(f"0F0\n0F1,,{text}\n", "mine.csv")


def test_the_notation_of_torch_2_5_is_named() -> None:
    with pytest.raises(InputError, match=r"^mine.csv, row 1, cell 2: '0BW0' is PyTorch 2.5's notation; .* B, not BW"):
        parse_order("0F0,0BW0\n", "mine.csv")


def test_the_text_form_of_one_rank() -> None:
    order = ((Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0)),)
    assert format_order(order) == "0F0,0B0\n"
