"""`--set` overrides change the file's mapping before validation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clustersim.common import data_files, input_files
from clustersim.common.errors import InputError
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.scenario import Scenario
from clustersim.scenario.overrides import apply_changes, apply_overrides
from clustersim.schedules.interleaved import Interleaved


def test_last_override_wins_and_input_is_unchanged(mapping: dict[str, Any]) -> None:
    changed = apply_overrides(mapping, ["layout.tp=2", "layout.tp=8"])
    assert (changed["layout"]["tp"], mapping["layout"]["tp"]) == (8, 4)


def test_values_are_yaml(mapping: dict[str, Any]) -> None:
    changed = apply_overrides(
        mapping, ["layout.order=[pp, tp, cp, dp]", "name=a b", "layout.dp=null", "training.fused=false"]
    )
    assert (changed["layout"]["order"], changed["name"]) == (["pp", "tp", "cp", "dp"], "a b")
    assert (changed["layout"]["dp"], changed["training"]["fused"]) == (None, False)


def test_shorthands_expand_before_keys_are_set() -> None:
    changed = apply_overrides({"cluster": "dgx-h100", "model": "my/config.json"}, ["cluster.gpus=8", "model.layers=2"])
    assert changed == {"cluster": {"name": "dgx-h100", "gpus": 8}, "model": {"path": "my/config.json", "layers": 2}}


def test_override_replaces_the_selected_variant(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(
        mapping, overrides=["schedule.interleaved.chunks=4", "layout.data.fsdp.prefetch=3"]
    )
    assert scenario.schedule == Interleaved(4)
    assert scenario.layout.data == FullyShard(prefetch=3, copies=True)


def test_override_keeps_options_of_the_same_variant(mapping: dict[str, Any]) -> None:
    mapping["layout"]["data"] = {"fsdp": {"prefetch": 3}}
    scenario = Scenario.from_mapping(mapping, overrides=["layout.data.fsdp.overlap=false"])
    assert scenario.layout.data == FullyShard(prefetch=3, overlap=False, copies=True)


@pytest.mark.parametrize("override", ["layout.tp", "=4", "layout..tp=4", ".=4"])
def test_an_override_without_key_or_value_shows_how_to_write_one(override: str) -> None:
    with pytest.raises(InputError, match=r"--set layout\.tp=4"):
        apply_overrides({}, [override])


def test_overrides_argument_of_all_loaders(mapping: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(mapping))
    changes = ["layout.tp=2", "layout.dp=16"]
    assert Scenario.from_mapping(mapping, changes).layout == Scenario.load(tmp_path / "plan.yaml", changes).layout
    assert Scenario.from_mapping(mapping, "training.microbatch=2").training.microbatch == 2


def test_invalid_yaml_and_path_through_scalar_are_rejected(mapping: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is not valid YAML"):
        apply_overrides(mapping, ["layout.tp=[1"])
    with pytest.raises(InputError, match=r"layout\.tp is 4, which has no keys"):
        apply_overrides(mapping, ["layout.tp.x=1"])


def test_to_mapping_round_trip_and_changed(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping, overrides=["layout.tp=2", "layout.dp=16"])
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    assert scenario.with_overrides("layout.tp=4", "layout.dp=null").layout.dp == 8


def test_empty_change_returns_the_same_scenario(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping)
    assert scenario.with_overrides() is scenario
    assert scenario.with_overrides([]) is scenario


@pytest.fixture
def scenario_with_files(tmp_path: Path, mapping: dict[str, Any]) -> Scenario:
    """A scenario that refers to a file of every kind; the framework file is the user's."""
    framework = data_files.find_file("frameworks", "pytorch").read_text(encoding="utf-8")
    (tmp_path / "software.yaml").write_text(framework, encoding="utf-8")
    mixed = {"accelerator": "h200-sxm-141gb", "node": 1}
    cost = {"record": "published/h100-sxm-80gb", "collectives": {"all_reduce": "ring"}}
    sections = {"framework": "software.yaml", "cost": cost, "cluster": {**mapping["cluster"], "mixed": mixed}}
    (tmp_path / "plan.json").write_text(json.dumps({**mapping, **sections}), encoding="utf-8")
    return Scenario.load(tmp_path / "plan.json")


