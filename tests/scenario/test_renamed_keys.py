"""Renamed keys of the scenario file: refused, with the new name, in files and with `--set`."""

from typing import Any

import pytest

from clustersim import Scenario
from clustersim.common.errors import InputError
from clustersim.common.renamed_keys import RENAMED_KEYS, SCENARIO, renamed_key_message
from clustersim.scenario.config.scenario import ScenarioConfig

MAPPING: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "training": {"sequence": 2048, "global_batch": 8},
}
ROWS = pytest.mark.parametrize(("old_path", "new_key"), RENAMED_KEYS[SCENARIO].items())
USER_NAME = "chosen-name"  # for `*`
REQUIRED_KEYS = {"model.stack": {"layers": 32}}


def _location(old_path: str) -> list[str]:
    return [USER_NAME if key == "*" else key for key in old_path.split(".")]


def _nested(old_path: str, value: object) -> dict[str, Any]:
    """A mapping with a value at the path; an entry of a list stands for the list."""
    keys = _location(old_path)
    for depth in reversed(range(len(keys))):
        section = ".".join(keys[:depth])
        value = {**REQUIRED_KEYS.get(section, {}), keys[depth]: value}
        if section == "model.stack":
            value = [value]
    return value  # type: ignore[return-value]


def _dotted(old_path: str) -> str:
    return ".".join(_location(old_path)).replace("model.stack.", "model.stack.0.")


@ROWS
def test_new_key_exists_and_old_one_does_not(old_path: str, new_key: str) -> None:
    *section, old_key = _location(old_path)
    model = ScenarioConfig.config_at(section)
    assert model is not None
    assert new_key in model.key_types()
    assert old_key not in model.key_types()


@ROWS
def test_old_key_of_a_file_is_refused_with_its_new_name(old_path: str, new_key: str) -> None:
    nested = _nested(old_path, 1)
    (section,) = nested
    given = MAPPING.get(section, {})
    if isinstance(nested[section], dict):
        nested[section] = {**({"preset": given} if isinstance(given, str) else given), **nested[section]}
    with pytest.raises(InputError) as error:
        Scenario.from_mapping({**MAPPING, **nested})
    assert f"{_dotted(old_path)}: is called {new_key} since 0.3" in str(error.value)


@ROWS
def test_old_key_of_an_override_is_refused_with_its_new_name(old_path: str, new_key: str) -> None:
    if ".stack." in old_path:
        pytest.skip("an entry of a list is not set by its path")
    with pytest.raises(InputError) as error:
        Scenario.from_mapping(MAPPING, [f"{_dotted(old_path)}=1"])
    assert f"{_dotted(old_path)}: is called {new_key} since 0.3" in str(error.value)


def test_old_word_of_a_section_is_refused_with_its_new_name() -> None:
    with pytest.raises(InputError, match=r"layout.data: zero3_by_parameter is called deepspeed_zero3 since 0.3$"):
        Scenario.from_mapping(MAPPING, ["layout.data=zero3_by_parameter"])


def test_message_is_one_sentence() -> None:
    with pytest.raises(InputError) as error:
        Scenario.from_mapping({**MAPPING, "layout": {"tensor_overlap": True}})
    assert str(error.value).endswith("layout.tensor_overlap: is called tp_comm_overlap since 0.3")
    assert "\n" not in str(error.value)


def test_other_keys_are_not_renamed() -> None:
    assert renamed_key_message(SCENARIO, ["layout", "tp"]) is None
    assert renamed_key_message(SCENARIO, ["tensor_overlap"]) is None
    with pytest.raises(InputError, match=r"layout.tensor_overlab: unknown key; "):
        Scenario.from_mapping({**MAPPING, "layout": {"tensor_overlab": True}})
