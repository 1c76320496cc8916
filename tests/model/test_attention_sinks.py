"""Attention sinks: one learned score per head, and what it costs, by hand.

Two sequences of 512 tokens, 8 heads of 64 with 2 KV heads, in bf16.
"""

from dataclasses import replace

import pytest

from clustersim.model import layers
from clustersim.model.layer_stack import MlpType
from clustersim.model.operators import LayerOperators, LayerShard, Operator
from clustersim.model.presets import load_preset
from clustersim.model.training import NONE_FUSED, AttentionBackend, Training
from clustersim.model.transformer import (
    Norm,
    PositionEncoding,
    layer_parameter_count,
    parameter_count,
    resize_model,
    uniform_model,
)

TOKENS, BATCH, HEADS, HEAD_DIM, KV = 512, 2, 8, 64, 2
PLAIN = uniform_model(
    name="small",
    layers=2,
    hidden=512,
    ffn=1024,
    heads=HEADS,
    kv_heads=KV,
    head_dim=HEAD_DIM,
    vocab=256,
    max_positions=TOKENS,
    mlp=MlpType.SWIGLU,
    norm=Norm.RMSNORM,
    positions=PositionEncoding.ROTARY,
    tied_embeddings=False,
    linear_bias=False,
)
SINKS = resize_model(PLAIN, attention_sinks=True)


def sink_layer(*, sinks: bool, attention: AttentionBackend = AttentionBackend.FLASH, tp: int = 1) -> LayerOperators:
    model = SINKS if sinks else PLAIN
    training = Training(TOKENS, BATCH, microbatch=BATCH, attention=attention)
    return layers.transformer_layer(model, model.stack[0].spec, training, LayerShard(BATCH, TOKENS, TOKENS, tp=tp))


def core_operator(layer: LayerOperators) -> Operator:
    (operator,) = (item for item in layer.operators if item.name == "attention.core")
    return operator


def test_sink_parameters_are_one_per_head() -> None:
    assert parameter_count(SINKS) - parameter_count(PLAIN) == 2 * HEADS
    assert (
        parameter_count(load_preset("gpt-oss-20b"))
        - parameter_count(resize_model(load_preset("gpt-oss-20b"), attention_sinks=False))
        == 24 * 64
    )


@pytest.mark.parametrize("attention", [AttentionBackend.FLASH, AttentionBackend.STANDARD])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_hold_the_sinks_of_their_heads(attention: AttentionBackend, tp: int) -> None:
    with_sinks, without_sinks = (
        sink_layer(sinks=item, attention=attention, tp=tp).parameter_count for item in (True, False)
    )
    assert tp * (with_sinks - without_sinks) == HEADS
    assert sink_layer(sinks=True, attention=attention).parameter_count == layer_parameter_count(
        SINKS, SINKS.stack[0].spec
    )


def test_flash_attention_with_sinks_keeps_flops_and_activations() -> None:
    """Forward reads 2 bytes per head; backward reads and writes them, and 8 more bytes per query and head."""
    with_sinks, without_sinks = sink_layer(sinks=True), sink_layer(sinks=False)
    sink_core, plain_core = core_operator(with_sinks), core_operator(without_sinks)
    (forward,), (backward,) = sink_core.forward, sink_core.input_gradient
    (plain_forward,), (plain_backward,) = plain_core.forward, plain_core.input_gradient
    assert (forward.flops, backward.flops) == (plain_forward.flops, plain_backward.flops)
    assert (forward.shape, backward.shape) == (plain_forward.shape, plain_backward.shape), (
        "one measured kernel tells of both"
    )
    assert forward.bytes - plain_forward.bytes == 2 * HEADS
    assert backward.bytes - plain_backward.bytes == 2 * (2 * HEADS + 4 * BATCH * TOKENS * HEADS)
    assert with_sinks.saved_bytes == without_sinks.saved_bytes


def test_standard_attention_concatenates_sinks_to_the_scores() -> None:
    """2 bytes read and written for each score and sink, both ways; the softmax is not fused."""
    training = Training(TOKENS, BATCH, microbatch=BATCH, attention=AttentionBackend.STANDARD)
    unfused = replace(training, fused=NONE_FUSED)
    shard = LayerShard(BATCH, TOKENS, TOKENS)
    (sink,) = (
        operator
        for operator in sink_layer(sinks=True, attention=AttentionBackend.STANDARD).operators
        if operator.name == "attention.sink"
    )
    (forward,), (backward,) = sink.forward, sink.input_gradient
    assert forward.bytes == backward.bytes == 2 * 2 * BATCH * HEADS * TOKENS * (TOKENS + 1)

    def softmax(training: Training, *, sinks: bool) -> Operator:
        model = SINKS if sinks else PLAIN
        layer = layers.transformer_layer(model, model.stack[0].spec, training, shard)
        return next(operator for operator in layer.operators if operator.name == "attention.softmax")

    assert softmax(training, sinks=True) == softmax(unfused, sinks=False) != softmax(training, sinks=False)
