"""Encoders, multimodal models and diffusion transformers have their published weights, and the FLOP of their shapes."""

from collections.abc import Iterable
from typing import Any

import pytest

from clustersim import Scenario
from clustersim.build import build_plan
from clustersim.model.flops import encoder_image_flops, model_flops, token_flops
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.model_ends import NoHead
from clustersim.model.presets import load_preset
from clustersim.model.transformer import TransformerModel, parameter_count

# Elements of released checkpoints (torchvision, timm, Hugging Face) and of reference implementations.
RELEASED = {
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
    "vit-g-14": 1_012_611_432,
    "clip-vit-l-14-336": 303_507_456,
    "siglip-so400m-14-384": 428_225_600,
    "llava-1.5-7b": 7_063_427_072,
    "internvl3-8b": 7_944_373_760,
    "qwen3-vl-8b": 8_767_123_696,
    "dit-xl-2": 675_129_632 - 256 * 1152,  # the repository counts the fixed table of positions, too
    "wan2.1-14b": 14_288_491_584,
    "flux.1-dev": 11_901_408_320,
}
# Multiplications of an image's forward, in 10^9, as torchvision states them for its weights.
TORCHVISION_GMACS = {"vit-l-16": 61.555, "vit-h-14": 167.295}


def _scenario(preset: str, **sections: Any) -> Scenario:
    mapping: dict[str, Any] = {
        "model": preset,
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"data": "fsdp"},
        "training": {"global_batch": 8},
    }
    return Scenario.from_mapping({**mapping, **sections})


def _kernels(scenario: Scenario) -> Iterable[Kernel]:
    """Kernels of one forward and backward of the model on a rank that holds all of it."""
    plan = build_plan(scenario)
    for stage in plan.stages:
        for unit in plan.stage_units(stage):
            for operator in unit.operators:
                yield from (*operator.forward, *operator.input_gradient, *operator.weight_gradient)


@pytest.mark.parametrize(("name", "count"), RELEASED.items())
def test_parameters_are_those_of_the_released_weights(name: str, count: int) -> None:
    assert parameter_count(load_preset(name)) == count


@pytest.mark.parametrize("name", [name for name in RELEASED if not isinstance(load_preset(name).head, NoHead)])
def test_a_rank_holds_all_parameters_of_a_model(name: str) -> None:
    training = {"global_batch": 8, **({"sequence": 1024} if load_preset(name).patches is None else {})}
    plan = build_plan(_scenario(name, training=training))
    assert sum(plan.parameter_count(stage) for stage in plan.stages) == parameter_count(load_preset(name))


@pytest.mark.parametrize(("name", "gmacs"), TORCHVISION_GMACS.items())
def test_model_flop_are_three_times_the_published_forward(name: str, gmacs: float) -> None:
    """But for the patches, whose values have no gradient: 4 FLOP per multiplication instead of 6."""
    model = load_preset(name)
    assert model.patches is not None
    tokens = model.patches.tokens
    patch_macs = model.patches.patches * model.patches.patch_elements * model.hidden
    macs = (token_flops(model, tokens) * tokens + 2 * patch_macs) / 6
    assert f"{macs / 1e9:.3f}" == f"{gmacs:.3f}"


def _layer_macs(model: TransformerModel) -> int:
    """Multiplications of a token and the matrices of a vision transformer's layers: 4 h^2 + 2 h f each."""
    (group,) = model.stack
    ffn = model.distinct_dense_mlps[0].ffn
    return group.count * (4 * model.hidden**2 + 2 * model.hidden * ffn)


@pytest.mark.parametrize("name", ["vit-l-16", "siglip-so400m-14-384"])
def test_matmul_kernels_of_an_encoder_are_its_closed_form(name: str) -> None:
    """Six FLOP per weight and token, four per weight of a patch, and the head's own."""
    model = load_preset(name)
    assert model.patches is not None
    patches, hidden = model.patches, model.hidden
    matmuls = sum(kernel.flops for kernel in _kernels(_scenario(name)) if kernel.kind is KernelKind.MATMUL)
    layers = 6 * _layer_macs(model) * patches.tokens + 4 * patches.patches * patches.patch_elements * hidden
    heads = {
        "vit-l-16": 6 * 1000 * hidden,
        "siglip-so400m-14-384": 6 * (2 * hidden**2 * patches.tokens + 2 * hidden**2 + 2 * hidden * 4304),
    }
    assert matmuls == pytest.approx(layers + heads[name], rel=1e-12)


