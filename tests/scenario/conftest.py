"""Fixtures of the scenario tests: a valid scenario mapping, and the error message after overrides."""

from collections.abc import Callable
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.scenario import Scenario


@pytest.fixture
def mapping() -> dict[str, Any]:
    return {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 64},
        "layout": {"tp": 4, "pp": 2, "dp": 8},
        "schedule": "1f1b",
        "training": {"sequence": 8192, "global_batch": 128},
    }


@pytest.fixture
def refusal(mapping: dict[str, Any]) -> Callable[..., str]:
    """The InputError message of the valid scenario after some overrides."""

    def error_message(*overrides: str) -> str:
        with pytest.raises(InputError) as caught:
            Scenario.from_mapping(mapping, default_name="plan.yaml", overrides=overrides)
        return str(caught.value)

    return error_message
