"""Which models of several towers a scenario may describe, and what is wrong with others."""

from typing import Any

import pytest

from clustersim import Scenario
from clustersim.common.errors import InputError
from clustersim.model.gradient_flow import GradientFlow

_LLAVA = {"language": "llama2-7b", "encoder": "clip-vit-l-14-336"}


def _with_images(images: dict[str, Any]) -> dict[str, Any]:
    return {**_LLAVA, "encoder": {"preset": "clip-vit-l-14-336", "images": images}}


def _scenario(model: Any, *overrides: str, **training: Any) -> Scenario:
    mapping = {
        "model": model,
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"data": "fsdp"},
        "training": {"sequence": 2048, "global_batch": 8, **training},
    }
    return Scenario.from_mapping(mapping, overrides)


def test_sections_build_what_the_preset_is() -> None:
    model = _scenario({**_LLAVA, "encoder": {"preset": "clip-vit-l-14-336", "frozen": True}}).model
    preset = _scenario("llava-1.5-7b").model
    assert model.encoder == preset.encoder
    assert model.gradients == preset.gradients


def test_a_frozen_language_model_passes_gradients_to_the_projector() -> None:
    """The first stage of LLaVA's training."""
    model = _scenario({"preset": "llava-1.5-7b", "frozen": True}).model
    assert model.encoder is not None
    assert model.gradients.layers is GradientFlow.PASSES
    assert model.gradients.embedding is GradientFlow.NONE
    assert model.encoder.model.gradients.layers is GradientFlow.NONE
    assert model.encoder.model.gradients.head is GradientFlow.TRAINED


def test_a_frozen_projector_passes_gradients_to_a_trained_encoder_only() -> None:
    trained = _scenario({**_LLAVA, "projector": {"frozen": True}}).model.encoder
    frozen = _scenario({"preset": "llava-1.5-7b", "projector": {"frozen": True}}).model.encoder
    assert trained is not None
    assert frozen is not None
    assert trained.model.gradients.head is GradientFlow.PASSES
    assert frozen.model.gradients.head is GradientFlow.NONE