def test_dit_has_the_closed_form_of_its_paper() -> None:
    """118.6 GFLOP forward of 256 x 256 in Table 1, where a multiplication is one FLOP.

    Per token and layer 12 h^2 of matrices and 2 n h of scores and values; per sample 6 h^2 of each layer, 2 h^2 of the
    head, two matrices of the time step; patches and the output.
    """
    model = load_preset("dit-xl-2")
    tokens, hidden = 256, 1152
    layers = 28 * (tokens * (12 * hidden**2 + 2 * tokens * hidden) + 6 * hidden**2)
    patches, output = tokens * 16 * hidden, tokens * 32 * hidden + 2 * hidden**2
    time_first, time_second = 256 * hidden, hidden**2
    expected = 6 * (layers + output + time_second) + 4 * (patches + time_first)
    assert token_flops(model, tokens) * tokens == pytest.approx(expected, rel=1e-12)
    forward = layers + output + patches + time_first + time_second
    assert f"{forward / 1e9:.1f}" == "118.6"


def test_wan_attends_across_with_keys_of_its_text() -> None:
    """Per layer 4 h^2 + 2 n h of attention, 2 h^2 + 2 m h across, 2 h f of the MLP; 2 m h^2 of m keys and values."""
    model = load_preset("wan2.1-14b")
    tokens, keys, hidden, ffn = 21 * 30 * 52, 512, 5120, 13824
    per_token = 4 * hidden**2 + 2 * tokens * hidden + 2 * hidden**2 + 2 * keys * hidden + 2 * hidden * ffn
    layers = 40 * (tokens * per_token + 2 * keys * hidden**2)
    patches, output = tokens * 64 * hidden, tokens * 64 * hidden
    first = 256 * hidden + keys * 4096 * hidden
    others = hidden**2 + 6 * hidden**2 + keys * hidden**2
    expected = 6 * (layers + output + others) + 4 * (patches + first)
    assert token_flops(model, tokens) * tokens == pytest.approx(expected, rel=1e-12)


def test_flux_joins_text_and_image_in_every_layer() -> None:
    """All tokens pass 12 h^2 of each layer, text and image different ones in the 19 double blocks."""
    model = load_preset("flux.1-dev")
    image, text, hidden = 64 * 64, 512, 3072
    tokens = image + text
    layers = 57 * tokens * (12 * hidden**2 + 2 * tokens * hidden) + (19 * 2 * 6 + 38 * 3) * hidden**2
    output = image * 64 * hidden + 2 * hidden**2
    first = (256 + 256 + 768) * hidden + text * 4096 * hidden
    expected = 6 * (layers + output + 3 * hidden**2) + 4 * (image * 64 * hidden + first)
    assert token_flops(model, tokens) * tokens == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["dit-xl-2", "wan2.1-14b", "flux.1-dev"])
def test_matmul_kernels_of_a_diffusion_transformer_are_its_model_flop_without_attention(name: str) -> None:
    """Scores and values are attention kernels: 12 FLOP per query width and key, of the sequence and of a text."""
    scenario = _scenario(name)
    model, tokens = scenario.model, scenario.training.sequence
    matmuls = sum(kernel.flops for kernel in _kernels(scenario) if kernel.kind is KernelKind.MATMUL)
    keys = sum(group.count * (tokens + (512 if group.spec.cross is not None else 0)) for group in model.stack)
    attention = 12 * model.hidden * keys * tokens
    assert matmuls + attention == pytest.approx(model_flops(model, scenario.training) / 8, rel=1e-12)


def test_a_frozen_encoder_counts_its_forward_alone() -> None:
    """Two FLOP per weight instead of six, a third of attention's; the projector's first matrix has four."""
    frozen = _scenario("llava-1.5-7b", training={"global_batch": 8, "sequence": 2048}).model
    encoder = frozen.encoder
    assert encoder is not None
    clip = load_preset("clip-vit-l-14-336")
    trained = token_flops(clip, 577) * 577
    patch_flops = 4 * 576 * 588 * 1024
    forward = (trained - patch_flops) / 3 + patch_flops / 2
    projector = 576 * (4 * 1024 * 4096 + 6 * 4096 * 4096)
    assert encoder_image_flops(encoder) == pytest.approx(forward + projector, rel=1e-12)
