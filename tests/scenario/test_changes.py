"""Changes of a scenario: what they change, what they leave, and what two scenarios say otherwise."""

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
    with_slow_gpu,
)
from tests.conftest import examples

SMALL: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 4, "dp": 2, "data": "zero1"},
    "training": {"sequence": 4096, "global_batch": 16, "microbatch": 2},
}


def scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(SMALL, overrides, default_name="small")


@examples(20)
@given(part=st.floats(0.05, 20.0))
def test_links_of_the_kinds_change_and_no_others(part: float) -> None:
    plain = scenario()
    before, after = (
        item.cluster.fabric.links for item in (plain, with_link_bandwidth(plain, NETWORK_LINK_KINDS, part))
    )
    ratio = after.bandwidth / before.bandwidth
    changed = np.isin(before.kind, [LINK_KINDS.index(kind) for kind in NETWORK_LINK_KINDS])
    assert changed.any()
    assert not changed.all()
    assert ratio[changed] == pytest.approx(part)
    assert ratio[~changed] == pytest.approx(1.0)


def test_links_are_those_that_the_ranks_can_use() -> None:
    assert set(network_link_kinds(scenario())) <= set(NETWORK_LINK_KINDS)
    assert LinkKind.NIC in network_link_kinds(scenario())
    assert nvlink_kinds(scenario()) == (LinkKind.NVLINK,)
    assert pcie_link_kinds(scenario()) == ()
    one_node = scenario("layout={tp: 2, dp: 4}", "cluster.gpus=8")
    assert network_link_kinds(one_node) == ()
    alone = scenario("layout={}", "cluster.gpus=1")
    assert network_link_kinds(alone) == nvlink_kinds(alone) == pcie_link_kinds(alone) == ()


def test_what_was_measured_on_the_links_as_they_are_does_not_stand_for_others() -> None:
    row = CollectiveSample(CollectiveCall(CollectiveType.ALL_REDUCE, 1024.0, 2, 1), TimeStatistics(1e-4, 1e-4, 1e-4, 5))
    conditions = MeasurementConditions(date="2026-01-01", command="", method="")
    record = CalibrationRecord(DeviceInfo("h100-sxm-80gb", "gpu"), conditions, collectives=(row,))
    plain = scenario()
    plain = replace(plain, cost=replace(plain.cost, record=record))
    modelled = without_measured_collectives(plain)
    assert modelled.cost.record == replace(record, collectives=())
    assert with_link_bandwidth(plain, NETWORK_LINK_KINDS, 1.0).cost == modelled.cost
    assert without_measured_collectives(modelled) is modelled


def test_work_changes_as_its_words_say() -> None:
    plain = scenario()
    assert with_global_batch_factor(plain, 2).microbatch_count == 2 * plain.microbatch_count
    assert with_microbatch_size(plain, 1).microbatch_count == 2 * plain.microbatch_count
    assert with_microbatch_size(plain, 1).training.global_batch == plain.training.global_batch
    assert with_recompute(plain, FullRecompute()).training.recompute == FullRecompute()


def test_a_slow_gpu_is_in_the_middle_and_beside_those_that_are_slow_already() -> None:
    speeds = with_slow_gpu(scenario("disturbances.slow={gpu: 1, speed: 0.5}"), 0.9).degradations.gpu_speeds(
        np.arange(16)
    )
    assert speeds[1] == 0.5
    assert speeds[8] == 0.9
    assert np.count_nonzero(speeds != 1.0) == 2
    assert with_slow_gpu(scenario(), 0.9, 5).degradations.gpu_speeds(np.arange(16))[5] == 0.9


def test_what_bounds_nics_is_slower_than_they_would_be() -> None:
    """63 GB/s of PCIe bound NICs of 50 GB/s from 1.26 times their bandwidth on."""
    assert nic_path_bottlenecks(scenario(), 1.25) == ()
    assert nic_path_bottlenecks(scenario(), 1.27) == (LinkKind.PCIE,)
    assert nic_path_bottlenecks(scenario("layout={}", "cluster.gpus=1"), 0.0) == ()


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
        (["training.attention=standard"], [("training.attention", "flash", "standard")]),
        (["disturbances.jitter=1 %"], [("disturbances.jitter.std", None, "1 %")]),
        (["disturbances.slow={gpu: 9, speed: 0.8}"], [("disturbances.slow", None, {"gpu": 9, "speed": 0.8})]),
        (["cost.collectives={all_reduce: ring}"], [("cost.collectives.all_reduce", None, "ring")]),
    ],
)
def test_two_scenarios_differ_by_what_their_keys_stand_for(overrides: list[str], changes: list[Any]) -> None:
    assert changed_keys(scenario(), scenario(*overrides)) == tuple(ChangedKey(*change) for change in changes)
    back = tuple(ChangedKey(key, second, first) for key, first, second in changes)
    assert sorted(changed_keys(scenario(*overrides), scenario()), key=str) == sorted(back, key=str)


def framework(folder: Path, launch: str) -> Scenario:
    """The same words for a file in another folder, which says another thing."""
    folder.mkdir()
    content = yaml.safe_load(data_files.find_file("frameworks", "pytorch").read_text())
    content["host"]["launch"] = launch
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    (folder / "plan.yaml").write_text(yaml.safe_dump({**SMALL, "framework": "mine.yaml"}))
    return Scenario.load(folder / "plan.yaml")


def test_a_file_that_both_name_by_the_same_words_and_that_differs_is_told(tmp_path: Path) -> None:
    slow, fast, again = (
        framework(tmp_path / name, launch) for name, launch in (("a", "9 us"), ("b", "2 us"), ("c", "9 us"))
    )
    assert changed_keys(slow, fast) == ()
    assert changed_referenced_files(slow, fast) == ["framework"]
    assert changed_referenced_files(slow, again) == []
    assert changed_referenced_files(slow, scenario()) == []  # a key says so already
