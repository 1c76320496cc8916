"""Layers that predict further tokens: their parameters, FLOP and bytes by hand.

A model of hidden width h = 64 with 4 heads of 16, an MLP of 128 (SwiGLU), RMSNorm, rotary positions and a vocabulary of
V = 256. Such a layer has three norms of h and a projection of 2h x h beside the 4 h^2 + 3 x 128 h + 2 h of any layer.
"""

from dataclasses import replace

import pytest

from clustersim.model import layers
from clustersim.model.flops import Keys, token_flops
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.layer_stack import DenseMlp, LayerRun, Mlp, RoutedMlp
from clustersim.model.operators import Layer, Shard
from clustersim.model.presets import PRESETS
from clustersim.model.training import Training
from clustersim.model.transformer import (
    Model,
    Norm,
    Positions,
    active_parameters,
    layer_parameters,
    matrix_parameters,
    mtp_parameters,
    parameters,
    resized,
    uniform,
)

H, FFN, V, TOKENS = 64, 128, 256, 32
PLAIN = uniform(
    name="small", layers=3, hidden=H, ffn=FFN, heads=4, kv_heads=4, head_dim=16, vocab=V, max_positions=TOKENS,
    mlp=Mlp.SWIGLU, norm=Norm.RMSNORM, positions=Positions.ROTARY, tied_embeddings=False, linear_bias=False,
)  # fmt: skip
LAYER = 4 * H * H + 3 * FFN * H
TRAINING = Training(sequence=TOKENS, global_batch=1)


def further(model: Model = PLAIN, many: int = 1) -> Model:
    return replace(model, mtp_layers=many)


def on_rank(model: Model, tp: int = 1) -> tuple[Layer, Layer]:
    """A layer of the stack's last kind, and the same as one that predicts a further token."""
    shard = Shard(1, TOKENS, TOKENS, tp=tp, sequence_parallel=tp > 1)
    *_, last = model.stack
    (run,) = model.ahead
    return layers.layer(model, last.spec, TRAINING, shard), layers.layer(model, run.spec, TRAINING, shard)


def heads(model: Model) -> Layer:
    return layers.head(model, TRAINING, Shard(1, TOKENS, TOKENS))


def products(layer: Layer) -> float:
    """FLOP of a layer's matrix products, forward and backward."""
    kernels: list[Kernel] = []
    for operator in layer.operators:
        kernels += (*operator.forward, *operator.input_gradient, *operator.weight_gradient)
    return sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.MATMUL)


@pytest.mark.parametrize("many", [1, 2, 3])
def test_parameters_by_hand(many: int) -> None:
    each = LAYER + 2 * H + 2 * H * H + 3 * H
    assert mtp_parameters(further(many=many)) == many * each
    assert parameters(further(many=many)) - parameters(PLAIN) == many * each
    assert mtp_parameters(PLAIN) == 0


def test_the_layer_is_of_the_stacks_last_kind_and_a_token_meets_what_it_meets_there() -> None:
    """A dense layer, then two with 8 experts of which a token meets 2: router 8 h, experts 2 x 128 h (GELU)."""
    routed = RoutedMlp(8, 2, FFN, Mlp.GELU)
    (run,) = PLAIN.stack
    model = further(replace(PLAIN, stack=(LayerRun(run.spec, 1), LayerRun(replace(run.spec, mlp=routed), 2))))
    assert model.ahead[0].spec.mlp == routed
    met = 4 * H * H + 8 * H + 2 * 2 * FFN * H + 2 * H + 2 * H * H + 3 * H
    assert mtp_parameters(model) == met + 6 * 2 * FFN * H
    assert active_parameters(model) - active_parameters(replace(model, mtp_layers=0)) == met


