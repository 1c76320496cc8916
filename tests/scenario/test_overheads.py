"""What a scenario says of overheads, over what its framework does."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.model.framework import load_framework
from clustersim.model.overheads import NO_OVERHEADS, Accumulation, LossReport, Overheads
from clustersim.scenario.config.overheads import OverheadsConfig

Refusal = Callable[..., str]

MAPPING: dict[str, Any] = {
    "model": {"family": "gpt", "layers": 4, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 1024},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "training": {"sequence": 256, "global_batch": 8},
    "framework": "megatron-2021",
}


def _scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(MAPPING, overrides)


def test_a_section_has_every_overhead() -> None:
    assert set(OverheadsConfig.model_fields) == {dataclass_field.name for dataclass_field in fields(Overheads)}


@pytest.mark.parametrize("name", data_files.list_names("frameworks"))
def test_a_scenario_does_what_its_framework_does(name: str) -> None:
    assert _scenario(f"framework={name}").training.overheads == load_framework(name).overheads


def test_what_a_scenario_names_is_changed_and_the_rest_is_the_framework_s() -> None:
    changed = _scenario("training.overheads.zeroing=false", "training.overheads.loss=step").training.overheads
    usual = load_framework("megatron-2021").overheads
    assert usual.zeroing
    assert not changed.zeroing
    assert changed.loss is LossReport.STEP
    assert changed.averaging is usual.averaging


def test_none_is_nothing_and_a_key_of_it_can_be_named_after() -> None:
    none = _scenario("training.overheads=none")
    assert none.training.overheads == NO_OVERHEADS
    assert Scenario.from_mapping(none.to_mapping()) == none


def test_fsdp2_copies_gradients_into_what_it_reduces() -> None:
    fsdp = ("framework=pytorch", "layout.tp=1", "layout.pp=1", "layout.sequence_parallel=false")
    copies = _scenario(*fsdp, "layout.data={fsdp: {copies: true}}").training
    assert copies.accumulation is Accumulation.COPIED
    assert _scenario(*fsdp, "layout.data={fsdp: {copies: false}}").training.accumulation is Accumulation.FUSED
    assert _scenario(*fsdp, "layout.data=ddp", "training.fused=false").training.accumulation is Accumulation.ADDED


def test_a_wrong_value_is_refused_with_the_nearest(refusal: Refusal) -> None:
    assert "did you mean added" in refusal("training.overheads.accumulation=add")
    assert "zeroing" in refusal("training.overheads.zeroin=true")


def test_a_framework_file_is_refused_where_it_says_what_cannot_be(tmp_path: Any) -> None:
    text = data_files.find_file("frameworks", "megatron-2021").read_text()
    path = tmp_path / "mine.yaml"
    for old, new in (("accumulation: added", "accumulation: adding"), ("zeroing: true", "zeroing: 1")):
        path.write_text(text.replace(old, new))
        with pytest.raises(InputError, match="overheads"):
            load_framework(str(path))


SWITCHES = {
    "accumulation": "fused", "zeroing": "false", "averaging": "false", "unscaling": "false", "widening": "false",
    "attention_copies": "false", "bias_adds": "false", "norm_twice": "false", "loss": "never", "batches": "loaded",
}  # fmt: skip


def test_every_switch_shortens_the_step_and_all_of_them_the_most() -> None:
    """On one GPU nothing but the sum of work counts; the loss is averaged between replicas only."""
    one = ("cluster.gpus=2", "layout.tp=1", "layout.pp=1", "layout.sequence_parallel=false", "layout.data=ddp")
    half = ("training.precision={compute: fp16, gradients: fp16}", "training.attention=standard")
    usual = _scenario(*one, *half)
    times = {
        key: simulate(usual.with_overrides(f"training.overheads.{key}={off}")).step_time
        for key, off in SWITCHES.items()
    }
    step, least = simulate(usual).step_time, simulate(usual.with_overrides("training.overheads=none")).step_time
    assert all(least < time < step for time in times.values()), times
