"""`--set` changes the file's mapping before anything is validated."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.scenario import Scenario
from clustersim.scenario.overrides import apply_overrides
from clustersim.schedules.interleaved import Interleaved


def test_the_last_override_wins_and_the_mapping_stays_as_it_was(mapping: dict[str, Any]) -> None:
    changed = apply_overrides(mapping, ["layout.tp=2", "layout.tp=8"])
    assert (changed["layout"]["tp"], mapping["layout"]["tp"]) == (8, 4)


def test_values_are_yaml(mapping: dict[str, Any]) -> None:
    changed = apply_overrides(
        mapping, ["layout.order=[pp, tp, cp, dp]", "name=a b", "layout.dp=null", "training.fused=false"]
    )
    assert (changed["layout"]["order"], changed["name"]) == (["pp", "tp", "cp", "dp"], "a b")
    assert (changed["layout"]["dp"], changed["training"]["fused"]) == (None, False)


def test_a_shorthand_is_written_out_before_a_key_in_it_is_set() -> None:
    changed = apply_overrides({"cluster": "dgx-h100", "model": "my/config.json"}, ["cluster.gpus=8", "model.layers=2"])
    assert changed == {"cluster": {"name": "dgx-h100", "gpus": 8}, "model": {"path": "my/config.json", "layers": 2}}


def test_setting_another_choice_replaces_the_old_one(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(
        mapping, overrides=["schedule.interleaved.chunks=4", "layout.data.fsdp.prefetch=3"]
    )
    assert scenario.schedule == Interleaved(4)
    assert scenario.layout.data == FullyShard(prefetch=3, copies=True)


def test_options_of_the_same_choice_are_kept(mapping: dict[str, Any]) -> None:
    mapping["layout"]["data"] = {"fsdp": {"prefetch": 3}}
    scenario = Scenario.from_mapping(mapping, overrides=["layout.data.fsdp.overlap=false"])
    assert scenario.layout.data == FullyShard(prefetch=3, overlap=False, copies=True)


@pytest.mark.parametrize("override", ["layout.tp", "=4", "layout..tp=4", ".=4"])
def test_an_override_without_key_or_value_shows_how_to_write_one(override: str) -> None:
    with pytest.raises(InputError, match=r"--set layout\.tp=4"):
        apply_overrides({}, [override])


def test_overrides_are_the_second_argument_wherever_a_scenario_is_read(mapping: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(mapping))
    changes = ["layout.tp=2", "layout.dp=16"]
    assert Scenario.from_mapping(mapping, changes).layout == Scenario.load(tmp_path / "plan.yaml", changes).layout
    assert Scenario.from_mapping(mapping, "training.microbatch=2").training.microbatch == 2


def test_a_value_that_is_no_yaml_and_a_path_through_a_number_are_refused(mapping: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is not valid YAML"):
        apply_overrides(mapping, ["layout.tp=[1"])
    with pytest.raises(InputError, match=r"layout\.tp is 4, which has no keys"):
        apply_overrides(mapping, ["layout.tp.x=1"])


def test_a_scenario_gives_the_mapping_that_makes_it_again_and_variants_of_it(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping, overrides=["layout.tp=2", "layout.dp=16"])
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    assert scenario.with_overrides("layout.tp=4", "layout.dp=null").layout.dp == 8


def test_a_change_of_nothing_is_the_same_scenario(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping)
    assert scenario.with_overrides() is scenario
    assert scenario.with_overrides([]) is scenario


@pytest.fixture
def named(tmp_path: Path, mapping: dict[str, Any]) -> Scenario:
    """A scenario that names a file of every kind; the framework's is the user's own."""
    framework = data_files.find_file("frameworks", "pytorch").read_text(encoding="utf-8")
    (tmp_path / "software.yaml").write_text(framework, encoding="utf-8")
    mixed = {"accelerator": "h200-sxm-141gb", "node": 1}
    cost = {"record": "published/h100-sxm-80gb", "collectives": {"all_reduce": "ring"}}
    wanted = {"framework": "software.yaml", "cost": cost, "cluster": {**mapping["cluster"], "mixed": mixed}}
    (tmp_path / "plan.json").write_text(json.dumps({**mapping, **wanted}), encoding="utf-8")
    return Scenario.load(tmp_path / "plan.json")


CHANGES = ("layout.tp=8", "layout.dp=4", "training.microbatch=2", "steps=2", "disturbances.slow={gpu: 3, speed: 0.5}")


def test_a_change_reads_no_file_again_that_it_leaves_alone(named: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Scenario.load(named.path, CHANGES)

    def refuse(path: Path, *_args: object, **_options: object) -> str:
        raise AssertionError(f"{path} is read")

    monkeypatch.setattr(Path, "read_text", refuse)
    changed = named.with_overrides(*CHANGES).with_overrides("layout.tp=4", "layout.dp=8").with_overrides(CHANGES)
    assert changed == wanted
    assert changed.files == named.files
    for other in ("cluster.gpus=128", "framework=pytorch", "cost.record.file=published/a100-sxm-80gb"):
        with pytest.raises(AssertionError, match="is read"):
            named.with_overrides(other)


def test_variants_are_of_the_files_that_the_scenario_was_read_from(named: Scenario, tmp_path: Path) -> None:
    file = tmp_path / "software.yaml"
    file.write_text(
        file.read_text(encoding="utf-8").replace("fragmentation: 1.", "fragmentation: 2."), encoding="utf-8"
    )
    assert named.with_overrides("steps=2").framework == named.framework
    assert Scenario.load(tmp_path / "plan.json").framework != named.framework
