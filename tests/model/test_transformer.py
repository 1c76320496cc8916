"""Parameter counts against published ones, none of them computed with our formula."""

from dataclasses import replace

import pytest

from clustersim.model.presets import code_presets, load_preset
from clustersim.model.transformer import (
    embedding_parameter_count,
    head_parameter_count,
    layer_parameter_count,
    matrix_parameter_count,
    parameter_count,
)

# Total elements of the safetensors files on the Hugging Face hub (model cards).
_RELEASED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
}

# Narayanan et al. 2021 Table 1, "number of parameters (billion)"; Korthikanti et al. 2022 Table 3 (22B).
_PRINTED_BILLIONS = {
    "megatron-1.7b": 1.7,
    "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5,
    "megatron-18.4b": 18.4,
    "megatron-39.1b": 39.1,
    "megatron-76.1b": 76.1,
    "megatron-145.6b": 145.6,
    "megatron-310.1b": 310.1,
    "megatron-530b": 529.6,
    "megatron-1t": 1008.0,
    "gpt3-175b": 174.6,  # Table 2
}


@pytest.mark.parametrize(("name", "count"), _RELEASED.items())
def test_parameters_are_those_of_the_released_weights(name: str, count: int) -> None:
    assert parameter_count(load_preset(name)) == count


@pytest.mark.parametrize(("name", "billions"), _PRINTED_BILLIONS.items())
def test_megatron_models_round_to_the_printed_size(name: str, billions: float) -> None:
    assert round(parameter_count(load_preset(name)) / 1e9, 1) == billions


@pytest.mark.parametrize(("name", "embedding", "other"), [("nemotron4-15b", 3.2, 12.5), ("nemotron4-340b", 9.4, 331.6)])
def test_nemotron_embedding_and_other_parameters_are_as_printed(name: str, embedding: float, other: float) -> None:
    """arXiv:2402.16819 section 2 and arXiv:2406.11704 Table 1 count both tables as embeddings."""
    model = load_preset(name)
    tables = 2 * embedding_parameter_count(model)
    assert round((parameter_count(model) - tables) / 1e9, 1) == other
    assert abs(tables / 1e9 - embedding) < 0.06


@pytest.mark.parametrize("name", [name for name in code_presets() if name.startswith("megatron")])
def test_gpt_follows_narayanans_equation_2(name: str) -> None:
    """P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12lh)); the equation leaves out the final norm (2h)."""
    model = load_preset(name)
    layers, hidden = model.layer_count, model.hidden
    counted = 12 * layers * hidden**2 + 13 * layers * hidden + (model.vocab + model.max_positions) * hidden
    assert parameter_count(model) == counted + 2 * hidden


@pytest.mark.parametrize("name", code_presets())
def test_components_sum_to_the_model(name: str) -> None:
    model = load_preset(name)
    layer_counts = sum(run.count * layer_parameter_count(model, run.spec) for run in model.stack)
    encoder = 0 if model.encoder is None else parameter_count(model.encoder.model)
    ends = embedding_parameter_count(model) + head_parameter_count(model)
    assert parameter_count(model) == layer_counts + ends + encoder


def test_tied_embeddings_are_counted_once() -> None:
    model = load_preset("llama3-8b")
    tied = replace(model, tied_embeddings=True)
    assert parameter_count(model) - parameter_count(tied) == model.vocab * model.hidden
    assert matrix_parameter_count(model) == matrix_parameter_count(tied)