SCENARIO_CHANGES = (
    "layout.tp=8",
    "layout.dp=4",
    "training.microbatch=2",
    "steps=2",
    "degradations.slow={gpu: 3, speed: 0.5}",
)


def test_changed_does_not_reread_unaffected_files(
    scenario_with_files: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Scenario.load(scenario_with_files.path, SCENARIO_CHANGES)

    def fail_on_read(path: Path, *_args: object, **_options: object) -> str:
        raise AssertionError(f"{path} is read")

    monkeypatch.setattr(input_files, "read_bytes", fail_on_read)
    changed = (
        scenario_with_files.with_overrides(*SCENARIO_CHANGES)
        .with_overrides("layout.tp=4", "layout.dp=8")
        .with_overrides(SCENARIO_CHANGES)
    )
    assert changed == expected
    assert changed.files == scenario_with_files.files
    for other in ("cluster.gpus=128", "framework=pytorch", "cost.record.file=published/a100-sxm-80gb"):
        with pytest.raises(AssertionError, match="is read"):
            scenario_with_files.with_overrides(other)


def test_changed_uses_the_file_contents_at_load_time(scenario_with_files: Scenario, tmp_path: Path) -> None:
    file = tmp_path / "software.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("none: 1.05", "none: 2.05"), encoding="utf-8")
    assert scenario_with_files.with_overrides("steps=2").framework == scenario_with_files.framework
    assert Scenario.load(tmp_path / "plan.json").framework != scenario_with_files.framework


def test_changes_from_python_equal_overrides(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping)
    changed = scenario.changed({"layout.tp": 8}, layout={"dp": 4}, training={"microbatch": 2}, steps=2)
    assert changed == scenario.with_overrides("layout.tp=8", "layout.dp=4", "training.microbatch=2", "steps=2")
    assert changed.training.sequence == scenario.training.sequence  # the keys that a mapping does not name
    chunks = scenario.changed({"schedule": {"interleaved": {"chunks": 4}}}, layout={"data": {"fsdp": {"prefetch": 3}}})
    assert chunks.schedule == Interleaved(4)
    assert chunks.layout.data == FullyShard(prefetch=3, copies=True)
    assert scenario.changed() is scenario
    assert scenario.changed({"layout.dp": 4}, **{"layout.dp": 8}) == scenario


def test_changed_values_are_plain_and_texts_are_not_parsed(mapping: dict[str, Any], tmp_path: Path) -> None:
    changes = {
        "layout.tp": np.int64(8),
        "degradations.slow": ({"gpu": np.arange(2), "speed": np.float64(0.5)},),
        "model.path": tmp_path,
        "name": "1e3",
        "layout.order": (),
        "cluster": {},
    }
    changed = apply_changes(mapping, changes)
    assert (changed["layout"]["tp"], type(changed["layout"]["tp"])) == (8, int)
    assert changed["degradations"]["slow"] == [{"gpu": [0, 1], "speed": 0.5}]
    assert (changed["model"]["path"], changed["name"]) == (str(tmp_path), "1e3")
    assert (changed["layout"]["order"], changed["cluster"]) == ([], {})
    named = Scenario.from_mapping(mapping).changed(name="on", layout={"tp": np.uint8(8), "dp": None})
    assert named.name == "on"
    assert Scenario.from_mapping(yaml.safe_load(yaml.safe_dump(named.to_mapping()))) == named


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout.pt": 4}, r"layout\.pt"),
        ({"layout": {"tp": "four"}}, r"layout\.tp"),
        ({"layout.tp": {"x": 1}}, r"layout\.tp is 4, which has no keys"),
        ({"layout..tp": 4}, r"layout\.\.tp.*dotted key"),
        ("layout.tp=4", r"give a mapping"),
    ],
)
def test_wrong_changes_are_input_errors(mapping: dict[str, Any], changes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Scenario.from_mapping(mapping).changed(changes)
