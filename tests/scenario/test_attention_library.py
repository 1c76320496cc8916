"""A library of flash attention is accepted where rates of it are known."""

from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.scenario import Scenario

SCENARIO: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 2},
    "layout": {"tp": 1},
    "training": {"sequence": 1024, "global_batch": 8, "microbatch": 1},
}


def scenario_with(cluster: str, attention: str) -> dict[str, Any]:
    return SCENARIO | {
        "cluster": {"name": cluster, "gpus": 8},
        "training": SCENARIO["training"] | {"attention": attention},
    }


@pytest.mark.parametrize("attention", ["flash", "sdpa", "cudnn", "flash3", "flash2", "flash1", "standard"])
def test_every_library_runs_on_hopper(attention: str) -> None:
    assert Scenario.from_mapping(scenario_with("dgx-h100", attention)).training.attention.value == attention


@pytest.mark.parametrize(
    ("cluster", "attention", "sentence"),
    [
        ("hgx-b200", "flash3", "flash3 on b200-sxm-180gb.*flash, sdpa, flash2, flash4, cudnn, flash1"),
        ("dgx-a100", "cudnn", r"training\.attention:.*cudnn on a100-sxm-80gb.*flash, sdpa, flash2"),
    ],
)
def test_a_library_without_known_rates_is_refused(cluster: str, attention: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Scenario.from_mapping(scenario_with(cluster, attention))
