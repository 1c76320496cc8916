"""Multi-token prediction layers: their parameters, FLOP and bytes by hand.

A model of hidden width h = 64 with 4 heads of 16, an MLP of 128 (SwiGLU), RMSNorm, rotary positions and a
vocabulary of V = 256. An MTP layer has three norms of h and a projection of 2h x h in addition to the 4 h^2 +
3 x 128 h + 2 h of any layer.
"""

from dataclasses import replace

import pytest

from clustersim.model import layers
from clustersim.model.flops import token_flops
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.layer_stack import DenseMlp, LayerGroup, MlpType, MoeMlp
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.model.operators import LayerOperators, LayerShard
from clustersim.model.presets import code_presets
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
BASE_MODEL = uniform_model(
    name="small", layers=3, hidden=H, ffn=FFN, heads=4, kv_heads=4, head_dim=16, vocab=V, max_positions=TOKENS,
    mlp=MlpType.SWIGLU, norm=Norm.RMSNORM, positions=PositionEncoding.ROTARY, tied_embeddings=False, linear_bias=False,
)  # fmt: skip
LAYER_PARAMETERS = 4 * H * H + 3 * FFN * H
TRAINING = Training(sequence=TOKENS, global_batch=1)


def with_mtp(model: TransformerModel = BASE_MODEL, mtp_layers: int = 1) -> TransformerModel:
    return replace(model, mtp_layers=mtp_layers)


def plain_and_mtp_layer(model: TransformerModel, tp: int = 1) -> tuple[LayerOperators, LayerOperators]:
    """A layer of the stack's last kind, and the MTP layer of the same kind."""
    shard = LayerShard(1, TOKENS, TOKENS, tp=tp, sequence_parallel=tp > 1)
    *_, last_run = model.stack
    (run,) = model.mtp_stack
    return layers.transformer_layer(model, last_run.spec, TRAINING, shard), layers.transformer_layer(
        model, run.spec, TRAINING, shard
    )


def head_layer(model: TransformerModel) -> LayerOperators:
    return layers.head_layer(model, TRAINING, LayerShard(1, TOKENS, TOKENS))


def matmul_flops(layer: LayerOperators) -> float:
    """FLOP of a layer's matmuls, forward and backward."""
    kernels: list[Kernel] = []
    for operator in layer.operators:
        kernels += (*operator.forward, *operator.input_gradient, *operator.weight_gradient)
    return sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.MATMUL)


@pytest.mark.parametrize("mtp_layers", [1, 2, 3])
def test_parameters_by_hand(mtp_layers: int) -> None:
    mtp_layer_parameters = LAYER_PARAMETERS + 2 * H + 2 * H * H + 3 * H
    assert mtp_parameter_count(with_mtp(mtp_layers=mtp_layers)) == mtp_layers * mtp_layer_parameters
    assert (
        parameter_count(with_mtp(mtp_layers=mtp_layers)) - parameter_count(BASE_MODEL)
        == mtp_layers * mtp_layer_parameters
    )
    assert mtp_parameter_count(BASE_MODEL) == 0


def test_an_mtp_layer_has_the_last_layers_kind_and_active_parameters() -> None:
    """A dense layer, then two with 8 experts and top-2 routing: router 8 h, active experts 2 x 128 h each (GELU)."""
    moe = MoeMlp(8, 2, FFN, MlpType.GELU)
    (run,) = BASE_MODEL.stack
    model = with_mtp(replace(BASE_MODEL, stack=(LayerGroup(run.spec, 1), LayerGroup(replace(run.spec, mlp=moe), 2))))
    assert model.mtp_stack[0].spec.mlp == moe
    active = 4 * H * H + 8 * H + 2 * 2 * FFN * H + 2 * H + 2 * H * H + 3 * H
    assert mtp_parameter_count(model) == active + 6 * 2 * FFN * H
    assert active_parameter_count(model) - active_parameter_count(replace(model, mtp_layers=0)) == active


@pytest.mark.parametrize("mtp_layers", [1, 2])
def test_flop_by_hand(mtp_layers: int) -> None:
    """Six for each weight of the layer, the projection and the logits; 12 s h of attention."""
    mtp_layer_flops = 6 * (LAYER_PARAMETERS + 2 * H * H + V * H) + 12 * TOKENS * H
    assert (
        token_flops(with_mtp(mtp_layers=mtp_layers), TOKENS) - token_flops(BASE_MODEL, TOKENS)
        == mtp_layers * mtp_layer_flops
    )
    assert matrix_parameter_count(with_mtp(mtp_layers=mtp_layers)) - matrix_parameter_count(
        BASE_MODEL
    ) == mtp_layers * (LAYER_PARAMETERS + 2 * H * H + V * H)


