"""Partition of layers over virtual stages."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.parallel.layer_partition import build_stages, partition_evenly
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.placement import looped_placement

SIZES = st.tuples(st.integers(1, 200), st.integers(1, 200))


@given(SIZES)
def test_partitions_sum_to_the_layer_count(sizes: tuple[int, int]) -> None:
    layers, count = sizes
    assert sum(partition_evenly(layers, count)) == layers
    assert len(partition_evenly(layers, count)) == count


@given(SIZES)
def test_stages_differ_by_one_layer_at_most(sizes: tuple[int, int]) -> None:
    counts = partition_evenly(*sizes)
    assert 0 <= max(counts) - min(counts) <= 1


@given(SIZES)
def test_stages_with_fewer_layers_are_at_the_ends(sizes: tuple[int, int]) -> None:
    """The ends also hold embedding and logits; logits cost more, so the end has at least as many light stages."""
    counts = partition_evenly(*sizes)
    max_layers = max(counts)
    light = [index for index, layers in enumerate(counts) if layers < max_layers]
    front = sum(index < len(counts) / 2 for index in light)
    heavy = [index for index, layers in enumerate(counts) if layers == max_layers]
    assert heavy == list(range(heavy[0], heavy[-1] + 1))
    assert len(light) // 2 == front or len(counts) % 2


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (96, 8, (12,) * 8),
        (126, 16, (7, *(8,) * 14, 7)),  # Llama 3, section 3.3.2: one layer less on the first and the last stage
        (126, 128, (0, *(1,) * 126, 0)),  # Interleaved(8) on 16 ranks: the ends hold only embedding and logits
        (31, 4, (8, 8, 8, 7)),
        (30, 4, (7, 8, 8, 7)),
        (1, 1, (1,)),
    ],
)
def test_reference_partitions(layers: int, count: int, expected: tuple[int, ...]) -> None:
    assert partition_evenly(layers, count) == expected


def test_embedding_and_head_are_on_the_ends() -> None:
    first, *middle, last = build_stages(load_preset("llama3-8b").stack, (2, 2, 2, 1))
    assert (first.has_embedding, first.has_head) == (True, False)
    assert (last.has_embedding, last.has_head) == (False, True)
    assert not any(stage.has_embedding or stage.has_head for stage in middle)
    (single,) = build_stages(load_preset("llama3-8b").stack, (3,))
    assert single.has_embedding
    assert single.has_head


def test_virtual_stages_are_assigned_round_robin() -> None:
    """Rank r of p holds stages r, r + p, r + 2p, ... (torch.distributed.pipelining, Megatron's interleaving)."""
    plan = Plan(load_preset("llama3-8b"), Training(1024, 8), Layout(pp=4), partial(looped_placement, chunks_per_rank=2))
    assert [[stage.index for stage in plan.stages_on_rank(rank)] for rank in range(4)] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert sum(stage.layer_count for rank in range(4) for stage in plan.stages_on_rank(rank)) == 32


def test_a_plan_uses_explicit_layers_per_stage() -> None:
    layers_per_stage = (9, 8, 8, 7)
    plan = Plan(load_preset("llama3-8b"), Training(1024, 8), Layout(pp=4, layers_per_stage=layers_per_stage))
    assert tuple(stage.layer_count for stage in plan.stages) == layers_per_stage
