"""Layers that predict further tokens: their parameters, FLOP and bytes by hand.

A model of hidden width h = 64 with 4 heads of 16, an MLP of 128 (SwiGLU), RMSNorm, rotary positions and a vocabulary of
V = 256. Such a layer has three norms of h and a projection of 2h x h beside the 4 h^2 + 3 x 128 h + 2 h of any layer.
"""

from dataclasses import replace

import pytest

from clustersim.model import layers
from clustersim.model.flops import AttentionFlopConvention, token_flops
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.layer_stack import DenseMlp, LayerGroup, MlpType, MoeMlp
from clustersim.model.operators import LayerOperators, LayerShard
from clustersim.model.presets import PRESETS
from clustersim.model.training import Training
from clustersim.model.transformer import (
    Norm,
    PositionEncoding,
    TransformerModel,
    active_parameter_count,
    layer_parameter_count,
    matrix_parameter_count,
    mtp_parameter_count,
    parameter_count,
    resize_model,
    uniform_model,
)

H, FFN, V, TOKENS = 64, 128, 256, 32
PLAIN = uniform_model(
    name="small", layers=3, hidden=H, ffn=FFN, heads=4, kv_heads=4, head_dim=16, vocab=V, max_positions=TOKENS,
    mlp=MlpType.SWIGLU, norm=Norm.RMSNORM, positions=PositionEncoding.ROTARY, tied_embeddings=False, linear_bias=False,
)  # fmt: skip
LAYER = 4 * H * H + 3 * FFN * H
TRAINING = Training(sequence=TOKENS, global_batch=1)


def further(model: TransformerModel = PLAIN, many: int = 1) -> TransformerModel:
    return replace(model, mtp_layers=many)


def on_rank(model: TransformerModel, tp: int = 1) -> tuple[LayerOperators, LayerOperators]:
    """A layer of the stack's last kind, and the same as one that predicts a further token."""
    shard = LayerShard(1, TOKENS, TOKENS, tp=tp, sequence_parallel=tp > 1)
    *_, last = model.stack
    (run,) = model.mtp_stack
    return layers.transformer_layer(model, last.spec, TRAINING, shard), layers.transformer_layer(
        model, run.spec, TRAINING, shard
    )


def heads(model: TransformerModel) -> LayerOperators:
    return layers.head_layer(model, TRAINING, LayerShard(1, TOKENS, TOKENS))


def products(layer: LayerOperators) -> float:
    """FLOP of a layer's matrix products, forward and backward."""
    kernels: list[Kernel] = []
    for operator in layer.operators:
        kernels += (*operator.forward, *operator.input_gradient, *operator.weight_gradient)
    return sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.MATMUL)


@pytest.mark.parametrize("many", [1, 2, 3])
def test_parameters_by_hand(many: int) -> None:
    each = LAYER + 2 * H + 2 * H * H + 3 * H
    assert mtp_parameter_count(further(many=many)) == many * each
    assert parameter_count(further(many=many)) - parameter_count(PLAIN) == many * each
    assert mtp_parameter_count(PLAIN) == 0


def test_the_layer_is_of_the_stacks_last_kind_and_a_token_meets_what_it_meets_there() -> None:
    """A dense layer, then two with 8 experts of which a token meets 2: router 8 h, experts 2 x 128 h (GELU)."""
    routed = MoeMlp(8, 2, FFN, MlpType.GELU)
    (run,) = PLAIN.stack
    model = further(replace(PLAIN, stack=(LayerGroup(run.spec, 1), LayerGroup(replace(run.spec, mlp=routed), 2))))
    assert model.mtp_stack[0].spec.mlp == routed
    met = 4 * H * H + 8 * H + 2 * 2 * FFN * H + 2 * H + 2 * H * H + 3 * H
    assert mtp_parameter_count(model) == met + 6 * 2 * FFN * H
    assert active_parameter_count(model) - active_parameter_count(replace(model, mtp_layers=0)) == met


@pytest.mark.parametrize("many", [1, 2])
def test_flop_by_hand(many: int) -> None:
    """Six for each weight of the layer, the projection and the logits; 12 s h of attention."""
    each = 6 * (LAYER + 2 * H * H + V * H) + 12 * TOKENS * H
    assert token_flops(further(many=many), TOKENS) - token_flops(PLAIN, TOKENS) == many * each
    assert matrix_parameter_count(further(many=many)) - matrix_parameter_count(PLAIN) == many * (
        LAYER + 2 * H * H + V * H
    )


