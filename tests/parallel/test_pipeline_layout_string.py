"""Megatron-LM's pipeline layout strings: accepted and refused strings, and that an even one is the even split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.parallel.layer_partition import (
    AccountForEnds,
    EndRankLayers,
    PipelineLayoutString,
    partition_evenly,
    partition_layers,
)
from clustersim.parallel.pipeline_layout_string import parse_pipeline_layout
from clustersim.program.placement import Placement, looped_placement


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("EtL", (1,)),
        ("Et|tL", (1, 1)),
        ("E|t*4|L", (0, 4, 0)),
        ("Et*3|(tt|)*29L", (3, *[2] * 29, 0)),
        ("Et*3|(tt|)*29,L", (3, *[2] * 29, 0)),  # commas are ignored
        ("E t t | (t|t*2|)*2 L", (2, 1, 2, 1, 2, 0)),
        ("E(t|t)*2|tL", (1, 2, 1, 1)),  # a group may end within a stage
        ("Ett|t|*2ttL", (2, 1, 0, 2)),  # as in Megatron-LM, the bar is repeated, too
    ],
)
def test_valid_layout_strings(text: str, counts: tuple[int, ...]) -> None:
    assert parse_pipeline_layout(text) == PipelineLayoutString(counts, (0,) * len(counts))


@pytest.mark.parametrize(
    ("text", "at", "mtp_layers"),
    [("Et*3|(tt|)*29m|L", 30, 1), ("Et|(tt|)*30mL", 31, 1), ("EtmmL", 0, 2), ("Et|tm*3|L", 1, 3)],
)
def test_mtp_layers_are_on_one_stage(text: str, at: int, mtp_layers: int) -> None:
    layout = parse_pipeline_layout(text)
    assert layout.mtp_layer_counts == tuple(mtp_layers * (stage == at) for stage in range(len(layout.layer_counts)))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Etm|tt|tL", "m comes behind all t, and all m on one stage"),
        ("Et|tm|mL", "m comes behind all t, and all m on one stage"),
        ("Et|x|L", "'x' stands for nothing; E .* are known"),
        ("t|EtL", "the embedding, E, comes first and once"),
        ("Et|EtL", "the embedding, E, comes first and once"),
        ("Et|t", "the loss, L, comes last and once"),
        ("EtL|t", "the loss, L, comes last and once"),
        ("|Et|tL", "a stage before the embedding or after the loss holds nothing"),
        ("Et|tL|", "a stage before the embedding or after the loss holds nothing"),
        ("Et|(tt|L", r"a '\(' without its '\)'"),
        ("Et|tt|)*3L", r"a '\)' without its '\('"),
        ("Et|(tt|)L", r"'\(' repeats nothing"),
        ("Et|t*L", r"'\*' repeats nothing"),
        ("Et3|tL", "'3' repeats nothing"),
        ("Et*999999999999|L", "is more than 100,000 letters"),
        ("E((((t*999)*999)*999)*999)*999L", "is more than 100,000 letters"),
        ("", "the embedding, E, comes first"),
    ],
)
def test_invalid_layout_strings_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        parse_pipeline_layout(text)


@given(st.integers(1, 20), st.integers(1, 8))
def test_a_string_of_the_even_split_equals_it(stages: int, layers_per_stage: int) -> None:
    body = "|".join(["t" * layers_per_stage] * stages)
    assert parse_pipeline_layout(f"E{body}L").layer_counts == partition_evenly(stages * layers_per_stage, stages)
    assert parse_pipeline_layout(f"E(t*{layers_per_stage}|)*{stages}L").layer_counts[:-1] == partition_evenly(
        stages * layers_per_stage, stages
    )


@given(st.integers(1, 16), st.integers(1, 4), st.booleans(), st.booleans())
def test_accounting_for_ends_replaces_layers_by_embedding_and_head(
    pp: int, chunks: int, embedding: bool, head: bool
) -> None:
    """Every stage has as many slots; embedding and logits fill one each."""
    placement, layers = looped_placement(pp, chunks), 3 * pp * chunks - embedding - head
    counts = partition_layers(AccountForEnds(embedding, head), layers, placement)
    slots = list(counts)
    slots[0] += embedding
    slots[-1] += head
    assert slots == [3] * (pp * chunks)


@given(st.integers(2, 12), st.integers(1, 3), st.integers(0, 3), st.integers(0, 3))
def test_first_and_last_rank_have_explicit_layer_counts(pp: int, chunks: int, first: int, last: int) -> None:
    """Chunks of a rank have equal layer counts, as have all other ranks."""
    layers = chunks * (first + last + 2 * (pp - 2))
    placement = looped_placement(pp, chunks)
    counts = partition_layers(EndRankLayers(chunks * first, chunks * last), layers, placement)
    shares = [[counts[stage] for stage in placement.stages_on_rank(rank)] for rank in range(pp)]
    assert shares == [[first] * chunks, *[[2] * chunks] * (pp - 2), [last] * chunks]


def test_partition_rules_apply_per_rank_for_any_placement() -> None:
    v_shape = Placement((0, 1, 2, 2, 1, 0))
    assert partition_layers(EndRankLayers(first=2), 10, v_shape) == (1, 2, 2, 2, 2, 1)
    assert partition_layers(AccountForEnds(head=True), 11, v_shape) == (2, 2, 2, 2, 2, 1)


@pytest.mark.parametrize(
    ("rule", "layers", "sentence"),
    [
        (AccountForEnds(embedding=True), 32, r"32 layers.*33 slots.*4 stages do not divide"),
        (EndRankLayers(first=7), 32, r"7 on rank 0 leave 25 of 32 layers.*3 other pipeline ranks"),
        (EndRankLayers(first=40, last=1), 32, "40 on rank 0 and 1 on rank 3 are more than the 32 layers"),
    ],
)
def test_unsatisfiable_partition_rules_are_refused(
    rule: AccountForEnds | EndRankLayers, layers: int, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        partition_layers(rule, layers, looped_placement(4))


def test_with_two_ranks_the_end_counts_must_sum_to_all_layers() -> None:
    with pytest.raises(InputError, match=r"3 on rank 0 and 4 on rank 1 leave 1 of 8 layers.*no other"):
        partition_layers(EndRankLayers(first=3, last=4), 8, looped_placement(2))


def test_layer_counts_not_divisible_into_chunks_are_refused() -> None:
    with pytest.raises(InputError, match="do not divide into 2 chunks each"):
        partition_layers(EndRankLayers(first=3, last=1), 8, looped_placement(4, 2))
