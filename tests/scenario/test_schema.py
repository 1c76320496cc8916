"""The JSON schema of scenario files accepts valid scenarios and rejects wrong keys and values."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from clustersim.scenario.schema import dotted_keys, scenario_schema

ROOT = Path(__file__).parents[2]
SCHEMA = jsonschema.Draft202012Validator(scenario_schema())
MANUAL_SCENARIO, *MANUAL_SNIPPETS = (
    yaml.safe_load(block)
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "scenario.md").read_text(), re.DOTALL)
)


LIST_KEYS = {
    "cluster.mixed",
    "degradations.slow",
    "degradations.links",
    "degradations.nics",
    "degradations.traffic",
    "degradations.jobs",
    "degradations.jobs.placement",
    "diloco.away",
}


def invalid_keys(mapping: dict[str, Any]) -> list[str]:
    """Dotted keys that the schema rejects."""
    return sorted({".".join(map(str, error.path)) for error in SCHEMA.iter_errors(mapping)})


def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(scenario_schema())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_validate(path: Path) -> None:
    assert invalid_keys(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize("snippet", [{}, *MANUAL_SNIPPETS], ids=str)
def test_manual_snippets_validate(snippet: dict[str, Any]) -> None:
    assert invalid_keys({**MANUAL_SCENARIO, **snippet}) == []


@pytest.mark.parametrize(
    "change",
    [
        {"reliability": "llama3-2024"},
        {"schedule": "my.csv"},
        {"schedule": "my_module:Mine"},
        {"cluster": "dgx-h100"},
        {"model": {"path": "config.json"}},
        {"layout": {"data": {"hsdp": {"shard": 8}}, "layers_per_stage": [3, 4]}},
        {
            "training": {
                **MANUAL_SCENARIO["training"],
                "recompute": {"modules": ["mlp"]},
                "lora": 16,
                "offload": {"optimizer": True},
            }
        },
        {"reliability": {"failures": {"gpu": None, "fan": {"rate": "1 per node-year", "effect": "hang"}}, "spares": 4}},
    ],
)
def test_shorthands_validate(change: dict[str, Any]) -> None:
    assert invalid_keys({**MANUAL_SCENARIO, **change}) == []


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"layot": {}}, ""),
        ({"layout": {"tpp": 8}}, "layout"),
        ({"layout": {"tp": "eight"}}, "layout.tp"),
        ({"layout": {"dispatcher": "pigeons"}}, "layout.dispatcher"),
        ({"reliability": {"failures": {"gpu": {"effect": "explode"}}}}, "reliability"),
        ({"cost": {"network": "free"}}, "cost.network"),
        ({"steps": 0}, "steps"),
    ],
)
def test_wrong_keys_and_values_are_rejected(change: dict[str, Any], key: str) -> None:
    assert invalid_keys({**MANUAL_SCENARIO, **change}) == [key]


def test_all_definitions_have_a_description() -> None:
    assert all(_has_description(definition) for definition in scenario_schema()["$defs"].values())


def _has_description(section: dict[str, Any]) -> bool:
    return "description" in section or "enum" in section or any(map(_has_description, section.get("anyOf", [])))


def iter_properties(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted keys and subschemas of the schema; items of lists are not entered."""
    if "$ref" in node:
        yield from iter_properties(SCHEMA.schema["$defs"][node["$ref"].rpartition("/")[2]], prefix)
    for branch in node.get("anyOf", []):
        yield from iter_properties(branch, prefix)
    for key, value in node.get("properties", {}).items():
        yield f"{prefix}{key}", value
        yield from iter_properties(value, f"{prefix}{key}.")


def test_dotted_keys_match_the_schema() -> None:
    """`dotted_keys` are the schema's leaves, except choices without options and items of lists.

    Also the keys whose sections have a shorthand.
    """
    schema_properties, keys = dict(iter_properties(SCHEMA.schema)), set(dotted_keys())
    assert len(keys) == len(dotted_keys())
    leaves = {key for key in schema_properties if not any(other.startswith(f"{key}.") for other in schema_properties)}
    assert {key.rpartition(".")[0] for key in leaves - keys} == {"schedule", "layout.data", *LIST_KEYS}
    assert {"schedule.gpipe", "layout.data.data_parallel"} <= leaves - keys
    assert keys <= schema_properties.keys()
    assert {"cluster", "model", "schedule", "layout.data", "training.precision"} <= keys - leaves
    assert not {"layout", "training", "cost", "reliability.restart"} & keys
