"""DeepSeek's sparse attention: closed forms of parameters, FLOP and saved activations; what ranks send."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.memory.layer_gradients import activation_gradient_bytes
from clustersim.model.attention_spec import LatentAttention
from clustersim.model.documents import Documents, PackedBatch
from clustersim.model.flops import token_flops
from clustersim.model.kernels import Kernel, KernelKind, SparseAttentionShape, SparseRoutine
from clustersim.model.layer_stack import LayerGroup, LayerSpec
from clustersim.model.layers import LayerOperators, embedding_layer, head_layer, transformer_layer
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.model.operators import DENSE, INDEXER, LayerShard, ShardAxis, TpCombine
from clustersim.model.presets import load_preset
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.training import Training
from clustersim.model.transformer import TransformerModel, layer_parameter_count, parameter_count
from tests.conftest import examples

HIDDEN, TOKENS, TOP_K = 1024, 4096, 512
LATENT = LatentAttention(32, 384, 128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
SPARSE = DeepseekSparseAttention(LATENT, index_heads=16, index_head_dim=64, index_topk=TOP_K)
INDEX_WIDTH = 16 * 64
INDEX_MATRICES = 384 * INDEX_WIDTH + HIDDEN * 64 + HIDDEN * 16


def _model(mixer: LatentAttention | DeepseekSparseAttention) -> TransformerModel:
    stack = (LayerGroup(LayerSpec(mixer, None), 1),)
    return replace(load_preset("llama-tiny"), hidden=HIDDEN, stack=stack, linear_bias=False)


def _layer(
    mixer: LatentAttention | DeepseekSparseAttention = SPARSE, shard: LayerShard | None = None
) -> LayerOperators:
    model = _model(mixer)
    return transformer_layer(model, model.stack[0].spec, Training(TOKENS, 1), shard or LayerShard(1, TOKENS, TOKENS))


def _kernels(layer: LayerOperators, routine: SparseRoutine) -> dict[bool, float]:
    """FLOP of a routine, forward and backward."""
    flops = {False: 0.0, True: 0.0}
    for kernel in (kernel for op in layer.operators for kernel in (*op.forward, *op.input_gradient)):
        if isinstance(kernel.shape, SparseAttentionShape) and kernel.shape.routine is routine:
            flops[kernel.shape.backward] += kernel.flops
    return flops


def _matmuls(layer: LayerOperators) -> list[Kernel]:
    return [
        kernel
        for op in layer.operators
        for kernel in (*op.forward, *op.input_gradient, *op.weight_gradient)
        if kernel.kind is KernelKind.MATMUL
    ]


def test_parameters_are_those_of_latent_attention_and_of_the_indexer() -> None:
    added = INDEX_MATRICES + 2 * 64  # and the LayerNorm of its keys
    counts = [mixer.parameter_count(HIDDEN, linear_bias=False) for mixer in (LATENT, SPARSE)]
    assert counts[1] - counts[0] == added
    assert _layer().parameter_count == counts[1] + HIDDEN
    model = _model(SPARSE)
    assert _layer().parameters_by_group == {DENSE: layer_parameter_count(model, model.stack[0].spec)}


def test_deepseek_v3_2_is_deepseek_v3_with_an_indexer_in_each_layer() -> None:
    """64 heads of 128 from latent vectors of 1,536, one key of 128 with its norm, a weight per head (config.json)."""
    indexer = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64
    counts = [parameter_count(load_preset(name)) for name in ("deepseek-v3", "deepseek-v3.2")]
    assert counts[1] - counts[0] == 61 * indexer


def test_matmuls_are_six_flop_per_weight_but_for_the_indexers_input_gradients() -> None:
    expected = 6.0 * TOKENS * SPARSE.matrix_elements(HIDDEN) - 2.0 * TOKENS * INDEX_MATRICES
    assert sum(kernel.flops for kernel in _matmuls(_layer())) == expected


@pytest.mark.parametrize("sequence", [64, TOP_K, 4096])
def test_model_flops_are_those_of_the_keys_that_each_query_sees(sequence: int) -> None:
    """Twelve per query width of 32 heads; 2 per index width for each key scored, 4 for each gradient, by query."""
    before = [query + 1 for query in range(sequence)]
    selected = [min(TOP_K, keys) for keys in before]
    width = 32 * (96 + 64) / 2
    causal = sum(
        12 * width * few + INDEX_WIDTH * (2 * every + 4 * few) for every, few in zip(before, selected, strict=True)
    )
    assert SPARSE.mixing_flops(sequence, AttentionFlopConvention.CAUSAL) == pytest.approx(causal / sequence)
    most = min(TOP_K, sequence)
    full = 12 * width * most + INDEX_WIDTH * (2 * sequence + 4 * most)
    assert SPARSE.mixing_flops(sequence, AttentionFlopConvention.FULL) == pytest.approx(full)


@given(sequence=st.integers(1, TOP_K), convention=st.sampled_from(AttentionFlopConvention))
@examples(30)
def test_where_all_keys_are_selected_attention_is_that_of_all_keys(
    sequence: int, convention: AttentionFlopConvention
) -> None:
    indexer = replace(SPARSE, index_heads=0)
    dense = LATENT.mixing_flops(sequence, convention)
    assert indexer.mixing_flops(sequence, convention) == pytest.approx(dense)


def test_kernels_compute_selected_keys_in_the_latent_space() -> None:
    """Heads share one key of 128 + 32 and one value of 128; kernels have blocks of 64 heads forward, of 16 backward."""
    layer = _layer()
    core = _kernels(layer, SparseRoutine.SPARSE_MLA)
    assert core[False] == 2 * TOKENS * TOP_K * 64 * (160 + 128)
    assert core[True] == 2 * TOKENS * TOP_K * 32 * (3 * 160 + 2 * 128)
    scores = _kernels(layer, SparseRoutine.LIGHTNING_INDEXER)
    assert scores[False] == 2 * INDEX_WIDTH * TOKENS * (TOKENS + 1) / 2
    assert scores[True] == 6 * INDEX_WIDTH * TOKENS * TOP_K  # scores again, gradients of queries and of keys
    assert _kernels(layer, SparseRoutine.INDEXER_LOSS)[False] == 2 * TOKENS * TOP_K * 32 * 160


SAVED = (  # bytes of BF16 per token, FP32: 4
    2 * 1024  # the norm's input
    + 2 * 1024  # that of the down projections, and of the indexer's of keys and weights
    + 2 * (384 + 384)  # latent queries before their norm, and behind it
    + 2 * 128  # latent keys before their norm
    + 2 * 64  # the indexer's keys before their norm
    + 2 * (INDEX_WIDTH + 64) + 4 * 16  # its queries, keys and weights
    + 2 * 32 * 96  # queries before the absorption
    + 2 * 33 * 160  # queries and the key, as attention reads them
    + (4 + 4) * TOP_K  # indices, and the gradients of their scores
    + 4 * 32  # a statistic per head
    + 2 * 32 * 128  # the output in the latent space
    + 2 * 32 * 64  # and behind the values' up projection
)  # fmt: skip


def test_saved_activations_are_what_backward_reads() -> None:
    assert _layer().saved_bytes == TOKENS * SAVED


def test_scores_of_a_block_of_queries_are_in_memory_at_once() -> None:
    (scores,) = [op for op in _layer().operators if op.name == "indexer.scores"]
    assert scores.temporary_bytes == 4096 * TOKENS * 4
    longer = _layer(shard=LayerShard(1, 32768, 32768)).operators
    assert [op.temporary_bytes for op in longer if op.name == "indexer.scores"] == [8192 * 32768 * 4]


def test_a_layer_needs_its_scores_besides_what_it_saved() -> None:
    """No linear layer that frees its input is before them: the output projection's input and gradient are as large."""
    layer = _layer(shard=LayerShard(1, 32768, 32768))
    assert activation_gradient_bytes(layer, 2) == 8192 * 32768 * 4 + layer.input_bytes


