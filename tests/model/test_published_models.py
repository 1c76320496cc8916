"""Models that are packaged as dimensions of their config.json have their published numbers of parameters."""

from dataclasses import replace

import pytest

from clustersim.model.presets import all_presets, code_presets, load_preset
from clustersim.model.published_models import PublishedModel, published_models
from clustersim.model.transformer import mtp_parameter_count, parameter_count

_DIFFERENT: dict[str, int] = {
    "gpt-j-6b": 28 * 4096,  # biases of attention's output, which it has not
    "phi3.5-moe": -32 * 4096,  # biases of attention's output, which it has
    "apertus-8b": -2 * 32,  # two scalars of each layer's xIELU
    "chatglm3-6b": -32,  # rotary frequencies, which its weights contain
}
"""Parameters that the model's operators have more than the published count (`hf_gpt_like`, `hf_renamed`)."""


def _rounding(published: int) -> int:
    """Half a unit of the last digit that is given: numbers with zeros at their end are rounded."""
    digits = str(published)
    zeros = len(digits) - len(digits.rstrip("0"))
    return 10**zeros // 2 if zeros >= 6 else 0


@pytest.mark.parametrize("model", published_models().values(), ids=published_models())
def test_parameters_are_the_published_ones(model: PublishedModel) -> None:
    preset = model.preset
    whole = replace(preset.model, mtp_layers=preset.mtp_layers)
    count = parameter_count(preset.model) + (mtp_parameter_count(whole) if preset.mtp_layers else 0)
    difference = count - _DIFFERENT.get(model.name, 0) - model.parameters
    assert abs(difference) <= _rounding(model.parameters)


def test_each_name_is_one_model() -> None:
    assert not set(code_presets()) & set(published_models())
    assert set(all_presets()) == set(code_presets()) | set(published_models())
    assert load_preset("qwen2.5-14b").name == "qwen2.5-14b"
    repositories = [model.repository for model in published_models().values()]
    assert len(set(repositories)) == len(repositories)


@pytest.mark.parametrize(
    ("published", "half_unit"), [(7_300_000_000, 50_000_000), (6_738_415_616, 0), (1_100_048_384, 0)]
)
def test_a_published_number_says_how_far_it_is_rounded(published: int, half_unit: int) -> None:
    assert _rounding(published) == half_unit
