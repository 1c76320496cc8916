"""The page of the manual that lists all keys is what the command prints, and no cell of it is empty."""

import re
from pathlib import Path

import pytest

from clustersim.scenario import schema
from clustersim.scenario.config_reader import ConfigModel
from clustersim.scenario.key_reference import render_key_reference
from tests.cli.conftest import Run

PAGE = Path(__file__).parents[2] / "docs" / "scenario-keys.md"
ROW = re.compile(r"^\| `(\S+)` \| (.+?) \| (.+?) \| (.+) \|$")


def test_the_page_is_what_the_command_prints(clustersim: Run) -> None:
    """Where this fails: `clustersim schema --markdown > docs/scenario-keys.md`."""
    assert clustersim("schema", "--markdown").stdout == PAGE.read_text(encoding="utf-8")


def tables() -> dict[str, dict[str, tuple[str, str, str]]]:
    """By section and key: values, what holds where it is left out, meaning."""
    found = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        rows = [line for line in part.splitlines() if line.startswith("| `")]
        cells = [match.groups() for match in map(ROW.match, rows) if match]
        assert len(cells) == len(rows), part.splitlines()[0]
        found[part.splitlines()[0]] = {key: (legal, left_out, meaning) for key, legal, left_out, meaning in cells}
    return found


def test_it_has_a_table_for_every_section_of_a_file_and_a_row_for_every_key() -> None:
    from clustersim.scenario.config.scenario import ScenarioConfig

    found = tables()
    assert found.pop("the file").keys() == ScenarioConfig.key_types().keys()
    for path, rows in found.items():
        section = ScenarioConfig.config_at([*path.split(".")])
        assert section is not None, path
        assert rows.keys() == section.key_types().keys(), path
    assert {*ScenarioConfig.key_types()} - {"name", "steps"} <= found.keys()


def test_defaults_and_legal_values_are_those_that_sections_have() -> None:
    found = tables()
    assert found["layout"]["tp"][:2] == ("1 to 1,048,576", "`1`")
    assert found["layout.data.ddp"]["bucket"][:2] == ("a size with its unit, or megatron, such as `25 MiB`", "`25 MiB`")
    assert found["disturbances.slow"]["speed"][0].startswith("a share: 0.001 to 1, or 0.1 % to 1,000 %")
    assert found["training"]["sequence"][1] == "needed"
    assert found["cost"]["network"][:2] == ("`uncontended`, `shared`", "`shared`")


def test_defaults_that_words_tell_are_values_that_the_file_may_have() -> None:
    """Where a key's words tell a default of their own, a file that says it is read like one that does not."""
    from clustersim.scenario import Scenario

    given = {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {"tp": 8},
        "training": {"sequence": 8192, "global_batch": 16},
    }
    plain = Scenario.from_mapping(given)
    said = {
        "layout": ["order=[tp, cp, dp, pp]", "data=ddp", "layers_per_stage=even", "dp=2"],
        "training": ["recompute=none", "offload=none", "lora=none", "expert_load=balanced"],
        "reliability": ["preset=typical", "rates=1"],
    }
    changes = [f"{section}.{change}" for section, item in said.items() for change in item]
    written = Scenario.from_mapping(given, overrides=["schedule=1f1b", *changes])
    assert (written.layout, written.training, written.schedule) == (plain.layout, plain.training, plain.schedule)
    assert written.reliability == plain.reliability


def test_a_key_without_words_is_refused() -> None:
    class Silent(ConfigModel):
        """A section."""

        said: int = 1
        """what it says"""
        unsaid: int = 2

    with pytest.raises(TypeError, match=r"Silent\.unsaid says nowhere what it means"):
        schema._key_descriptions(Silent)


def test_a_pipe_in_words_does_not_end_a_cell() -> None:
    key = {"type": "boolean", "default": True, "description": "one | other"}
    assert "| `a` | `true`, `false` | `true` | one \\| other |" in render_key_reference(
        {"properties": {"a": key}, "$defs": {}}
    )