def test_tensor_parallel_ranks_share_attention_and_repeat_the_indexer() -> None:
    whole, part = _layer(), _layer(shard=LayerShard(1, TOKENS, TOKENS, tp=2))
    for routine, ranks in ((SparseRoutine.LIGHTNING_INDEXER, 1), (SparseRoutine.SPARSE_MLA, 2)):
        backward = [_kernels(layer, routine)[True] for layer in (whole, part)]
        assert backward[0] == ranks * backward[1]
    replicated = INDEX_MATRICES + 2 * 64 + HIDDEN * (384 + 128 + 32) + 384 + 128 + HIDDEN
    assert 2 * part.parameter_count - whole.parameter_count == replicated


def test_ranks_sum_what_their_heads_attend_to_and_gather_the_indexers_inputs() -> None:
    """[tokens, top-k] in FP32; under sequence parallelism the layer's input and the latent queries of all tokens."""
    plain, sequence_parallel = (
        _layer(shard=LayerShard(1, TOKENS, TOKENS, tp=4, sequence_parallel=parallel)) for parallel in (False, True)
    )
    sums = (TpCombine.SUM, TOKENS * TOP_K * 4.0)
    gathers = [(TpCombine.GATHER, TOKENS * HIDDEN * 2.0), (TpCombine.GATHER, TOKENS * 384 * 2.0)]
    found = [
        [(one.combine, one.full_bytes) for op in layer.operators for one in op.tp_collectives.after_forward]
        for layer in (plain, sequence_parallel)
    ]
    assert found == [[sums], [*gathers, sums]]
    saved = {op.name: op.saved_bytes for op in sequence_parallel.operators}
    assert saved["indexer.key"] == TOKENS * HIDDEN * 2
    assert saved["indexer.query"] == TOKENS * 384 * 2


