import pytest

from clustersim.common.errors import InputError
from clustersim.model.presets import code_presets, load_preset
from clustersim.model.transformer import parameter_count


def test_an_unknown_name_is_rejected_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"there is no model 'lama3-8b'; did you mean llama3-8b\?"):
        load_preset("lama3-8b")


@pytest.mark.parametrize("name", code_presets())
def test_every_preset_has_a_source_and_its_own_name(name: str) -> None:
    assert code_presets()[name].source
    assert load_preset(name).name == name
    assert all(
        distinct_attention.heads % distinct_attention.kv_heads == 0
        for distinct_attention in load_preset(name).distinct_attentions
    )


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_tiny_models_have_10_to_100_million_parameters(name: str) -> None:
    assert 10e6 < parameter_count(load_preset(name)) < 100e6