@pytest.mark.parametrize("many", [1, 2])
def test_flop_by_hand(many: int) -> None:
    """Six for each weight of the layer, the projection and the logits; 12 s h of attention."""
    each = 6 * (LAYER + 2 * H * H + V * H) + 12 * TOKENS * H
    assert token_flops(further(many=many), TOKENS) - token_flops(PLAIN, TOKENS) == many * each
    assert matrix_parameters(further(many=many)) - matrix_parameters(PLAIN) == many * (LAYER + 2 * H * H + V * H)


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
    assert ahead.kept - plain.kept == 5 * activation
    assert (plain.input_bytes, ahead.input_bytes) == (activation, 2 * activation)
    assert ahead.parameters - plain.parameters == 2 * H * H // tp + 3 * H


def test_logits_of_every_layer_are_kept_and_their_weight_is_one() -> None:
    """Each adds its logits in FP32 (the loss's softmax) and the input of the product, of 2 bytes."""
    one, three = heads(PLAIN), heads(further(many=2))
    loss = one.operators[-1].kept
    assert loss >= 4 * TOKENS * V
    assert three.kept - one.kept == 2 * (loss + 2 * TOKENS * H)
    assert three.parameters == one.parameters == V * H + H


def test_none_is_the_model_as_it_was() -> None:
    assert heads(further(many=0)) == heads(PLAIN)
    assert further(many=0) == PLAIN == resized(further(), mtp_layers=0)
    assert (PLAIN.ahead, PLAIN.every) == ((), PLAIN.stack)


def test_what_changes_layers_changes_those_that_predict_further_tokens() -> None:
    model = resized(further(), layers=2, ffn=96, heads=2)
    (run,) = model.ahead
    assert run.spec.mlp == DenseMlp(96, Mlp.SWIGLU)
    assert run.spec.attention is not None and run.spec.attention.heads == 2
    assert model.layers == 2


def test_released_weights_have_as_many() -> None:
    """DeepSeek-V3's files have 680,571,043,840 elements in FP8 and 3,918,786,560 in BF16 (huggingface.co, safetensors).

    Beside 61 layers, embedding and logits matrix those are of one layer that predicts a further token, whose embedding
    and logits matrix are there once more. Its README prints 685 B, 671 B and 14 B, and README_WEIGHTS.md 11.5 B of the
    layer's own, of which a token meets 2.4 B (with embedding and logits), which are those without the projection.
    """
    preset = PRESETS["deepseek-v3"]
    model = replace(preset.model, mtp_layers=preset.mtp_layers)
    tables, projection = 2 * model.vocab * model.hidden, 2 * model.hidden**2
    assert parameters(model) + tables == 680_571_043_840 + 3_918_786_560
    assert [round(count / 1e9) for count in (parameters(preset.model), mtp_parameters(model) + tables)] == [671, 13]
    assert f"{(mtp_parameters(model) - projection) / 1e9:.1f}" == "11.5"
    met = active_parameters(model) - active_parameters(preset.model)
    assert f"{(met + tables - projection) / 1e9:.1f}" == "2.4"


def test_the_layer_of_glm_has_tables_of_its_own() -> None:
    """zai-org/GLM-4.5: 358,337,791,296 elements, of which corrections of scores (160 a layer, 90 layers) are none."""
    preset = PRESETS["glm-4.5"]
    model = replace(preset.model, mtp_layers=preset.mtp_layers)
    assert parameters(model) + 2 * model.vocab * model.hidden == 358_337_791_296 - 90 * 160


def test_published_flop_count_them() -> None:
    """Megatron Bridge's card of DeepSeek-V3 with one such layer (examples/model_verification_cards/deepseek-v3).

    1,024 GPUs, 16,384 sequences of 4,096 tokens, 61.7561 s at 276.03 TFLOP/s each, attention by the causal mask.
    """
    model = replace(PRESETS["deepseek-v3"].model, mtp_layers=1)
    printed = 276.03e12 * 1024 * 61.7561 / (16384 * 4096)
    assert token_flops(model, 4096, keys=Keys.SEEN) == pytest.approx(printed, rel=0.003)
    assert token_flops(PRESETS["deepseek-v3"].model, 4096, keys=Keys.SEEN) < 0.97 * printed


def test_layers_count_once() -> None:
    (run,) = further().ahead
    assert layer_parameters(further(), run.spec) == mtp_parameters(further())
