"""Dispatched bytes in the explorer's tables, against counts by hand."""

from functools import cache
from typing import Any

import pytest

from clustersim.planning.explorer.explorer_data import build_exploration_tables
from clustersim.results.explorer_tables import LookupTable
from clustersim.scenario import Scenario
from tests.planning.explorer_scenarios import few_choices

HIDDEN, ELEMENT_BYTES = 128, 2


@cache
def send_table() -> LookupTable:
    """For eight experts, two per token."""
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
        sends = build_exploration_tables(scenario).tables.sends
    assert sends is not None
    return sends


def token_bytes(dispatcher: str, ep: int, etp: int) -> dict[str, Any] | None:
    """Bytes of one token."""
    return send_table().lookup({"precision": 0, "dispatcher": dispatcher, "ep": ep, "etp": etp})  # type: ignore[no-any-return]


def test_alltoall_sends_a_token_to_each_of_its_experts() -> None:
    """Two copies of each token are spread evenly over eight ranks."""
    entry = token_bytes("alltoall", 8, 1)
    assert entry == {"ranks": [HIDDEN * ELEMENT_BYTES * 2 / 8] * 8, "all": False, "nodes": None}


def test_allgather_sends_all_tokens_to_all_ranks() -> None:
    entry = token_bytes("allgather", 2, 2)
    assert entry == {"ranks": [HIDDEN * ELEMENT_BYTES] * 2, "all": True, "nodes": None}


def test_deepep_sends_a_token_once_to_each_rank_and_node() -> None:
    """Of 28 pairs of eight experts 21 exclude a given one, 6 exclude a given four, and none excludes all eight."""
    entry = token_bytes("deepep", 8, 1)
    assert entry is not None
    assert entry["ranks"] == pytest.approx([HIDDEN * ELEMENT_BYTES * (1 - 21 / 28)] * 8)
    assert entry["nodes"][4] == pytest.approx([HIDDEN * ELEMENT_BYTES * (1 - 6 / 28)] * 2)
    assert entry["nodes"][8] == pytest.approx([HIDDEN * ELEMENT_BYTES])


def test_nothing_is_sent_if_every_rank_has_all_experts() -> None:
    assert token_bytes("alltoall", 1, 1) is None
