"""Stage placements: textbook formulas of the loop, neighbours, and invalid placements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.program.placement import Placement, looped_placement

SIZES = st.integers(1, 6)


@given(SIZES, st.integers(1, 4))
def test_a_looped_placement_assigns_stages_round_robin(ranks: int, chunks: int) -> None:
    """Stage s is on rank s mod p, as its chunk s // p."""
    placement = looped_placement(ranks, chunks)
    assert placement.pipeline_size == ranks
    assert placement.max_chunks == chunks
    for stage in range(ranks * chunks):
        assert placement.stage_ranks[stage] == stage % ranks
        assert placement.chunk_index(stage) == stage // ranks
    assert [placement.stages_on_rank(rank) for rank in range(ranks)] == [
        tuple(range(rank, ranks * chunks, ranks)) for rank in range(ranks)
    ]


@given(SIZES)
def test_a_v_shaped_placement(ranks: int) -> None:
    """Rank r holds r and 2p - 1 - r; the middle stages hand on within their rank."""
    placement = Placement((*range(ranks), *reversed(range(ranks))))
    assert [placement.stages_on_rank(rank) for rank in range(ranks)] == [
        (rank, 2 * ranks - 1 - rank) for rank in range(ranks)
    ]
    assert placement.direction(ranks - 1, ranks) == placement.direction(ranks, ranks - 1) == 0
    assert [placement.chunk_index(stage) for stage in range(2 * ranks)] == [0] * ranks + [1] * ranks


@given(st.lists(st.sampled_from([-1, 0, 1]), max_size=12), st.integers(1, 5))
def test_gradients_go_in_the_opposite_direction_of_activations(steps: list[int], ranks: int) -> None:
    rank, holders = 0, [*range(ranks)]
    rank = ranks - 1
    for step in steps:
        rank = (rank + step) % ranks
        holders.append(rank)
    placement = Placement(tuple(holders))
    for stage in range(len(holders) - 1):
        assert placement.direction(stage, stage + 1) == -placement.direction(stage + 1, stage)
        source, target = holders[stage], holders[stage + 1]
        assert (source == target) == (placement.direction(stage, stage + 1) == 0)
        if source != target:
            assert (source, target) in placement.edges(placement.direction(stage, stage + 1))


def test_consecutive_stages_on_one_rank_are_chunks() -> None:
    placement = Placement((0, 0, 1, 1, 0))
    assert [placement.chunk_index(stage) for stage in range(5)] == [0, 1, 0, 1, 2]
    assert placement.max_chunks == 3


def test_consecutive_stages_must_be_on_neighbours() -> None:
    with pytest.raises(InputError, match=r"stages 1 and 2.*pipeline ranks 1 and 3.*neighbours"):
        Placement((0, 1, 3, 2, 4))


def test_every_rank_must_hold_a_stage() -> None:
    with pytest.raises(InputError, match="every pipeline rank from 0 to 2 must hold a stage"):
        Placement((0, 2, 0))