def test_one_rank_sends_nothing() -> None:
    assert not any(op.tp_collectives.after_forward for op in _layer().operators)


def test_context_parallel_ranks_gather_keys_and_scatter_their_gradients() -> None:
    """Keys of 64 of the indexer and latent ones of 160, of all tokens; queries are the rank's own."""
    whole, part = _layer(), _layer(shard=LayerShard(1, TOKENS // 4, TOKENS))
    for routine in (SparseRoutine.LIGHTNING_INDEXER, SparseRoutine.SPARSE_MLA, SparseRoutine.INDEXER_LOSS):
        for backward in (False, True):
            assert _kernels(whole, routine)[backward] == 4 * _kernels(part, routine)[backward]
    sizes = {"index keys": TOKENS * 64 * 2.0, "latent keys": TOKENS * 160 * 2.0}
    for collectives, combine in (("after_forward", TpCombine.GATHER), ("before_backward", TpCombine.SUM_SCATTER)):
        found = [one for op in part.operators for one in getattr(op.tp_collectives, collectives)]
        assert {one.tensor_name: one.full_bytes for one in found} == sizes
        assert {(one.combine, one.axis) for one in found} == {(combine, ShardAxis.CONTEXT)}
    keys = (64 + 160) * 2  # which every rank saves
    assert 4 * part.saved_bytes == TOKENS * (SAVED + 3 * keys)


def test_the_rank_with_the_last_tokens_scores_most_keys() -> None:
    """Of four ranks with consecutive tokens: 3/4 to all of the keys come before a query, (7/8 S + 1/2) on average."""
    last = _layer(shard=LayerShard(1, TOKENS // 4, TOKENS, consecutive=True))
    mean = 7 / 8 * TOKENS + 1 / 2
    assert _kernels(last, SparseRoutine.LIGHTNING_INDEXER)[False] == pytest.approx(2 * INDEX_WIDTH * TOKENS / 4 * mean)


def test_packed_documents_are_scored_and_selected_apart() -> None:
    """Documents of 256 tokens: 128.5 keys before a query on average, and 256 of which all are selected."""
    batch = PackedBatch(Documents(lengths=(256,)), TOKENS, 1, 1, 1)
    packed, single = _layer(shard=LayerShard(1, TOKENS, TOKENS, packed_batch=batch)), _layer()
    scores = [_kernels(layer, SparseRoutine.LIGHTNING_INDEXER)[False] for layer in (packed, single)]
    assert scores[0] == pytest.approx(scores[1] * (256 + 1) / (TOKENS + 1))
    core = [_kernels(layer, SparseRoutine.SPARSE_MLA)[False] for layer in (packed, single)]
    assert core[0] == pytest.approx(core[1] * 256 / TOP_K)


WARM_UP = replace(SPARSE, warms_up=True)


def test_in_the_warm_up_gradients_pass_the_indexer_alone() -> None:
    """Forward of latent attention is as it is; weight gradients are those of the indexer's three matrices."""
    layer, dense = _layer(WARM_UP), _layer(LATENT)
    forward = [kernel for op in layer.operators for kernel in op.forward]
    assert set(forward) >= {kernel for op in dense.operators for kernel in op.forward}
    backward = {op.name for op in layer.operators if op.saves_for_backward}
    assert backward == {op.name for op in layer.operators if op.name.startswith("indexer.")}
    assert {op.name for op in layer.operators if op.forward_only} == {op.name for op in layer.operators} - backward
    matmuls = [kernel for op in layer.operators for kernel in op.weight_gradient if kernel.kind is KernelKind.MATMUL]
    assert sum(kernel.flops for kernel in matmuls) == 2.0 * TOKENS * INDEX_MATRICES
    trained = sum(op.gradient_count for op in layer.operators)
    assert trained == INDEX_MATRICES + 2 * 64 == layer.parameters_by_group[INDEXER]


def test_in_the_warm_up_the_indexer_learns_from_all_keys() -> None:
    """Scores and their three products of each pair of query and key, and what 32 heads of 96 attend to, twice."""
    layer, pairs = _layer(WARM_UP), TOKENS * (TOKENS + 1) / 2
    scores = _kernels(layer, SparseRoutine.LIGHTNING_INDEXER)
    assert (scores[False], scores[True]) == (2 * INDEX_WIDTH * pairs, 6 * INDEX_WIDTH * pairs)
    loss = _kernels(layer, SparseRoutine.INDEXER_LOSS)
    assert loss[False] == loss[True] == 2 * 32 * 96 * pairs
    assert _kernels(layer, SparseRoutine.SPARSE_MLA) == {False: 0.0, True: 0.0}


def test_model_flops_of_the_warm_up_are_forward_ones_and_the_indexers() -> None:
    """Two per weight and token; of the indexer six; a third of dense attention, and six per index width and key."""
    model = _model(WARM_UP)
    matrices = LATENT.matrix_elements(HIDDEN) + model.vocab * HIDDEN
    attention = LATENT.mixing_flops(TOKENS, AttentionFlopConvention.FULL) / 3
    expected = 2 * matrices + 6 * INDEX_MATRICES + attention + 6 * INDEX_WIDTH * TOKENS
    assert token_flops(model, TOKENS) == pytest.approx(expected)


def test_the_ends_of_the_model_have_no_gradient_in_the_warm_up() -> None:
    model = _model(WARM_UP)
    for build in (embedding_layer, head_layer):
        unit = build(model, Training(TOKENS, 1), LayerShard(1, TOKENS, TOKENS))
        assert unit.saved_bytes == 0
        assert not any(op.saves_for_backward or op.gradient_count for op in unit.operators)
