import pytest

from clustersim.errors import InputError
from clustersim.workload.presets import PRESETS, preset
from clustersim.workload.transformer import parameters


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"there is no model 'lama3-8b'; did you mean llama3-8b\?"):
        preset("lama3-8b")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_source_and_its_own_name(name: str) -> None:
    assert PRESETS[name].source
    assert preset(name).name == name
    assert all(each.heads % each.kv_heads == 0 for each in preset(name).attentions)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_tiny_models_suit_a_laptop(name: str) -> None:
    assert 10e6 < parameters(preset(name)) < 100e6
