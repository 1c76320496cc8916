"""Which precisions does the explorer page offer, and what does it note about those that it cannot draw?"""

from typing import Any

import pytest

from clustersim.planning.explorer import explorer_data
from clustersim.results.explorer_tables import ExplorerData
from clustersim.scenario import Scenario
from tests.planning.explorer_scenarios import LORA_SCENARIO, few_choices
from tests.sentences import parts

PLAIN = ("mixed precision, BF16", "BF16 with BF16 gradients", "FP32")


def explore_precision(cluster: str, precision: Any, **sections: Any) -> ExplorerData:
    mapping = {
        "model": "llama-tiny",
        "cluster": {"name": cluster, "gpus": 8},
        "layout": {"tp": 2, "dp": 4, "data": "zero1", "sequence_parallel": True},
        "training": {"sequence": 1024, "global_batch": 8, "precision": precision},
        **sections,
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
def test_the_common_recipes_of_the_accelerator_are_offered(
    cluster: str, framework: str, recipes: tuple[str, ...]
) -> None:
    assert explore_precision(cluster, "bf16", framework=framework).formats == (*PLAIN, *recipes)


def test_the_scenarios_recipe_comes_first() -> None:
    exploration = explore_precision("dgx-h100", "fp8", framework="megatron")
    assert exploration.formats == ("as in the scenario", *PLAIN, "recipe fp8-current")
    assert explore_precision("dgx-h100", "fp8-current", framework="megatron").formats == ("recipe fp8-current", *PLAIN)
    assert not [note for note in exploration.notes if "training.precision" in note]


def test_unsupported_recipe_settings_are_noted() -> None:
    exploration = explore_precision(
        "hgx-b200", {"compute": "mxfp8", "num_layers_at_start_in_bf16": 1, "gathered": "mxfp8"}
    )
    (note,) = [note for note in exploration.notes if note.startswith("Not drawn of training.precision")]
    assert parts("layers ... in bf16 ... kept or gathered in other formats").search(note)
    assert exploration.tables.sizes == explore_precision("hgx-b200", "mxfp8").tables.sizes


def test_no_recipes_are_offered_with_lora() -> None:
    with few_choices():
        assert not [
            name
            for name in explorer_data.build_exploration_tables(Scenario.from_mapping(LORA_SCENARIO)).formats
            if "recipe" in name
        ]
