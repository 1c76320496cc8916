"""Scenario files: YAML and JSON are equivalent, paths are relative to the file, every error names the file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.scenario import Scenario

HF_LLAMA_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def write(path: Path, mapping: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(mapping) if path.suffix == ".yaml" else json.dumps(mapping))
    return path


def test_yaml_and_json_are_the_same_scenario(tmp_path: Path, mapping: dict[str, Any]) -> None:
    first, second = (Scenario.load(write(tmp_path / f"plan{suffix}", mapping)) for suffix in (".yaml", ".json"))
    assert (first.name, first.path) == ("plan", tmp_path / "plan.yaml")
    assert (first.model, first.layout, first.training) == (second.model, second.layout, second.training)


def test_model_path_is_relative_to_the_scenario(tmp_path: Path, mapping: dict[str, Any]) -> None:
    write(tmp_path / "config.json", HF_LLAMA_CONFIG)
    mapping["model"] = "config.json"
    scenario = Scenario.load(write(tmp_path / "plan.yaml", mapping), ["model.layers=6"])
    assert (scenario.model.layer_count, scenario.model.hidden) == (6, 256)


def test_bad_model_file_is_named(tmp_path: Path, mapping: dict[str, Any]) -> None:
    mapping["model"] = "config.json"
    plan, config = write(tmp_path / "plan.yaml", mapping), tmp_path / "config.json"
    for text, reason in (
        (None, "cannot be read"),
        (json.dumps(HF_LLAMA_CONFIG)[:40], "is not valid JSON"),
        (json.dumps({**HF_LLAMA_CONFIG, "model_type": "resnet"}), "resnet"),
    ):
        if text is not None:
            config.write_text(text)
        with pytest.raises(InputError, match=reason) as caught:
            Scenario.load(plan)
        assert "plan.yaml: model: " in str(caught.value)
        assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model: [", "is not valid YAML"),
        ("- 1\n- 2", "holds a list, not a mapping"),
        ("", "is empty"),
        ("# only a comment", "holds nothing, not a mapping"),
        ("llama", "holds a text, not a mapping"),
        ("model: a\ncluster: b\nmodel: c", "model is given twice, in lines 1 and 3"),
        ("model: [", r"is not valid YAML: .* in line 2, column 1$"),
    ],
)
def test_non_mapping_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=reason) as caught:
        Scenario.load(path)
    assert "plan.yaml" in str(caught.value)
    with pytest.raises(InputError, match="cannot be read"):
        Scenario.load(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("num_hidden_layers", 10**9, "model.layers: 1,000,000,000 of .* is too large; 10,000 is the most"),
        ("hidden_size", 10**18, "model.hidden: .* is too large; 16,777,216 is the most"),
        ("max_position_embeddings", 10**12, "model.max_positions: .* is too large"),
    ],
)
def test_model_file_dimension_limits(
    tmp_path: Path, mapping: dict[str, Any], key: str, value: int, sentence: str
) -> None:
    write(tmp_path / "config.json", {**HF_LLAMA_CONFIG, key: value})
    mapping["model"] = "config.json"
    with pytest.raises(InputError, match=sentence):
        Scenario.load(write(tmp_path / "plan.yaml", mapping))


def test_scenario_files_lists_all_inputs(tmp_path: Path, mapping: dict[str, Any]) -> None:
    (tmp_path / "llama").mkdir()
    write(tmp_path / "llama" / "config.json", HF_LLAMA_CONFIG)
    shutil.copy(data_files.find_file("accelerators", "h100-sxm-80gb"), tmp_path / "chip.yaml")
    mapping["model"] = {"path": "llama"}
    mapping["cluster"] |= {"accelerator": "chip.yaml"}
    files = Scenario.load(write(tmp_path / "plan.yaml", mapping)).files
    assert {tmp_path / "llama" / "config.json", tmp_path / "chip.yaml"} < set(files)
