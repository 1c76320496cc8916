"""The manual's reference of all scenario keys equals the output of `clustersim schema --markdown`."""

import re
from pathlib import Path

import pytest

from clustersim.scenario import schema
from clustersim.scenario.config_reader import ConfigModel
from clustersim.scenario.key_reference import render_key_reference
from tests.cli.conftest import CommandRunner

KEYS_PAGE = Path(__file__).parents[2] / "docs" / "scenario-keys.md"
TABLE_ROW = re.compile(r"^\| `(\S+)` \| (.+?) \| (.+?) \| (.+) \|$")


def test_page_equals_the_command_output(clustersim: CommandRunner) -> None:
    """If this fails: `clustersim schema --markdown > docs/scenario-keys.md`."""
    assert clustersim("schema", "--markdown").stdout == KEYS_PAGE.read_text(encoding="utf-8")


def key_tables() -> dict[str, dict[str, tuple[str, str, str]]]:
    """By section and key: valid values, default, meaning."""
    tables_by_section = {}
    for section_text in KEYS_PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        rows = [line for line in section_text.splitlines() if line.startswith("| `")]
        cells = [match.groups() for match in map(TABLE_ROW.match, rows) if match]
        assert len(cells) == len(rows), section_text.splitlines()[0]
        tables_by_section[section_text.splitlines()[0]] = {
            key: (legal, left_out, meaning) for key, legal, left_out, meaning in cells
        }
    return tables_by_section


def test_reference_has_all_sections_and_keys() -> None:
    from clustersim.scenario.config.scenario import ScenarioConfig

    tables_by_section = key_tables()
    assert tables_by_section.pop("the file").keys() == ScenarioConfig.key_types().keys()
    for path, rows in tables_by_section.items():
        section = ScenarioConfig.config_at([*path.split(".")])
        assert section is not None, path
        assert rows.keys() == section.key_types().keys(), path
    assert {*ScenarioConfig.key_types()} - {"name", "steps"} <= tables_by_section.keys()


def test_reference_defaults_and_valid_values() -> None:
    tables_by_section = key_tables()
    assert tables_by_section["layout"]["tp"][:2] == ("1 to 1,048,576", "`1`")
    assert tables_by_section["layout.data.ddp"]["bucket"][:2] == (
        "a size with its unit, or megatron, such as `25 MiB`",
        "the framework's",
    )
    assert tables_by_section["degradations.slow"]["speed"][0].startswith("a share: 0.001 to 1, or 0.1 % to 1,000 %")
    assert tables_by_section["training"]["global_batch"][1] == "needed"
    assert tables_by_section["cost"]["network"][:2] == ("`uncontended`, `shared`", "`shared`")


def test_documented_defaults_equal_omitted_keys() -> None:
    """Writing the defaults that key descriptions state gives the same scenario as leaving the keys out."""
    from clustersim.scenario import Scenario

    mapping = {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {"tp": 8},
        "training": {"sequence": 8192, "global_batch": 16},
    }
    plain = Scenario.from_mapping(mapping)
    defaults = {
        "layout": ["order=[tp, cp, dp, pp]", "data=ddp", "layers_per_stage=even", "dp=2"],
        "training": ["recompute=none", "offload=none", "lora=none", "expert_load=balanced"],
        "reliability": ["preset=typical", "rates=1"],
    }
    changes = [f"{section}.{change}" for section, section_defaults in defaults.items() for change in section_defaults]
    with_defaults = Scenario.from_mapping(mapping, overrides=["schedule=1f1b", *changes])
    assert (with_defaults.layout, with_defaults.training, with_defaults.schedule) == (
        plain.layout,
        plain.training,
        plain.schedule,
    )
    assert with_defaults.reliability == plain.reliability


def test_key_without_description_is_rejected() -> None:
    class Silent(ConfigModel):
        """A section."""

        said: int = 1
        """what it says"""
        unsaid: int = 2

    with pytest.raises(TypeError, match=r"Silent\.unsaid says nowhere what it means"):
        schema._key_descriptions(Silent)


def test_pipes_in_descriptions_are_escaped() -> None:
    key = {"type": "boolean", "default": True, "description": "one | other"}
    assert "| `a` | `true`, `false` | `true` | one \\| other |" in render_key_reference(
        {"properties": {"a": key}, "$defs": {}}
    )
