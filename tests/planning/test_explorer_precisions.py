"""Which number formats does the explorer page offer, and what does it say of those that it cannot draw?"""

from typing import Any

import pytest

from clustersim.planning.explorer import explorer_data
from clustersim.results.explorer_tables import ExplorerData
from clustersim.scenario import Scenario
from tests.planning.explorer_scenarios import ADAPTERS, few_choices

PLAIN = ("mixed precision, BF16", "BF16 with BF16 gradients", "FP32")


def explored(cluster: str, precision: Any, **more: Any) -> ExplorerData:
    mapping = {
        "model": "llama-tiny",
        "cluster": {"name": cluster, "gpus": 8},
        "layout": {"tp": 2, "dp": 4, "data": "zero1", "sequence_parallel": True},
        "training": {"sequence": 1024, "global_batch": 8, "precision": precision},
        **more,
    }
    with few_choices(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(explorer_data, "MODELS", ())
        return explorer_data.build_exploration_tables(Scenario.from_mapping(mapping))


@pytest.mark.parametrize(
    ("cluster", "framework", "recipes"),
    [
        ("dgx-a100", "megatron", ()),
        ("dgx-h100", "megatron", ("recipe fp8-current",)),
        ("dgx-h100", "pytorch", ("recipe fp8-rowwise",)),
        ("hgx-b200", "megatron", ("recipe fp8-current", "recipe mxfp8", "recipe nvfp4")),
    ],
)
def test_the_usual_recipes_of_the_accelerators_are_offered(
    cluster: str, framework: str, recipes: tuple[str, ...]
) -> None:
    assert explored(cluster, "bf16", framework=framework).formats == (*PLAIN, *recipes)


def test_the_scenario_s_own_recipe_comes_first() -> None:
    found = explored("dgx-h100", "fp8", framework="megatron")
    assert found.formats == ("as in the scenario", *PLAIN, "recipe fp8-current")
    assert explored("dgx-h100", "fp8-current", framework="megatron").formats == ("recipe fp8-current", *PLAIN)
    assert not [note for note in found.notes if "training.precision" in note]


def test_what_of_a_recipe_is_not_drawn_is_said() -> None:
    found = explored("hgx-b200", {"compute": "mxfp8", "first_layers": 1, "gathered": "mxfp8"})
    (note,) = [note for note in found.notes if note.startswith("of training.precision is not drawn")]
    assert "layers at the ends in bf16, matrices that are kept or gathered in other formats" in note
    assert found.tables.sizes == explored("hgx-b200", "mxfp8").tables.sizes


def test_no_recipes_are_offered_beside_adapters() -> None:
    with few_choices():
        assert not [
            name
            for name in explorer_data.build_exploration_tables(Scenario.from_mapping(ADAPTERS)).formats
            if "recipe" in name
        ]
