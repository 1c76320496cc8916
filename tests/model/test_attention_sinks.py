"""Attention with sinks: one learned score of each head, and what it costs, by hand.

Two sequences of 512 tokens, 8 heads of 64 with 2 heads of keys, in bf16.
"""

from dataclasses import replace

import pytest

from clustersim.model import layers
from clustersim.model.layer_stack import Mlp
from clustersim.model.operators import Layer, Operator, Shard
from clustersim.model.presets import preset
from clustersim.model.training import Attention, Training
from clustersim.model.transformer import Norm, Positions, layer_parameters, parameters, resized, uniform

TOKENS, BATCH, HEADS, HEAD, KV = 512, 2, 8, 64, 2
PLAIN = uniform(
    name="small", layers=2, hidden=512, ffn=1024, heads=HEADS, kv_heads=KV, head_dim=HEAD, vocab=256,
    max_positions=TOKENS, mlp=Mlp.SWIGLU, norm=Norm.RMSNORM, positions=Positions.ROTARY, tied_embeddings=False,
    linear_bias=False,
)  # fmt: skip
SINKS = resized(PLAIN, sinks=True)


def made(*, sinks: bool, attention: Attention = Attention.FLASH, tp: int = 1) -> Layer:
    model = SINKS if sinks else PLAIN
    training = Training(TOKENS, BATCH, microbatch=BATCH, attention=attention)
    return layers.layer(model, model.stack[0].spec, training, Shard(BATCH, TOKENS, TOKENS, tp=tp))


def core(layer: Layer) -> Operator:
    (found,) = (operator for operator in layer.operators if operator.name == "attention.core")
    return found


def test_every_head_has_one() -> None:
    assert parameters(SINKS) - parameters(PLAIN) == 2 * HEADS
    assert parameters(preset("gpt-oss-20b")) - parameters(resized(preset("gpt-oss-20b"), sinks=False)) == 24 * 64


@pytest.mark.parametrize("attention", [Attention.FLASH, Attention.STANDARD])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_have_those_of_their_heads(attention: Attention, tp: int) -> None:
    with_sinks, without = (made(sinks=item, attention=attention, tp=tp).parameters for item in (True, False))
    assert tp * (with_sinks - without) == HEADS
    assert made(sinks=True, attention=attention).parameters == layer_parameters(SINKS, SINKS.stack[0].spec)


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
    assert with_sinks.kept == without.kept


def test_standard_attention_copies_the_scores_behind_which_they_are() -> None:
    """2 bytes read and written for each score and sink, both ways; the softmax is not fused."""
    training = Training(TOKENS, BATCH, microbatch=BATCH, attention=Attention.STANDARD)
    unfused = replace(training, fused=False)
    shard = Shard(BATCH, TOKENS, TOKENS)
    (sink,) = (
        operator
        for operator in made(sinks=True, attention=Attention.STANDARD).operators
        if operator.name == "attention.sink"
    )
    (forward,), (backward,) = sink.forward, sink.input_gradient
    assert forward.bytes == backward.bytes == 2 * 2 * BATCH * HEADS * TOKENS * (TOKENS + 1)

    def softmax(training: Training, *, sinks: bool) -> Operator:
        model = SINKS if sinks else PLAIN
        layer = layers.layer(model, model.stack[0].spec, training, shard)
        return next(operator for operator in layer.operators if operator.name == "attention.softmax")

    assert softmax(training, sinks=True) == softmax(unfused, sinks=False) != softmax(training, sinks=False)
