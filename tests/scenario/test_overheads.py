"""`training.overheads`: overrides of a framework's overheads."""

from collections.abc import Callable, Set
from dataclasses import fields
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.model.framework_files import load_framework
from clustersim.model.overheads import NO_OVERHEADS, Accumulation, LossReport, Overheads
from clustersim.model.training import ALL_FUSED, NONE_FUSED, FusedKernel
from clustersim.scenario.changes.training import without_overheads
from clustersim.scenario.config.overheads import OverheadsConfig

Refusal = Callable[..., str]

BASE_MAPPING: dict[str, Any] = {
    "model": {"family": "gpt", "layers": 4, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 1024},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "training": {"sequence": 256, "global_batch": 8},
    "framework": "megatron-2021",
}


def load_scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(BASE_MAPPING, overrides)


def test_config_has_all_overhead_fields() -> None:
    assert set(OverheadsConfig.model_fields) == {dataclass_field.name for dataclass_field in fields(Overheads)}


@pytest.mark.parametrize("name", data_files.list_names("frameworks"))
def test_default_overheads_are_the_frameworks(name: str) -> None:
    assert load_scenario(f"framework={name}").training.overheads == load_framework(name).overheads


def test_partial_overrides_keep_framework_defaults() -> None:
    changed = load_scenario(
        "training.overheads.zero_grad=false", "training.overheads.loss_averaging=step"
    ).training.overheads
    usual = load_framework("megatron-2021").overheads
    assert usual.zero_grad
    assert not changed.zero_grad
    assert changed.loss_averaging is LossReport.STEP
    assert changed.prescale_gradients is usual.prescale_gradients


def test_overheads_none_round_trip() -> None:
    none = load_scenario("training.overheads=none")
    assert none.training.overheads == NO_OVERHEADS
    assert Scenario.from_mapping(none.to_mapping()) == none


def test_fsdp2_copies_gradients_into_what_it_reduces() -> None:
    fsdp = ("framework=pytorch", "layout.tp=1", "layout.pp=1", "layout.sequence_parallel=false")
    copies = load_scenario(*fsdp, "layout.data={fsdp: {copies: true}}").training
    assert copies.accumulation is Accumulation.COPIED
    uncopied = (*fsdp, "layout.data={fsdp: {copies: false}}")
    assert load_scenario(*uncopied).training.accumulation is Accumulation.ADDED
    assert load_scenario(*uncopied, "framework=ideal").training.accumulation is Accumulation.FUSED


def test_wrong_overheads_suggest_the_nearest(refusal: Refusal) -> None:
    assert "did you mean added" in refusal("training.overheads.accumulation=add")
    assert "zero_grad" in refusal("training.overheads.zero_gra=true")


def test_invalid_framework_overheads_are_rejected(tmp_path: Any) -> None:
    text = data_files.find_file("frameworks", "megatron-2021").read_text()
    path = tmp_path / "mine.yaml"
    for old, new in (("accumulation: added", "accumulation: adding"), ("zero_grad: true", "zero_grad: 1")):
        path.write_text(text.replace(old, new))
        with pytest.raises(InputError, match="overheads"):
            load_framework(str(path))


SWITCHES = {
    "accumulation": "fused",
    "zero_grad": "false",
    "prescale_gradients": "false",
    "unscale_gradients": "false",
    "upcast_gradients": "false",
    "attention_copies": "false",
    "bias_adds": "false",
    "norm_weight_grad_kernel": "false",
    "loss_averaging": "never",
    "batch_transfer": "loaded",
}


def test_disabling_an_overhead_shortens_the_step() -> None:
    """On one pipeline stage the step is the sum of the work; averaging the loss needs two replicas."""
    two_gpus = ("cluster.gpus=2", "layout.tp=1", "layout.pp=1", "layout.sequence_parallel=false", "layout.data=ddp")
    fp16 = ("training.precision={compute: fp16, gradients: fp16}", "training.attention=standard")
    usual = load_scenario(*two_gpus, *fp16)
    times = {
        key: simulate(usual.with_overrides(f"training.overheads.{key}={value}")).step_time
        for key, value in SWITCHES.items()
    }
    step, without_any = (
        simulate(usual).step_time,
        simulate(usual.with_overrides("training.overheads=none")).step_time,
    )
    assert all(without_any < time < step for time in times.values()), times


def test_a_step_without_overheads_is_no_longer_where_gradients_are_copied() -> None:
    """FSDP copies gradients into the buffer that it reduces; without overheads they had been added, which is slower."""
    fsdp = load_scenario("cluster.gpus=8", "layout={data: fsdp}", "framework=transformers", "training.global_batch=16")
    assert simulate(without_overheads(fsdp)).step_time < simulate(fsdp).step_time


@pytest.mark.parametrize(
    ("value", "kinds"),
    [("true", ALL_FUSED), ("false", NONE_FUSED), ("[norm, optimizer]", {FusedKernel.NORM, FusedKernel.OPTIMIZER})],
)
def test_fused_kernels_are_all_none_or_a_list(value: str, kinds: Set[FusedKernel]) -> None:
    assert load_scenario(f"training.fused={value}").training.fused == kinds


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("[norm, optimiser]", r"training\.fused: 'optimiser' is unknown; .*optimizer"),
        ("7", r"training\.fused: 7.*true, false.*norm, rotary"),
    ],
)
def test_unknown_kinds_of_fused_kernels_are_rejected(value: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_scenario(f"training.fused={value}")