def test_matmul_flops_follow_the_convention() -> None:
    """In a layer, 6 FLOP per weight and token; in the head as many for each logits matrix."""
    plain, mtp = plain_and_mtp_layer(with_mtp())
    assert matmul_flops(mtp) - matmul_flops(plain) == 6 * TOKENS * 2 * H * H
    assert (
        matmul_flops(head_layer(with_mtp(mtp_layers=2)))
        == 3 * matmul_flops(head_layer(BASE_MODEL))
        == 3 * 6 * TOKENS * V * H
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_kept_bytes_by_hand(tp: int) -> None:
    """Inputs of three norms and of the projection (twice the width): five activations of 2 bytes, sequence-sharded."""
    plain, mtp = plain_and_mtp_layer(with_mtp(), tp)
    activation = 2 * TOKENS * H / tp
    assert mtp.saved_bytes - plain.saved_bytes == 5 * activation
    assert (plain.input_bytes, mtp.input_bytes) == (activation, 2 * activation)
    assert mtp.parameter_count - plain.parameter_count == 2 * H * H // tp + 3 * H


def test_every_mtp_layer_keeps_logits_of_one_shared_weight() -> None:
    """Each adds its logits in FP32 (the loss's softmax) and the input of the matmul, of 2 bytes."""
    base, with_two_mtp = head_layer(BASE_MODEL), head_layer(with_mtp(mtp_layers=2))
    loss = base.operators[-1].saved_bytes
    assert loss >= 4 * TOKENS * V
    assert with_two_mtp.saved_bytes - base.saved_bytes == 2 * (loss + 2 * TOKENS * H)
    assert with_two_mtp.parameter_count == base.parameter_count == V * H + H


def test_zero_mtp_layers_change_nothing() -> None:
    assert head_layer(with_mtp(mtp_layers=0)) == head_layer(BASE_MODEL)
    assert with_mtp(mtp_layers=0) == BASE_MODEL == resize_model(with_mtp(), mtp_layers=0)
    assert (BASE_MODEL.mtp_stack, BASE_MODEL.full_stack) == ((), BASE_MODEL.stack)


def test_resizing_layers_resizes_mtp_layers() -> None:
    model = resize_model(with_mtp(), layers=2, ffn=96, heads=2)
    (run,) = model.mtp_stack
    assert run.spec.mlp == DenseMlp(96, MlpType.SWIGLU)
    assert run.spec.attention is not None and run.spec.attention.heads == 2
    assert model.layer_count == 2


def test_deepseek_v3_mtp_parameters_are_the_released_ones() -> None:
    """DeepSeek-V3's safetensors (huggingface.co) have 680,571,043,840 elements in FP8 and 3,918,786,560 in BF16.

    In addition to 61 layers, embedding and logits matrix those are of one MTP layer, with a second copy of the
    embedding and logits matrix. Its README prints 685 B, 671 B and 14 B, and README_WEIGHTS.md 11.5 B of the
    layer's own, of which 2.4 B are active per token (with embedding and logits); these exclude the projection.
    """
    preset = code_presets()["deepseek-v3"]
    model = replace(preset.model, mtp_layers=preset.mtp_layers)
    tables, projection = 2 * model.vocab * model.hidden, 2 * model.hidden**2
    assert parameter_count(model) + tables == 680_571_043_840 + 3_918_786_560
    assert [round(count / 1e9) for count in (parameter_count(preset.model), mtp_parameter_count(model) + tables)] == [
        671,
        13,
    ]
    assert f"{(mtp_parameter_count(model) - projection) / 1e9:.1f}" == "11.5"
    active = active_parameter_count(model) - active_parameter_count(preset.model)
    assert f"{(active + tables - projection) / 1e9:.1f}" == "2.4"


def test_glm_mtp_layer_has_separate_embedding_and_logits() -> None:
    """zai-org/GLM-4.5: 358,337,791,296 elements, minus score corrections (160 a layer, 90 layers), no weights."""
    preset = code_presets()["glm-4.5"]
    model = replace(preset.model, mtp_layers=preset.mtp_layers)
    assert parameter_count(model) + 2 * model.vocab * model.hidden == 358_337_791_296 - 90 * 160


def test_published_flops_include_mtp_layers() -> None:
    """Megatron Bridge's card of DeepSeek-V3 with one MTP layer (examples/model_verification_cards/deepseek-v3).

    1,024 GPUs, 16,384 sequences of 4,096 tokens, 61.7561 s at 276.03 TFLOP/s each, attention by the causal mask.
    """
    model = replace(code_presets()["deepseek-v3"].model, mtp_layers=1)
    printed = 276.03e12 * 1024 * 61.7561 / (16384 * 4096)
    assert token_flops(model, 4096, convention=AttentionFlopConvention.CAUSAL) == pytest.approx(printed, rel=0.003)
    assert (
        token_flops(code_presets()["deepseek-v3"].model, 4096, convention=AttentionFlopConvention.CAUSAL)
        < 0.97 * printed
    )


def test_mtp_parameters_are_one_layers_parameters() -> None:
    (run,) = with_mtp().mtp_stack
    assert layer_parameter_count(with_mtp(), run.spec) == mtp_parameter_count(with_mtp())
