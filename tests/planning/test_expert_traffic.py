"""What the explorer's page says of a dispatch is what can be counted by hand."""

from functools import cache
from typing import Any

import pytest

from clustersim.planning.explorer.explorer_data import build_exploration_tables
from clustersim.results.explorer_tables import LookupTable
from clustersim.scenario import Scenario
from tests.planning.explorer_scenarios import few_choices

HIDDEN, WIDTH = 128, 2


@cache
def table() -> LookupTable:
    """Of eight experts, two for each token."""
    experts = {"count": 8, "top_k": 2, "ffn": 256}
    scenario = Scenario.from_mapping(
        {
            "model": {"preset": "llama-tiny", "hidden": HIDDEN, "experts": experts},
            "cluster": {"name": "dgx-h100", "gpus": 16},
            "layout": {"dp": 16, "ep": 8},
            "training": {"sequence": 128, "global_batch": 16},
        }
    )
    with few_choices():
        found = build_exploration_tables(scenario).tables.sends
    assert found is not None
    return found


def sends(dispatcher: str, ep: int, etp: int) -> dict[str, Any] | None:
    """Bytes of one token."""
    return table().lookup({"precision": 0, "dispatcher": dispatcher, "ep": ep, "etp": etp})  # type: ignore[no-any-return]


def test_a_row_goes_to_each_expert_of_a_token() -> None:
    """Two rows of each token are spread evenly over eight ranks."""
    found = sends("alltoall", 8, 1)
    assert found == {"ranks": [HIDDEN * WIDTH * 2 / 8] * 8, "all": False, "nodes": None}


def test_all_ranks_gather_all_tokens() -> None:
    found = sends("allgather", 2, 2)
    assert found == {"ranks": [HIDDEN * WIDTH] * 2, "all": True, "nodes": None}


def test_kernels_send_a_token_once_to_each_rank_and_node() -> None:
    """Of 28 pairs of eight experts 21 are without a given one, 6 are among four others, and none is among none."""
    found = sends("deepep", 8, 1)
    assert found is not None
    assert found["ranks"] == pytest.approx([HIDDEN * WIDTH * (1 - 21 / 28)] * 8)
    assert found["nodes"][4] == pytest.approx([HIDDEN * WIDTH * (1 - 6 / 28)] * 2)
    assert found["nodes"][8] == pytest.approx([HIDDEN * WIDTH])


def test_nothing_is_sent_where_each_rank_has_all_experts() -> None:
    assert sends("alltoall", 1, 1) is None