@pytest.mark.parametrize(
    ("size", "tokens"), [(224, 257), (384, 730), ([224, 448], 513)], ids=["small", "large", "rectangle"]
)
def test_images_of_another_size_have_other_tokens(size: int | list[int], tokens: int) -> None:
    mapping = {
        "model": {"preset": "vit-h-14", "input_size": size},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"data": "fsdp"},
        "training": {"global_batch": 64},
    }
    scenario = Scenario.from_mapping(mapping)
    assert scenario.training.sequence == tokens
    assert scenario.model.max_positions == tokens
    assert Scenario.from_mapping(scenario.to_mapping()).training.sequence == tokens


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({**_LLAVA, "hidden": 4096}, "model: hidden:.*language"),
        ({"preset": "llama2-7b", "frozen": True}, "model: frozen: true.*no encoder or projector"),
        ({"preset": "llama2-7b", "projector": {}}, "model: projector: there is no encoder that it belongs to"),
        ({"preset": "llama2-7b", "encoder": {"frozen": True}}, "model: encoder: names no preset"),
        ({**_LLAVA, "encoder": "llama3-8b"}, "model: encoder: llama3-8b reads tokens, not images"),
        (
            {**_LLAVA, "projector": {"widths": [4096, 1024]}},
            "model: projector.widths: end in 1024, but llama2-7b is 4096",
        ),
        (
            {
                "language": {"preset": "llama2-7b", "frozen": True},
                "encoder": {"preset": "clip-vit-l-14-336", "frozen": True},
                "projector": {"frozen": True},
            },
            "model: frozen: true of all its towers",
        ),
        (
            {**_LLAVA, "encoder": {"preset": "clip-vit-l-14-336", "images": 4}},
            "training.sequence: 2048 tokens hold no 2,304 of images",
        ),
        (
            {**_LLAVA, "encoder": {"preset": "clip-vit-l-14-336", "images": 1.5}},
            r"model\.encoder\.images: 1\.5.*1 sequences.*1\.5 images",
        ),
        (
            {**_LLAVA, "encoder": {"preset": "clip-vit-l-14-336", "images": "1 to 4"}},
            "model.encoder.images: '1 to 4' is no mean number of images",
        ),
        (
            {**_LLAVA, "encoder": {"preset": "clip-vit-l-14-336", "images": {"counts": [0]}}},
            "model.encoder.images: counts has no image at all; write layers: 0",
        ),
        (
            {**_LLAVA, "encoder": {"preset": "clip-vit-l-14-336", "images": {"counts": [1, 4]}}},
            "training.sequence: 2048 tokens hold no 2,304 of images",
        ),
        (
            {**_LLAVA, "encoder": {"preset": "clip-vit-l-14-336", "images": {"mean": 2, "counts": [1]}}},
            "model.encoder.images: images are a mean, or a list of counts",
        ),
        (
            {**_LLAVA, "encoder": {"preset": "clip-vit-l-14-336", "images": {"seed": 1, "counts": [1], "sigma": 2}}},
            "model.encoder.images.sigma",
        ),
        (
            _with_images({"mean": 0.5, "sizes": [224]}),
            "model.encoder.images: sizes are of whole images.* 0.5; write counts",
        ),
        (_with_images({"mean": 1, "sizes": []}), "model.encoder.images.sizes"),
        (_with_images({"mean": 1, "sizes": [8]}), r"model: input_size: \[8, 8\] holds no patch of clip-vit-l-14-336"),
        (_with_images({"mean": 1, "sizes": ["big"]}), r"model.encoder.images.sizes.*'big' is no size"),
        (_with_images({"mean": 1, "sizes": [224, 672]}), "2048 tokens hold no 2,304 of images"),
        ({**_LLAVA, "encoder": {"preset": "clip-vit-l-14-336", "vocab": 9}}, "model: vocab: clip-vit-l-14-336 has no"),
        ({"preset": "llama2-7b", "input_size": 224}, "model: input_size: llama2-7b reads tokens, not images"),
        ({"preset": "vit-l-16", "input_size": 8}, r"model: input_size: \[8, 8\] holds no patch of vit-l-16"),
        ({"preset": "vit-l-16", "input_size": "big"}, "model.input_size: 'big' is no size"),
        ("clip-vit-l-14-336", "model: clip-vit-l-14-336 ends in features.*give it as model.encoder"),
        ("vit-l-16", r"training\.sequence: 2048 tokens.*vit-l-16.*197 tokens"),
    ],
)
def test_bad_towers_are_refused_in_one_sentence(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _scenario(model)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lora={rank: 16}", r"training\.lora.*llava-1\.5-7b.*not modelled"),
        ("training.reference_model=true", "training.reference_model with the images"),
        ("layout.data=deepspeed_zero3", "layout.data: deepspeed_zero3 with the images"),
    ],
)
def test_what_no_tower_has_is_refused(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _scenario("llava-1.5-7b", override)


def test_images_of_several_sizes_need_kernels_of_variable_length() -> None:
    with pytest.raises(
        InputError, match=r"training\.attention: standard, whose kernels are of one length.*with the imag"
    ):
        _scenario(_with_images({"mean": 1, "sizes": [224, 336]}), "training.attention=standard")


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        (
            "llava-1.5-7b",
            ["layout.pp=1"],
            "own_stage takes a pipeline rank from pp 1, so llava-1.5-7b has none; pp 2 fits",
        ),
        ("llama2-7b", [], "own_stage, but llama2-7b has no encoder; leave it out, or give one"),
        ("llava-1.5-7b", ["schedule={interleaved: {chunks: 2}}"], "with schedule interleaved the encoder's rank has"),
        ("llava-1.5-7b", ["layout.layers_per_stage=[16, 16]"], "3 stages with 32 layers, but pp 2"),
        ("llava-1.5-7b", ["layout.encoder_placement=own"], "'own' is unknown; did you mean own_stage"),
    ],
)
def test_an_encoder_needs_a_rank_of_its_own_to_have_one(model: str, overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _scenario(model, "layout.pp=2", "layout.data=zero1", "layout.encoder_placement=own_stage", *overrides)


def test_tensor_parallelism_divides_the_encoder_too() -> None:
    message = "layout.tp: 8 does not divide heads 12 of the encoder"
    encoder = {"preset": "clip-vit-l-14-336", "heads": 12, "kv_heads": 12}
    with pytest.raises(InputError, match=message):
        _scenario({**_LLAVA, "encoder": encoder}, "layout.tp=8")


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("llava-1.5-7b", ["layout.encoder_tp=3"], "layout.encoder_tp: 3 does not divide tp 8.*encoder_tp 2 or 4 fits"),
        ("llama2-7b", ["layout.encoder_tp=1"], "layout.encoder_tp: 1, but llama2-7b has no encoder"),
        (
            "llava-1.5-7b",
            ["layout.encoder_tp=1", "layout.order=[cp, tp, dp, pp]"],
            "layout.order.*with layout.encoder_tp",
        ),
        (
            "llava-1.5-7b",
            ["layout.encoder_tp=1", "training.optimizer=muon"],
            "training.optimizer of matrices with layout",
        ),
        ("llava-1.5-7b", ["layout.encoder_tensor_model_parallel_size=1"], "layout.*encoder_tp"),
    ],
)
def test_a_degree_of_the_encoder_divides_that_of_its_language_model(
    model: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        _scenario(model, "layout.tp=8", "layout.data=zero1", *overrides)


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("llama2-7b", [], "layout.encoder_dp: 2, but llama2-7b has no encoder"),
        ("llava-1.5-7b", ["layout.encoder_placement=first_stage"], "encoder_dp: 2, but.*; encoder_placement own_stage"),
        ("llava-1.5-7b", ["layout.pp=1"], "own_stage takes a pipeline rank from pp 1"),
        (
            "llava-1.5-7b",
            ["layout.encoder_dp=3"],
            r"encoder_dp: encoder_tp 1 x encoder_dp 3 and tp 1 x cp 1 x dp 6 x 1 other pipeline ranks = 9 GPUs, but "
            "the cluster has 8; encoder_dp 2 fits",
        ),
        ("llava-1.5-7b", ["layout.encoder_tp=3", "layout.dp=2"], "encoder_tp: 3 does not divide heads 16"),
        ("llava-1.5-7b", ["schedule=zb-2p"], "schedule: zb-2p, whose ranks end.*with layout.encoder_dp"),
        (
            "llava-1.5-7b",
            ["training.offload={optimizer: true}"],
            "training.offload with layout.encoder_dp is not modelled",
        ),
        ("llava-1.5-7b", ["layout.encoder_data_parallel_size=2"], "layout.*encoder_dp"),
    ],
)
def test_an_encoder_with_gpus_of_its_own_is_a_stage_and_leaves_the_rest(
    model: str, overrides: list[str], message: str
) -> None:
    layout = ["layout.pp=2", "layout.dp=6", "layout.data=zero1", "layout.encoder_placement=own_stage"]
    with pytest.raises(InputError, match=message):
        _scenario(model, *layout, "layout.encoder_tp=1", "layout.encoder_dp=2", "training.global_batch=24", *overrides)


def test_replicas_are_on_the_gpus_that_the_encoder_leaves() -> None:
    keys = ["layout.encoder_placement=own_stage", "layout.encoder_dp=2", "layout.pp=2", "layout.data=zero1"]
    layout = _scenario("llava-1.5-7b", *keys, "training.global_batch=24").layout
    assert (layout.dp, layout.encoder_ranks, layout.world_size) == (6, 2, 8)


def test_a_model_of_tokens_needs_its_sequence() -> None:
    mapping = {"model": "llama2-7b", "cluster": {"name": "dgx-h100", "gpus": 8}, "training": {"global_batch": 8}}
    with pytest.raises(InputError, match=r"training\.sequence: is missing; write sequence: 8192"):
        Scenario.from_mapping(mapping)


def test_a_batch_in_tokens_needs_a_sequence() -> None:
    mapping = {"model": "vit-l-16", "cluster": "dgx-h100", "training": {"global_batch": "1Mi tokens"}}
    with pytest.raises(InputError, match=r"training\.global_batch: '1Mi tokens' is in tokens"):
        Scenario.from_mapping(mapping)
