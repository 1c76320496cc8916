"""Packed documents: work of ranks counted pair by pair, and laws against sequences that are one document."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.common.errors import ClusterSimError
from clustersim.model.documents import ContextSharding, Documents, PackedBatch, SequenceOrder
from clustersim.model.flops import model_flops
from clustersim.model.kernels import KernelKind
from clustersim.model.mixer import AttentionFlopConvention
from tests.laws.timelines import assert_same_trace

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=5).map(tuple)
WINDOWS = st.none() | st.integers(1, 70)


def scenario(documents: Any = "none", **layout: Any) -> Scenario:
    """A small model over 8 GPUs with sequences of 4,096 tokens."""
    model = {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 4096, "vocab": 32000}
    training = {"sequence": 4096, "global_batch": 16, "documents": documents}
    mapping = {"model": model, "cluster": {"name": "dgx-h100", "gpus": 8}, "layout": layout, "training": training}
    return Scenario.from_mapping(mapping)


def counted_work(batch: PackedBatch, window: int | None) -> np.ndarray:
    """Pairs of query and key of each sequence and rank, token by token: [sequences, ranks]."""
    begins = {0}
    for end in np.cumsum(batch.documents.draw(batch.sequence_count * batch.sequence)).tolist():
        begins.add(end)
    chunk = batch.sequence // (batch.ranks * (2 if batch.zigzag else 1))
    work, begin = np.zeros((batch.sequence_count, batch.ranks)), 0
    for token in range(batch.sequence_count * batch.sequence):
        if token in begins or token % batch.sequence == 0:
            begin = token
        position = token % batch.sequence // chunk
        rank = min(position, 2 * batch.ranks - 1 - position) if batch.zigzag else position
        pairs = token - begin + 1
        work[token // batch.sequence, rank] += pairs if window is None else min(pairs, window)
    return work


@given(
    lengths=LENGTHS,
    window=WINDOWS,
    ranks=st.sampled_from([1, 2, 4]),
    zigzag=st.booleans(),
    waits=st.booleans(),
    seed=st.integers(0, 100),
)
def test_busiest_ranks_counted_pair_by_pair(
    lengths: tuple[int, ...], window: int | None, ranks: int, zigzag: bool, waits: bool, seed: int
) -> None:
    """Two microbatches of two sequences on three replicas: maxima over ranks, then over replicas, as they wait."""
    batch = PackedBatch(Documents(lengths, seed=seed), 64, 3, 2, 2, ranks, zigzag, waits)
    work = counted_work(batch, window).reshape(2, 3, 2, ranks).sum(axis=2).max(axis=2)
    busiest = work.max(axis=1).sum() if waits else work.sum(axis=0).max()
    assert batch.keys(window).mean == pytest.approx(busiest / (2 * 2 * 64 / ranks))


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.integers(0, 100))
def test_sharing_documents_never_takes_longer_than_sharing_chunks(
    lengths: tuple[int, ...], ranks: int, seed: int
) -> None:
    by_sharding = {
        sharding: PackedBatch(Documents(lengths, seed=seed, sharding=sharding), 64, 2, 2, 1, ranks).keys(None).mean
        for sharding in ContextSharding
    }
    assert by_sharding[ContextSharding.DOCUMENT] <= by_sharding[ContextSharding.SEQUENCE] * (1 + 1e-12)


@given(st.floats(10, 500), st.floats(0, 2), st.integers(0, 1000))
def test_draws_have_enough_tokens_and_depend_on_the_seed_alone(mean: float, sigma: float, seed: int) -> None:
    documents = Documents((), mean, sigma, seed)
    lengths = documents.draw(5000)
    assert lengths.min() >= 1
    assert lengths.sum() >= 5000
    assert np.array_equal(lengths, documents.draw(5000))


def test_log_normal_lengths_have_their_mean() -> None:
    assert Documents((), 2000.0, 1.0, 0).draw(200_000_000).mean() == pytest.approx(2000, rel=0.02)


@pytest.mark.parametrize(
    "layout", [{}, {"data": "fsdp"}, {"cp": 2}, {"cp": 2, "cp_kind": "ulysses"}, {"pp": 2}, {"tp": 2, "cp": 4}], ids=str
)
def test_documents_as_long_as_sequences_are_none(layout: dict[str, Any]) -> None:
    packed, single = (simulate(scenario(documents, **layout)) for documents in ({"lengths": [4096]}, "none"))
    assert_same_trace(packed.trace, single.trace)


def attention_flops(built: Scenario) -> float:
    """FLOP of attention's core forward on one rank and microbatch."""
    operators = next(iter(build_plan(built).layer_by_spec.values())).operators
    kernels = (kernel for operator in operators for kernel in operator.forward)
    return sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.ATTENTION_FORWARD)


@pytest.mark.parametrize("convention", AttentionFlopConvention)
def test_documents_of_one_length_are_the_unpacked_batch(convention: AttentionFlopConvention) -> None:
    """Four documents of 1,024 tokens in each sequence: the FLOP of four times as many sequences of 1,024."""
    packed = scenario({"lengths": [1024]})
    unpacked = replace(packed.training, documents=None, sequence=1024, global_batch=64, microbatch=4)
    assert attention_flops(packed) == pytest.approx(attention_flops(replace(packed, training=unpacked)))
    assert model_flops(packed.model, packed.training, convention) == pytest.approx(
        model_flops(packed.model, unpacked, convention)
    )


def test_uneven_documents_cost_more_than_even_ones_of_as_many_tokens() -> None:
    even, uneven = ({"mean": 512, "sigma": sigma} for sigma in (0.0, 1.5))
    assert simulate(scenario(even)).step_time < simulate(scenario(uneven)).step_time < simulate(scenario()).step_time


def test_sequences_of_like_work_in_a_microbatch_wait_less() -> None:
    batches = [
        PackedBatch(Documents((), 300.0, 2.0, 1, order=order), 4096, 8, 8, 1, replicas_wait=True)
        for order in SequenceOrder
    ]
    drawn, sorted_by_work = (batch.keys(None).mean for batch in batches)
    assert sorted_by_work < drawn


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ({"sigma": 1}, "log-normal with a mean, or a list"),
        ({"mean": 100, "lengths": [10]}, "log-normal with a mean, or a list"),
        ({"lengths": [10], "sigma": 1}, "leave it out"),
        ({"mean": 0}, "too small"),
        ({"lengths": []}, "lengths"),
        ({"mean": 100, "sharding": "document s"}, "did you mean document"),
        ({"mean": 1}, "documents"),
    ],
)
def test_bad_documents_are_refused(documents: Any, words: str) -> None:
    mapping = scenario().to_mapping()
    mapping["training"] |= {"documents": documents, "global_batch": 4096}
    with pytest.raises(ClusterSimError, match=words):
        simulate(Scenario.from_mapping(mapping))
