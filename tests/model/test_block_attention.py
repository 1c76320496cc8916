"""Mixture of block attention: which keys queries see, closed forms, and dense attention where all blocks are seen."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.model.attention_spec import FullAttention
from clustersim.model.kernels import KernelKind
from clustersim.model.layer_stack import LayerGroup, LayerSpec
from clustersim.model.layers import LayerOperators, transformer_layer
from clustersim.model.mixer import AttentionFlopConvention, Mixer
from clustersim.model.mixers.block_attention import BlockAttention
from clustersim.model.operators import LayerShard
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from tests.conftest import examples

HIDDEN, TOKENS, CHUNK, TOP_K = 1024, 4096, 512, 3
ATTENTION = FullAttention(heads=8, kv_heads=2, head_dim=128)
BLOCKS = BlockAttention(ATTENTION, CHUNK, TOP_K)


def _layer(mixer: Mixer, shard: LayerShard | None = None) -> LayerOperators:
    stack = (LayerGroup(LayerSpec(mixer, None), 1),)
    model = replace(load_preset("llama-tiny"), hidden=HIDDEN, stack=stack)
    return transformer_layer(model, stack[0].spec, Training(TOKENS, 1), shard or LayerShard(1, TOKENS, TOKENS))


def _flops(layer: LayerOperators, kind: KernelKind) -> float:
    operators = layer.operators
    return sum(k.flops for op in operators for k in (*op.forward, *op.input_gradient) if k.kind is kind)


def _seen_keys(sequence: int, chunk: int, topk: int) -> tuple[int, int]:
    """Keys that all queries attend to in their own block and in others, query by query."""
    own = sum(query % chunk + 1 for query in range(sequence))
    return own, sum(chunk * min(topk - 1, query // chunk) for query in range(sequence))


@given(sequence=st.integers(1, 3000), chunk=st.integers(1, 600), topk=st.integers(1, 6))
@examples(60)
def test_keys_are_those_of_the_own_block_and_of_the_selected_ones(sequence: int, chunk: int, topk: int) -> None:
    mixer = BlockAttention(ATTENTION, chunk, topk)
    own, others = _seen_keys(sequence, chunk, topk)
    assert mixer.own_keys(sequence) * sequence == pytest.approx(own)
    assert mixer.earlier_blocks(sequence) * sequence * chunk == pytest.approx(others)


@given(sequence=st.integers(1, 3000), chunk=st.integers(1, 600))
@examples(60)
def test_with_all_blocks_selected_every_key_before_a_query_is_seen(sequence: int, chunk: int) -> None:
    mixer = BlockAttention(ATTENTION, chunk, -(-sequence // chunk))
    seen = mixer.own_keys(sequence) + chunk * mixer.earlier_blocks(sequence)
    assert seen == pytest.approx((sequence + 1) / 2)
    gate = 2 * ATTENTION.query_width * mixer.earlier_blocks(sequence)
    dense = ATTENTION.mixing_flops(sequence, AttentionFlopConvention.CAUSAL)
    assert mixer.mixing_flops(sequence, AttentionFlopConvention.CAUSAL) == pytest.approx(dense + gate)


def test_gates_have_no_parameters() -> None:
    assert BLOCKS.parameter_count(HIDDEN, linear_bias=False) == ATTENTION.parameter_count(HIDDEN, linear_bias=False)
    assert _layer(BLOCKS).parameter_count == _layer(ATTENTION).parameter_count


def test_flash_attention_runs_over_seen_keys_alone() -> None:
    """Two products per width and key forward, five backward; 8 heads of 128."""
    layer, seen = _layer(BLOCKS), sum(_seen_keys(TOKENS, CHUNK, TOP_K))
    # copies are whole queries for each block and head
    assert _flops(layer, KernelKind.ATTENTION_FORWARD) == pytest.approx(4 * 8 * 128 * seen, rel=1e-3)
    assert _flops(layer, KernelKind.ATTENTION_BACKWARD) == pytest.approx(10 * 8 * 128 * seen, rel=1e-3)


def test_the_gate_scores_the_means_of_all_blocks_but_the_last() -> None:
    (gate,) = [op for op in _layer(BLOCKS).operators if op.name == "attention.gate"]
    assert sum(kernel.flops for kernel in gate.forward) == 2 * 8 * 128 * TOKENS * (TOKENS // CHUNK - 1)
    assert not gate.saves_for_backward


def test_saved_besides_attention_are_repeated_keys_and_copies() -> None:
    """Keys and values of 8 heads and their copies by head, copies of queries, and 8 bytes of where each belongs."""
    added = _layer(BLOCKS).saved_bytes - _layer(ATTENTION).saved_bytes
    copies = BLOCKS.earlier_blocks(TOKENS) * TOKENS * 8
    assert added == pytest.approx(2 * 2 * TOKENS * 2 * 8 * 128 + copies * (2 * 128 + 8))


def test_a_sequence_of_one_block_is_causal_attention() -> None:
    short = LayerShard(1, CHUNK, CHUNK)
    one, dense = _layer(BLOCKS, short), _layer(ATTENTION, short)
    assert [op.name for op in one.operators] == [op.name for op in dense.operators]
    for kind in (KernelKind.ATTENTION_FORWARD, KernelKind.MATMUL):
        assert _flops(one, kind) == pytest.approx(_flops(dense, kind))


def test_tensor_parallel_ranks_share_heads() -> None:
    whole, part = _layer(BLOCKS), _layer(BLOCKS, LayerShard(1, TOKENS, TOKENS, tp=2))
    for kind in (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD, KernelKind.MATMUL):
        assert _flops(whole, kind) == pytest.approx(2 * _flops(part, kind))
