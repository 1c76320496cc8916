"""Scenario changes: what they change, what they keep, and the keys in which two scenarios differ."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common import data_files
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CollectiveSample,
    DeviceInfo,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.model.training import FullRecompute
from clustersim.program.task import CollectiveType
from clustersim.scenario import Scenario
from clustersim.scenario.changes.diff import ChangedKey, changed_keys, changed_referenced_files
from clustersim.scenario.changes.health import with_slow_gpu
from clustersim.scenario.changes.links import (
    NETWORK_LINK_KINDS,
    network_link_kinds,
    nic_path_bottlenecks,
    nvlink_kinds,
    pcie_link_kinds,
    with_link_bandwidth,
    without_measured_collectives,
)
from clustersim.scenario.changes.training import (
    with_global_batch_factor,
    with_microbatch_size,
    with_recompute,
)
from tests.conftest import examples

BASE_MAPPING: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 4, "dp": 2, "data": "zero1"},
    "training": {"sequence": 4096, "global_batch": 16, "microbatch": 2},
}


def load_scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(BASE_MAPPING, overrides, default_name="small")


@examples(20)
@given(fraction=st.floats(0.05, 20.0))
def test_with_links_scales_only_the_given_kinds(fraction: float) -> None:
    plain = load_scenario()
    before, after = (
        variant.cluster.fabric.links for variant in (plain, with_link_bandwidth(plain, NETWORK_LINK_KINDS, fraction))
    )
    ratio = after.bandwidth / before.bandwidth
    changed = np.isin(before.kind, [LINK_KINDS.index(kind) for kind in NETWORK_LINK_KINDS])
    assert changed.any()
    assert not changed.all()
    assert ratio[changed] == pytest.approx(fraction)
    assert ratio[~changed] == pytest.approx(1.0)


def test_link_kinds_are_those_the_ranks_can_use() -> None:
    assert set(network_link_kinds(load_scenario())) <= set(NETWORK_LINK_KINDS)
    assert LinkKind.NIC in network_link_kinds(load_scenario())
    assert nvlink_kinds(load_scenario()) == (LinkKind.NVLINK,)
    assert pcie_link_kinds(load_scenario()) == ()
    one_node = load_scenario("layout={tp: 2, dp: 4}", "cluster.gpus=8")
    assert network_link_kinds(one_node) == ()
    single_gpu = load_scenario("layout={}", "cluster.gpus=1")
    assert network_link_kinds(single_gpu) == nvlink_kinds(single_gpu) == pcie_link_kinds(single_gpu) == ()


def test_changed_links_drop_measured_collectives() -> None:
    sample = CollectiveSample(
        CollectiveCall(CollectiveType.ALL_REDUCE, 1024.0, 2, 1), TimeStatistics(1e-4, 1e-4, 1e-4, 5)
    )
    conditions = MeasurementConditions(date="2026-01-01", command="", method="")
    record = CalibrationRecord(DeviceInfo("h100-sxm-80gb", "gpu"), conditions, collectives=(sample,))
    plain = load_scenario()
    plain = replace(plain, cost=replace(plain.cost, record=record))
    modelled = without_measured_collectives(plain)
    assert modelled.cost.record == replace(record, collectives=())
    assert with_link_bandwidth(plain, NETWORK_LINK_KINDS, 1.0).cost == modelled.cost
    assert without_measured_collectives(modelled) is modelled


def test_batch_microbatch_and_recompute_changes() -> None:
    plain = load_scenario()
    assert with_global_batch_factor(plain, 2).microbatch_count == 2 * plain.microbatch_count
    assert with_microbatch_size(plain, 1).microbatch_count == 2 * plain.microbatch_count
    assert with_microbatch_size(plain, 1).training.global_batch == plain.training.global_batch
    assert with_recompute(plain, FullRecompute()).training.recompute == FullRecompute()


def test_added_slow_gpu_is_central_and_keeps_other_slow_gpus() -> None:
    speeds = with_slow_gpu(load_scenario("degradations.slow={gpu: 1, speed: 0.5}"), 0.9).degradations.gpu_speeds(
        np.arange(16)
    )
    assert speeds[1] == 0.5
    assert speeds[8] == 0.9
    assert np.count_nonzero(speeds != 1.0) == 2
    assert with_slow_gpu(load_scenario(), 0.9, 5).degradations.gpu_speeds(np.arange(16))[5] == 0.9


def test_links_to_nics_limit_faster_nics() -> None:
    """63 GB/s of PCIe bound NICs of 50 GB/s from 1.26 times their bandwidth on."""
    assert nic_path_bottlenecks(load_scenario(), 1.25) == ()
    assert nic_path_bottlenecks(load_scenario(), 1.27) == (LinkKind.PCIE,)
    assert nic_path_bottlenecks(load_scenario("layout={}", "cluster.gpus=1"), 0.0) == ()


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ([], []),
        (["layout.cp=1", "schedule=1f1b", "training.precision=bf16", "training.recompute=none"], []),
        (["model={preset: llama3-8b, layers: 8}"], []),
        (["layout.tp=4", "layout.pp=2"], [("layout.tp", 2, 4), ("layout.pp", 4, 2)]),
        (["schedule=gpipe"], [("schedule", "1f1b", "gpipe")]),
        (
            ["schedule.interleaved.chunks=2"],
            [("schedule", "1f1b", "interleaved"), ("schedule.interleaved.chunks", None, 2)],
        ),
        (["layout.data=ddp"], [("layout.data", "zero", "ddp"), ("layout.data.zero.stage", 1, None)]),
        (["layout.data=zero2"], [("layout.data.zero.stage", 1, 2)]),
        (["layout.data.zero.bucket=25 MiB"], [("layout.data.zero.bucket", None, "25 MiB")]),
        (["training.attention=standard"], [("training.attention", "sdpa", "standard")]),
        (["degradations.jitter=1 %"], [("degradations.jitter.std", None, "1 %")]),
        (["degradations.slow={gpu: 9, speed: 0.8}"], [("degradations.slow", None, {"gpu": 9, "speed": 0.8})]),
        (["cost.collectives={all_reduce: ring}"], [("cost.collectives.all_reduce", None, "ring")]),
    ],
)
def test_changed_keys_compares_resolved_values(overrides: list[str], changes: list[Any]) -> None:
    assert changed_keys(load_scenario(), load_scenario(*overrides)) == tuple(ChangedKey(*change) for change in changes)
    reverse_changes = tuple(ChangedKey(key, second, first) for key, first, second in changes)
    assert sorted(changed_keys(load_scenario(*overrides), load_scenario()), key=str) == sorted(reverse_changes, key=str)


def scenario_with_framework_file(folder: Path, launch: str) -> Scenario:
    """A scenario whose `framework: mine.yaml` refers to a file of its own folder, with another launch time."""
    folder.mkdir()
    content = yaml.safe_load(data_files.find_file("frameworks", "pytorch").read_text())
    content["host"]["launch"] = launch
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    (folder / "plan.yaml").write_text(yaml.safe_dump({**BASE_MAPPING, "framework": "mine.yaml"}))
    return Scenario.load(folder / "plan.yaml")


def test_same_path_with_different_content_is_reported(tmp_path: Path) -> None:
    slow, fast, same_as_slow = (
        scenario_with_framework_file(tmp_path / name, launch)
        for name, launch in (("a", "9 us"), ("b", "2 us"), ("c", "9 us"))
    )
    assert changed_keys(slow, fast) == ()
    assert changed_referenced_files(slow, fast) == ["framework"]
    assert changed_referenced_files(slow, same_as_slow) == []
    assert changed_referenced_files(slow, load_scenario()) == []  # already reported as a changed key
