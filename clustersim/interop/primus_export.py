"""How does an experiment of AMD's Primus express a scenario? Export.

Megatron-LM's arguments (`megatron_export`) by their names in Python, as overrides of the model and the module that all
experiments have; what these set otherwise than the scenario is written out. How many nodes it runs on it does not say.
"""

from collections.abc import Mapping
from typing import Any, Final

import yaml

from clustersim.interop.megatron_export import Flag, flag_groups
from clustersim.interop.megatron_table import FLAG_BY_ARGUMENT
from clustersim.interop.primus_yaml import SWITCHED_OFF, VIRTUAL_STAGES, common_defaults
from clustersim.scenario import Scenario

_LINE_WIDTH: Final = 100
_ARGUMENT_BY_FLAG: Final[Mapping[str, str]] = {
    flag: name for name, flag in FLAG_BY_ARGUMENT.items() if name != VIRTUAL_STAGES
}
_ARGUMENT_TURNED_OFF: Final[Mapping[str, str]] = {flag: name for name, flag in SWITCHED_OFF.items()}


def primus_experiment(scenario: Scenario) -> str:
    """An experiment on Megatron-LM."""
    overrides: dict[str, Any] = {}
    for flag in (flag for group in flag_groups(scenario) for flag in group):
        name = _ARGUMENT_BY_FLAG.get(flag[0], flag[0].replace("-", "_"))
        if name in _ARGUMENT_TURNED_OFF:
            overrides[_ARGUMENT_TURNED_OFF[name]] = False
        else:
            overrides[name] = _value(flag)
    for name, value in common_defaults().items():
        if isinstance(value, bool):
            overrides.setdefault(name, not value)
    trainer = {
        "framework": "megatron",
        "config": "pre_trainer.yaml",
        "model": "language_model.yaml",
        "overrides": overrides,
    }
    content = {
        "work_group": "clustersim",
        "user_name": "clustersim",
        "exp_name": "clustersim",
        "workspace": "./output",
        "modules": {"pre_trainer": trainer},
    }
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=False, width=_LINE_WIDTH)


def _value(flag: Flag) -> Any:
    """The values of a flag as one of YAML: true for none, a list for several."""
    values = flag[1].split(",") if flag[0] == "window-size" else flag[1:]
    plain = [int(value) if value.isdecimal() else value for value in values]
    return True if not plain else plain[0] if len(plain) == 1 else plain
