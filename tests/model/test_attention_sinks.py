"""Attention with sinks: one learned score of each head, and what it costs, by hand.

Two sequences of 512 tokens, 8 heads of 64 with 2 heads of keys, in bf16.
"""

from dataclasses import replace

import pytest

from clustersim.model import layers
from clustersim.model.layer_stack import MlpType
from clustersim.model.operators import LayerOperators, LayerShard, Operator
from clustersim.model.presets import load_preset
from clustersim.model.training import AttentionBackend, Training
from clustersim.model.transformer import (
    Norm,
    PositionEncoding,
    layer_parameter_count,
    parameter_count,
    resize_model,
    uniform_model,
)

TOKENS, BATCH, HEADS, HEAD, KV = 512, 2, 8, 64, 2
PLAIN = uniform_model(
    name="small", layers=2, hidden=512, ffn=1024, heads=HEADS, kv_heads=KV, head_dim=HEAD, vocab=256,
    max_positions=TOKENS, mlp=MlpType.SWIGLU, norm=Norm.RMSNORM, positions=PositionEncoding.ROTARY, tied_embeddings=False,
    linear_bias=False,
)  # fmt: skip
SINKS = resize_model(PLAIN, sinks=True)


def made(*, sinks: bool, attention: AttentionBackend = AttentionBackend.FLASH, tp: int = 1) -> LayerOperators:
    model = SINKS if sinks else PLAIN
    training = Training(TOKENS, BATCH, microbatch=BATCH, attention=attention)
    return layers.transformer_layer(model, model.stack[0].spec, training, LayerShard(BATCH, TOKENS, TOKENS, tp=tp))


def core(layer: LayerOperators) -> Operator:
    (found,) = (operator for operator in layer.operators if operator.name == "attention.core")
    return found


def test_every_head_has_one() -> None:
    assert parameter_count(SINKS) - parameter_count(PLAIN) == 2 * HEADS
    assert (
        parameter_count(load_preset("gpt-oss-20b"))
        - parameter_count(resize_model(load_preset("gpt-oss-20b"), sinks=False))
        == 24 * 64
    )


@pytest.mark.parametrize("attention", [AttentionBackend.FLASH, AttentionBackend.STANDARD])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_have_those_of_their_heads(attention: AttentionBackend, tp: int) -> None:
    with_sinks, without = (made(sinks=item, attention=attention, tp=tp).parameter_count for item in (True, False))
    assert tp * (with_sinks - without) == HEADS
    assert made(sinks=True, attention=attention).parameter_count == layer_parameter_count(SINKS, SINKS.stack[0].spec)


def test_flash_attention_computes_and_keeps_what_it_did() -> None:
    """Forward reads 2 bytes of each head; backward reads and writes them, and 8 bytes more of each query and head."""
    with_sinks, without = made(sinks=True), made(sinks=False)
    mine, other = core(with_sinks), core(without)
    (forward,), (backward,) = mine.forward, mine.input_gradient
    (plain,), (back,) = other.forward, other.input_gradient
    assert (forward.flops, backward.flops) == (plain.flops, back.flops)
    assert (forward.shape, backward.shape) == (plain.shape, back.shape), "one measured kernel tells of both"
    assert forward.bytes - plain.bytes == 2 * HEADS
    assert backward.bytes - back.bytes == 2 * (2 * HEADS + 4 * BATCH * TOKENS * HEADS)
    assert with_sinks.saved_bytes == without.saved_bytes


def test_standard_attention_copies_the_scores_behind_which_they_are() -> None:
    """2 bytes read and written for each score and sink, both ways; the softmax is not fused."""
    training = Training(TOKENS, BATCH, microbatch=BATCH, attention=AttentionBackend.STANDARD)
    unfused = replace(training, fused=False)
    shard = LayerShard(BATCH, TOKENS, TOKENS)
    (sink,) = (
        operator
        for operator in made(sinks=True, attention=AttentionBackend.STANDARD).operators
        if operator.name == "attention.sink"
    )
    (forward,), (backward,) = sink.forward, sink.input_gradient
    assert forward.bytes == backward.bytes == 2 * 2 * BATCH * HEADS * TOKENS * (TOKENS + 1)

    def softmax(training: Training, *, sinks: bool) -> Operator:
        model = SINKS if sinks else PLAIN
        layer = layers.transformer_layer(model, model.stack[0].spec, training, shard)
        return next(operator for operator in layer.operators if operator.name == "attention.softmax")

    assert softmax(training, sinks=True) == softmax(unfused, sinks=False) != softmax(training, sinks=False)
