"""Layers with windows, block forms, norm and position variants, against hand-computed sums."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.roofline import attention_load
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model import layers
from clustersim.model.attention import (
    AttentionCore,
    attention_operators,
    causal_factor,
    flash_forward_flops,
    full_matrix_flops,
)
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.flops import token_flops
from clustersim.model.kernels import AttentionShape, KernelKind
from clustersim.model.layer_stack import BlockForm, DenseMlp, LayerSpec, MlpType
from clustersim.model.operators import LayerOperators, LayerShard
from clustersim.model.presets import load_preset
from clustersim.model.training import NONE_FUSED, AttentionBackend, LossImplementation, Training
from clustersim.model.transformer import (
    Norm,
    PositionEncoding,
    TransformerModel,
    embedding_parameter_count,
    layer_parameter_count,
    parameter_count,
    resize_model,
)
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan

LLAMA = load_preset("llama3-8b")
TRAINING = Training(sequence=8192, global_batch=2, microbatch=2)
HIDDEN, HEADS, KV, HEAD_DIM, FFN = 4096, 32, 8, 128, 14336


def first_layer(model: TransformerModel, training: Training = TRAINING, **sharding: int | bool) -> LayerOperators:
    shard = LayerShard(training.microbatch, training.sequence, training.sequence, **sharding)  # type: ignore[arg-type]
    return layers.transformer_layer(model, model.distinct_specs[0], training, shard)


def layer_flops(layer: LayerOperators) -> float:
    operator_passes = [
        (operator.forward, operator.input_gradient, operator.weight_gradient) for operator in layer.operators
    ]
    return sum(kernel.flops for passes in operator_passes for kernel_list in passes for kernel in kernel_list)


@given(st.integers(1, 40), st.integers(1, 60))
def test_the_flops_of_a_window_are_those_of_the_mask(keys: int, window: int) -> None:
    """Query i (from 1) sees min(i, window) keys; flash attention computes 4 head_dim FLOP for each."""
    shape = AttentionShape(3, keys, keys, heads=2, kv_heads=1, head_dim=16, causal=True, window=min(window, keys))
    visible_keys = sum(min(query, window) for query in range(1, keys + 1))
    assert causal_factor(shape) == pytest.approx(visible_keys / keys**2)
    assert flash_forward_flops(shape) == pytest.approx(4 * 3 * 2 * 16 * visible_keys)


@given(st.integers(0, 10_000))
def test_a_window_as_long_as_the_sequence_is_no_window(excess: int) -> None:
    long_window = resize_model(LLAMA, window=TRAINING.sequence + excess)
    assert first_layer(long_window) == first_layer(LLAMA)
    assert token_flops(long_window, TRAINING.sequence) == token_flops(LLAMA, TRAINING.sequence)


def test_a_narrower_window_has_fewer_flops_and_keeps_as_much() -> None:
    narrow = resize_model(LLAMA, window=1024)
    assert layer_flops(first_layer(narrow)) < layer_flops(first_layer(LLAMA))
    assert first_layer(narrow).saved_bytes == first_layer(LLAMA).saved_bytes
    standard = replace(TRAINING, attention=AttentionBackend.STANDARD)  # standard attention masks what it has computed
    assert layer_flops(first_layer(narrow, standard)) == layer_flops(first_layer(LLAMA, standard))
    # by the convention 12 x layers x width x keys for scores, here of 1,024 keys instead of 8,192
    saved = token_flops(LLAMA, 8192) - token_flops(narrow, 8192)
    assert saved == pytest.approx(12 * 32 * HIDDEN * (8192 - 1024))


def test_the_convention_counts_all_keys_of_a_window_for_every_query() -> None:
    """4 b q w heads head_dim forward, ten a quarter of that backward."""
    shape = AttentionShape(2, 512, 512, heads=4, kv_heads=4, head_dim=32, causal=True, window=100)
    (core,) = AttentionCore(
        shape, first_layer(LLAMA).operators[0].forward[0].dtype, dropout=False, fused=True
    ).flash_operators()
    counted = [full_matrix_flops(kernel, shape) for kernel in (*core.forward, *core.input_gradient)]
    assert counted == [pytest.approx(4 * 2 * 512 * 100 * 4 * 32), pytest.approx(10 * 2 * 512 * 100 * 4 * 32)]


@given(st.sampled_from([256, 1024, 4096]), st.sampled_from([8192, 32768]))
def test_a_windows_kernel_has_two_ragged_edges(window: int, keys: int) -> None:
    """Relative to its FLOP a windowed kernel is slower than a full one: half a tile is lost on each edge."""
    h100 = load_accelerator("h100-sxm-80gb")
    load = {}
    for layer_window in (None, window):
        shape = AttentionShape(1, keys, keys, 32, 8, 128, causal=True, window=layer_window)
        scores = flash_forward_flops(shape) / (4 * shape.head_dim)
        load[layer_window] = attention_load(h100, h100.efficiency.attention_forward, shape, scores)
    assert load[window] > load[None]


@pytest.mark.parametrize(("block", "norms"), [*zip(BlockForm, (2, 2, 4, 1, 2, 1), strict=True)])
def test_a_layers_parameters_by_hand(block: BlockForm, norms: int) -> None:
    matrices = 2 * HIDDEN * HEADS * HEAD_DIM + 2 * HIDDEN * KV * HEAD_DIM + 3 * HIDDEN * FFN
    model = resize_model(LLAMA, block=block)
    assert layer_parameter_count(model, model.distinct_specs[0]) == matrices + norms * HIDDEN
    assert first_layer(model).parameter_count == matrices + norms * HIDDEN


@pytest.mark.parametrize(
    ("form", "more"), [(QkNorm.PER_HEAD, 2 * HEAD_DIM), (QkNorm.ALL_HEADS, (HEADS + KV) * HEAD_DIM), (None, 0)]
)
def test_qk_norm_parameters_by_hand(form: QkNorm | None, more: int) -> None:
    model = resize_model(LLAMA, qk_norm=form)
    assert first_layer(model).parameter_count == first_layer(LLAMA).parameter_count + more
    assert layer_parameter_count(model, model.distinct_specs[0]) == first_layer(model).parameter_count
    rank_parameters = first_layer(model, tp=2).parameter_count - first_layer(LLAMA, tp=2).parameter_count
    assert rank_parameters == (
        more // 2 if form is QkNorm.ALL_HEADS else more
    )  # per-head norms are replicated on every rank


@pytest.mark.parametrize("block", [BlockForm.PARALLEL, BlockForm.PARALLEL_NORMS])
def test_a_parallel_block_has_the_flops_of_a_serial_one(block: BlockForm) -> None:
    assert layer_flops(first_layer(resize_model(LLAMA, block=block))) == layer_flops(first_layer(LLAMA))


def test_kept_bytes_of_block_forms_by_hand() -> None:
    """Elements per token in BF16: inputs of norms and matmuls, q, k, v, the core's result, gate, up, their product.

    A serial block keeps the inputs of two norms and their results; a parallel one of one norm; one with two norms
    the input once and two results; post-norm keeps what its matmuls read and what its norms read.
    """
    tokens, logarithms = 2 * 8192, 4 * HEADS
    core, mlp = HEADS * HEAD_DIM * 2 + 2 * KV * HEAD_DIM, 3 * FFN
    hidden_tensors = {
        BlockForm.PRE_NORM: 4,
        BlockForm.POST_NORM: 4,
        BlockForm.SANDWICH: 6,
        BlockForm.PARALLEL: 2,
        BlockForm.PARALLEL_NORMS: 3,
    }  # not parallel_fused, which only diffusion transformers have
    for block, tensors in hidden_tensors.items():
        per_token = 2 * (tensors * HIDDEN + core + mlp) + logarithms
        assert first_layer(resize_model(LLAMA, block=block)).saved_bytes == tokens * per_token


def test_partial_rotary_moves_its_fraction() -> None:
    names = [operator.name for operator in first_layer(resize_model(LLAMA, rotary_percent=0.0)).operators]
    assert "attention.rotary" not in names
    unfused = replace(TRAINING, fused=NONE_FUSED)
    full_rotary, half_rotary = (first_layer(resize_model(LLAMA, rotary_percent=share), unfused) for share in (1.0, 0.5))
    (full_operator,), (half_operator,) = (
        [item for item in sharded_layer.operators if item.name == "attention.rotary"]
        for sharded_layer in (full_rotary, half_rotary)
    )
    elements = 2 * 8192 * (HEADS + KV) * HEAD_DIM
    moved_bytes = [sum(kernel.bytes for kernel in element.forward) for element in (full_operator, half_operator)]
    assert moved_bytes == [
        2 * 10 * elements,
        2 * (10 * elements / 2 + 2 * elements),
    ]  # the rest is concatenated, in one copy
    assert first_layer(resize_model(LLAMA, rotary_percent=0.5)) == first_layer(
        LLAMA
    )  # fused kernels pass over full heads


def test_bloom_has_a_norm_after_its_embedding_and_no_table_of_positions() -> None:
    bloom = load_preset("bloom-176b")
    shard = LayerShard(1, 2048, 2048)
    training = Training(2048, 1)
    assert embedding_parameter_count(bloom) == 250880 * 14336 + 2 * 14336
    assert layers.embedding_layer(bloom, training, shard).parameter_count == embedding_parameter_count(bloom)
    kinds = {kernel.kind for operator in first_layer(bloom, training).operators for kernel in operator.forward}
    assert not kinds & {KernelKind.ROTARY, KernelKind.EMBEDDING}


def test_capped_logits_keep_their_tanh() -> None:
    capped = replace(LLAMA, final_logit_softcapping=True)
    shard, training = LayerShard(1, 1024, 1024, tp=2), Training(1024, 1, loss=LossImplementation.FUSED)
    extra_bytes = (
        layers.head_layer(capped, training, shard).saved_bytes - layers.head_layer(LLAMA, training, shard).saved_bytes
    )
    assert extra_bytes == 1024 * LLAMA.vocab / 2 * 2  # BF16
    standard = Training(1024, 1, attention=AttentionBackend.STANDARD)
    scores = (
        first_layer(resize_model(LLAMA, attn_logit_softcapping=True), standard).saved_bytes
        - first_layer(LLAMA, standard).saved_bytes
    )
    assert scores == 1024 * 1024 * HEADS * 2
    assert first_layer(resize_model(LLAMA, attn_logit_softcapping=True)) == first_layer(
        LLAMA
    )  # inside the flash kernel


def test_a_gpt_j_layer_by_hand() -> None:
    """GPT-J: 4 h^2 of attention, 8 h^2 + 5 h of a GELU MLP with biases, one LayerNorm of 2 h."""
    attention = FullAttention(16, 16, 256, qkv_bias=True)
    spec = LayerSpec(attention, DenseMlp(4 * 4096, MlpType.GELU), BlockForm.PARALLEL)
    model = replace(LLAMA, norm=Norm.LAYERNORM, positions=PositionEncoding.ALIBI, linear_bias=True)
    assert layer_parameter_count(model, spec) == 12 * 4096**2 + (3 + 1 + 4 + 1) * 4096 + 2 * 4096
    other_parameters = parameter_count(replace(model, stack=()))
    assert other_parameters == 2 * 128256 * 4096 + 2 * 4096


def test_the_logits_bias_is_a_parameter_of_the_head_tied_or_not() -> None:
    biased, shard = replace(LLAMA, head_bias=True), LayerShard(1, 1024, 1024, tp=2)
    training = Training(1024, 1)
    extra_parameters = (
        layers.head_layer(biased, training, shard).parameter_count
        - layers.head_layer(LLAMA, training, shard).parameter_count
    )
    assert extra_parameters == 128256 // 2
    tied = replace(biased, tied_embeddings=True)
    assert parameter_count(tied) == parameter_count(replace(LLAMA, tied_embeddings=True)) + 128256
    plan = Plan(tied, training, Layout())
    assert plan.tied_head.parameter_count == 4096 + 128256  # the final norm and the bias


@pytest.mark.parametrize(("head_dim", "copies"), [(64, 0), (120, 0), (125, 1), (12, 1)])
def test_flash_attention_pads_unsupported_head_dimensions(head_dim: int, copies: int) -> None:
    """Queries, keys, values and the result of 2 sequences of 512 tokens in bf16, each read and written once."""
    shape = AttentionShape(2, 512, 512, heads=4, kv_heads=2, head_dim=head_dim, causal=True)
    core = AttentionCore(shape, DType.BF16, dropout=False, fused=True)
    padding_operators = [
        attention_operator
        for attention_operator in attention_operators(core, AttentionBackend.FLASH)
        if attention_operator.name == "attention.padding"
    ]
    assert len(padding_operators) == copies
    for kernel in (
        kernel
        for padding_operator in padding_operators
        for kernel in (*padding_operator.forward, *padding_operator.input_gradient)
    ):
        assert kernel.bytes == 2 * 2 * 512 * head_dim * (4 + 2 + 2 + 4) * 2
        assert (kernel.flops, kernel.launches) == (0.0, 4)
    assert not any(
        operator.name == "attention.padding" for operator in attention_operators(core, AttentionBackend.STANDARD)
    )
