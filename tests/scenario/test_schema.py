"""The schema of scenario files: what is a scenario it lets through, and what is a wrong key or word it does not."""

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
WHOLE, *PARTS = (
    yaml.safe_load(block)
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "scenario.md").read_text(), re.DOTALL)
)


ENTRIES = {
    "cluster.mixed",
    "disturbances.slow",
    "disturbances.links",
    "disturbances.nics",
    "disturbances.traffic",
    "disturbances.jobs",
    "disturbances.jobs.placement",
}


def wrong(mapping: dict[str, Any]) -> list[str]:
    """Dotted keys of what it marks."""
    return sorted({".".join(map(str, error.path)) for error in SCHEMA.iter_errors(mapping)})


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(scenario_schema())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_scenarios(path: Path) -> None:
    assert wrong(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize("part", [{}, *PARTS], ids=str)
def test_the_manual_has_scenarios(part: dict[str, Any]) -> None:
    assert wrong({**WHOLE, **part}) == []


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
                **WHOLE["training"],
                "recompute": {"modules": ["mlp"]},
                "lora": 16,
                "offload": {"optimizer": True},
            }
        },
        {"reliability": {"failures": {"gpu": None, "fan": {"rate": "1 per node-year", "effect": "hang"}}, "spares": 4}},
    ],
)
def test_shorthands_are_let_through(change: dict[str, Any]) -> None:
    assert wrong({**WHOLE, **change}) == []


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
def test_wrong_keys_and_words_are_marked(change: dict[str, Any], key: str) -> None:
    assert wrong({**WHOLE, **change}) == [key]


def test_every_section_says_what_it_is() -> None:
    assert all(_words(item) for item in scenario_schema()["$defs"].values())


def _words(section: dict[str, Any]) -> bool:
    return "description" in section or "enum" in section or any(map(_words, section.get("anyOf", [])))


def properties(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted keys of the schema, with what may stand there; nothing of what is in lists."""
    if "$ref" in node:
        yield from properties(SCHEMA.schema["$defs"][node["$ref"].rpartition("/")[2]], prefix)
    for item in node.get("anyOf", []):
        yield from properties(item, prefix)
    for key, value in node.get("properties", {}).items():
        yield f"{prefix}{key}", value
        yield from properties(value, f"{prefix}{key}.")


def test_the_keys_that_take_a_value_are_those_of_the_schema() -> None:
    """Leaves of the schema, but for choices without options and for entries of lists, of which one may stand alone.

    And what stands for its keys when it is a word.
    """
    every, keys = dict(properties(SCHEMA.schema)), set(dotted_keys())
    assert len(keys) == len(dotted_keys())
    leaves = {key for key in every if not any(other.startswith(f"{key}.") for other in every)}
    assert {key.rpartition(".")[0] for key in leaves - keys} == {"schedule", "layout.data", *ENTRIES}
    assert {"schedule.gpipe", "layout.data.data_parallel"} <= leaves - keys
    assert keys <= every.keys()
    assert {"cluster", "model", "schedule", "layout.data", "training.precision"} <= keys - leaves
    assert not {"layout", "training", "cost", "reliability.restart"} & keys
