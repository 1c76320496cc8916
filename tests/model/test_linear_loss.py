"""Losses that compute the logits themselves: matmuls, bytes, and memory against the losses that keep logits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.memory.activations import ActivationKind, Activations
from clustersim.model.kernels import KernelKind
from clustersim.model.layers import LayerShard, head_layer
from clustersim.model.linear_loss import chunk_tokens
from clustersim.model.presets import load_preset
from clustersim.model.training import LossImplementation, Training
from clustersim.model.transformer import resize_model
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from tests.conftest import examples

MODEL = load_preset("llama3-8b")
RECOMPUTING = LossImplementation.CHUNKED_NLL, LossImplementation.CUT_CROSS_ENTROPY


def head_flops(loss: LossImplementation, tokens: int, tp: int = 1) -> tuple[float, float]:
    """FLOP of the head's forward and backward matmuls."""
    head = head_layer(MODEL, Training(tokens, 1, loss=loss), LayerShard(1, tokens, tokens, tp=tp))
    forward = [kernel for operator in head.operators for kernel in operator.forward]
    backward = [kernel for op in head.operators for kernel in (*op.input_gradient, *op.weight_gradient)]
    matmul_flops = [sum(k.flops for k in kernels if k.kind is KernelKind.MATMUL) for kernels in (forward, backward)]
    return matmul_flops[0], matmul_flops[1]


@pytest.mark.parametrize("loss", RECOMPUTING)
@pytest.mark.parametrize(("tokens", "tp"), [(8192, 1), (1000, 1), (8192, 8)])
def test_backward_has_the_forward_matmul_once_more(loss: LossImplementation, tokens: int, tp: int) -> None:
    """2 T h V forward and three times that backward, in chunks of any size; other losses two times."""
    matmul = 2 * tokens * 4096 * 128256 / tp
    assert head_flops(loss, tokens, tp) == pytest.approx((matmul, 3 * matmul))
    for once in (LossImplementation.FUSED_LINEAR, LossImplementation.LIGER, LossImplementation.LIGER_FP32_SUM):
        assert head_flops(once, tokens, tp) == pytest.approx((matmul, 2 * matmul))


def test_every_chunk_reads_the_output_matrix() -> None:
    """8,192 tokens in chunks of 256: forward moves 32 matrices, the hidden states, and each chunk's logits once."""
    training = Training(8192, 1, loss=LossImplementation.CHUNKED_NLL)
    (operator,) = head_layer(MODEL, training, LayerShard(1, 8192, 8192)).operators[1:]
    matmuls = [kernel for kernel in operator.forward if kernel.kind is KernelKind.MATMUL]
    assert len(matmuls) == 32
    assert sum(kernel.bytes for kernel in matmuls) == 2 * (32 * 128256 * 4096 + 8192 * 4096 + 8192 * 128256)


@pytest.mark.parametrize(("tokens", "chunk"), [(8192, 256), (65536, 2048), (65537, 4096), (16, 1)])
def test_a_chunk_of_liger_is_a_power_of_two_of_tokens(tokens: int, chunk: int) -> None:
    """128,256 entries over 4,096 hidden units: 32 parts, each up to the next power of two."""
    assert chunk_tokens(LossImplementation.LIGER, tokens, hidden=4096, vocab_rows=128256) == chunk


def test_liger_until_0_8_0_converts_and_adds_the_gradient_of_each_chunk() -> None:
    """2 + 4 and 4 + 2 x 2 bytes for each weight and chunk; later releases read the sum: 2."""
    sums = []
    for loss in (LossImplementation.LIGER_FP32_SUM, LossImplementation.LIGER):
        training = Training(8192, 1, loss=loss)
        (operator,) = head_layer(MODEL, training, LayerShard(1, 8192, 8192)).operators[1:]
        sums.append(sum(kernel.bytes for kernel in operator.weight_gradient))
    assert sums[0] - sums[1] == 32 * (14 - 2) * 128256 * 4096


def test_cut_cross_entropy_writes_logits_in_backward_only() -> None:
    training = Training(8192, 1, loss=LossImplementation.CUT_CROSS_ENTROPY)
    (operator,) = head_layer(MODEL, training, LayerShard(1, 8192, 8192)).operators[1:]
    (forward,), (recomputed, _) = operator.forward, operator.input_gradient
    assert forward.bytes == 2 * (8192 * 4096 + 128256 * 4096)
    assert recomputed.bytes - forward.bytes == 2 * 8192 * 128256


def test_a_chunk_takes_what_trl_measured() -> None:
    """256 tokens, 248,320 entries, hidden 2,048 in bf16: 3.03 GB with the matrix, its gradient, and nothing else.

    huggingface/trl, release notes of v1.13.0, on one H100.
    """
    model = resize_model(MODEL, vocab=248320, hidden=2048)
    plan = Plan(model, Training(256, 1, loss=LossImplementation.CHUNKED_NLL), Layout())
    matrix = 2 * 248320 * 2048
    loss_bytes = Activations(plan).bytes_of(ActivationKind.LOSS_GRADIENT)
    assert loss_bytes + matrix == pytest.approx(3.03e9, rel=0.02)


def head_bytes(loss: LossImplementation, tokens: int, vocab: int) -> float:
    """What the head saves and the largest that its backward needs in addition."""
    model = resize_model(MODEL, vocab=vocab)
    activations = Activations(Plan(model, Training(tokens, 1, loss=loss), Layout()))
    sizes = [activations.bytes_of(kind) for kind in (ActivationKind.LOSS_GRADIENT, ActivationKind.CAST_GRADIENT)]
    matrix = activations.bytes_of(ActivationKind.HEAD_WEIGHT_GRADIENT)
    return activations.bytes_of(ActivationKind.HEAD_SAVED) + max(sizes[0], sizes[1] + matrix)


@examples(40)
@given(
    loss=st.sampled_from([*RECOMPUTING, LossImplementation.FUSED_LINEAR, LossImplementation.LIGER]),
    kept=st.sampled_from([loss for loss in LossImplementation if loss.value in ("torch", "torch_fp32", "fused")]),
    tokens=st.integers(4096, 1 << 17),
    vocab=st.integers(32000, 260000),
)
def test_a_loss_without_logits_never_needs_more_memory(
    loss: LossImplementation, kept: LossImplementation, tokens: int, vocab: int
) -> None:
    assert head_bytes(loss, tokens, vocab) <= head_bytes(kept, tokens, vocab)


def test_logits_no_longer_grow_with_the_vocabulary_times_the_tokens() -> None:
    """At a million tokens on 8 ranks: 131,072 x 151,936 logits of bf16 are 40 GB, of a recomputing loss under 4 GB."""
    assert 2 * 131072 * 151936 > 39e9
    for loss in RECOMPUTING:
        training = replace(Training(1 << 20, 1), loss=loss)
        plan = Plan(resize_model(MODEL, vocab=151936), training, Layout(cp=8))
        activations = Activations(plan)
        assert activations.bytes_of(ActivationKind.LOSS_GRADIENT) < 4e9
        assert activations.bytes_of(ActivationKind.HEAD_SAVED) == 2 * 2 * 131072 * 4096