def test_products_are_those_of_the_convention() -> None:
    """Of a layer, 6 FLOP for each weight and token; of the head as many for each logits matrix."""
    plain, ahead = on_rank(further())
    assert products(ahead) - products(plain) == 6 * TOKENS * 2 * H * H
    assert products(heads(further(many=2))) == 3 * products(heads(PLAIN)) == 3 * 6 * TOKENS * V * H


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_kept_by_hand(tp: int) -> None:
    """Inputs of three norms and of the projection, of twice the width: five activations of 2 bytes, cut by sequence."""
    plain, ahead = on_rank(further(), tp)
    activation = 2 * TOKENS * H / tp
    assert ahead.saved_bytes - plain.saved_bytes == 5 * activation
    assert (plain.input_bytes, ahead.input_bytes) == (activation, 2 * activation)
    assert ahead.parameter_count - plain.parameter_count == 2 * H * H // tp + 3 * H


def test_logits_of_every_layer_are_kept_and_their_weight_is_one() -> None:
    """Each adds its logits in FP32 (the loss's softmax) and the input of the product, of 2 bytes."""
    one, three = heads(PLAIN), heads(further(many=2))
    loss = one.operators[-1].saved_bytes
    assert loss >= 4 * TOKENS * V
    assert three.saved_bytes - one.saved_bytes == 2 * (loss + 2 * TOKENS * H)
    assert three.parameter_count == one.parameter_count == V * H + H


def test_none_is_the_model_as_it_was() -> None:
    assert heads(further(many=0)) == heads(PLAIN)
    assert further(many=0) == PLAIN == resize_model(further(), mtp_layers=0)
    assert (PLAIN.mtp_stack, PLAIN.full_stack) == ((), PLAIN.stack)


def test_what_changes_layers_changes_those_that_predict_further_tokens() -> None:
    model = resize_model(further(), layers=2, ffn=96, heads=2)
    (run,) = model.mtp_stack
    assert run.spec.mlp == DenseMlp(96, MlpType.SWIGLU)
    assert run.spec.attention is not None and run.spec.attention.heads == 2
    assert model.layer_count == 2


def test_released_weights_have_as_many() -> None:
    """DeepSeek-V3's files have 680,571,043,840 elements in FP8 and 3,918,786,560 in BF16 (huggingface.co, safetensors).

    Beside 61 layers, embedding and logits matrix those are of one layer that predicts a further token, whose embedding
    and logits matrix are there once more. Its README prints 685 B, 671 B and 14 B, and README_WEIGHTS.md 11.5 B of the
    layer's own, of which a token meets 2.4 B (with embedding and logits), which are those without the projection.
    """
    preset = PRESETS["deepseek-v3"]
    model = replace(preset.model, mtp_layers=preset.mtp_layers)
    tables, projection = 2 * model.vocab * model.hidden, 2 * model.hidden**2
    assert parameter_count(model) + tables == 680_571_043_840 + 3_918_786_560
    assert [round(count / 1e9) for count in (parameter_count(preset.model), mtp_parameter_count(model) + tables)] == [
        671,
        13,
    ]
    assert f"{(mtp_parameter_count(model) - projection) / 1e9:.1f}" == "11.5"
    met = active_parameter_count(model) - active_parameter_count(preset.model)
    assert f"{(met + tables - projection) / 1e9:.1f}" == "2.4"


def test_the_layer_of_glm_has_tables_of_its_own() -> None:
    """zai-org/GLM-4.5: 358,337,791,296 elements, of which corrections of scores (160 a layer, 90 layers) are none."""
    preset = PRESETS["glm-4.5"]
    model = replace(preset.model, mtp_layers=preset.mtp_layers)
    assert parameter_count(model) + 2 * model.vocab * model.hidden == 358_337_791_296 - 90 * 160


def test_published_flop_count_them() -> None:
    """Megatron Bridge's card of DeepSeek-V3 with one such layer (examples/model_verification_cards/deepseek-v3).

    1,024 GPUs, 16,384 sequences of 4,096 tokens, 61.7561 s at 276.03 TFLOP/s each, attention by the causal mask.
    """
    model = replace(PRESETS["deepseek-v3"].model, mtp_layers=1)
    printed = 276.03e12 * 1024 * 61.7561 / (16384 * 4096)
    assert token_flops(model, 4096, convention=AttentionFlopConvention.CAUSAL) == pytest.approx(printed, rel=0.003)
    assert token_flops(PRESETS["deepseek-v3"].model, 4096, convention=AttentionFlopConvention.CAUSAL) < 0.97 * printed


def test_layers_count_once() -> None:
    (run,) = further().mtp_stack
    assert layer_parameter_count(further(), run.spec) == mtp_parameter_count(further())
