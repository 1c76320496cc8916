"""What the explorer page is told beside its tables: its steps are those of `simulate`."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.planning.explorer.explorer_data import build_exploration, build_exploration_tables
from clustersim.planning.explorer.scaling_studies import step_count
from clustersim.results.explorer_tables import ExplorerData, ScalingStudy
from tests.planning.explorer_scenarios import MIXTURES, few_choices

PLAN = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2},
    "training": {"sequence": 1024, "global_batch": 8},
}


@pytest.fixture(autouse=True)
def _few_choices() -> Iterator[None]:
    with few_choices():
        yield


@cache
def scenario() -> Scenario:
    return Scenario.from_mapping(PLAN)


@cache
def explored() -> tuple[ExplorerData, tuple[int, ...]]:
    told: list[int] = []
    return build_exploration(scenario(), told.append), tuple(told)


def study(name: str) -> ScalingStudy:
    return next(scaling_study for scaling_study in explored()[0].studies if scaling_study.name == name)


def test_every_simulated_step_is_told_once() -> None:
    assert explored()[1] == tuple(range(1, step_count(scenario()) + 1))


def test_the_scenario_is_in_every_study_as_it_is_simulated() -> None:
    expected = simulate(scenario())
    for scaling_study in explored()[0].studies:
        (own,) = [point for point in scaling_study.points if point.is_baseline]
        assert own.step_time == expected.step_time
        assert own.peak_memory == expected.peak_memory
        assert own.bubble_fraction == expected.to_json()["bubble_fraction"]
        assert own.tokens_per_gpu * 8 == pytest.approx(expected.tokens_per_second)


def test_the_scenario_s_own_step_is_that_of_every_study() -> None:
    found = explored()[0].baseline
    assert found is not None
    assert found == next(point for point in study("weak").points if point.is_baseline)


def test_scaling_keeps_what_it_says() -> None:
    """Weak: as much work for each GPU, about as long a step; strong: the same work, all the faster with more GPUs."""
    weak = [point for point in study("weak").points if not point.missing_reason]
    strong = [point for point in study("strong").points if not point.missing_reason]
    assert len(weak) >= 3
    assert len(strong) >= 3
    assert [point.step_time for point in weak] == pytest.approx([weak[0].step_time] * len(weak), rel=0.2)
    rates = [point.tokens_per_gpu * point.gpus for point in strong]
    assert rates == sorted(rates)


def test_steps_that_cannot_be_are_listed_with_their_reason() -> None:
    small = Scenario.from_mapping(PLAN, ["cluster=laptop", "layout={dp: 2}", "training.global_batch=2"])
    missing = {
        point.gpus: point.missing_reason for point in build_exploration(small).studies[0].points if point.missing_reason
    }
    assert set(missing) == {4, 8}
    assert all("GPUs do not fit" in reason for reason in missing.values())


def test_too_many_passes_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fewer GPUs the same batch is more microbatches; the scenario's own are always simulated."""
    monkeypatch.setattr("clustersim.planning.explorer.scaling_studies.MAX_STUDY_PASSES", 4)
    strong = next(
        scaling_study for scaling_study in build_exploration(scenario()).studies if scaling_study.name == "strong"
    )
    assert [point.gpus for point in strong.points if "passes" in point.missing_reason] == [4]


@pytest.mark.parametrize(
    "changes",
    [
        ["cluster.gpus=1", "layout={}"],
        ["cluster.gpus=8", "layout={dp: 8, data: data_parallel}"],
        ["schedule=zb-1p"],
        ["schedule={orders: {rows: ['0F0,0F1,0B0,0B1', '1F0,1B0,1F1,1B1']}}", "training.global_batch=4"],
        ["model=llama3-405b", "layout={dp: 8}"],
    ],
    ids=["one GPU", "one process", "zero bubble", "a written order", "fits nowhere"],
)
def test_any_scenario_can_be_explored(changes: list[str]) -> None:
    asked = Scenario.from_mapping(PLAN, changes)
    found = build_exploration(asked)
    assert any(
        point.is_baseline and not point.missing_reason
        for scaling_study in found.studies
        for point in scaling_study.points
    )
    assert bool(found.notes) == (changes[0].startswith("schedule") or "data_parallel" in changes[-1])
    start = found.start
    assert all(value in found.choices[key] for key, value in start.items())
    assert start["schedule"] in {"1f1b", "gpipe", "interleaved", "bfs"}


@pytest.mark.parametrize("cluster", ["dgx-h100", "llama3-roce", "laptop"])
def test_tiers_are_the_fabrics(cluster: str) -> None:
    """Of random groups: the first tier in one of whose units they all are is what the fabric says."""
    gpus = 2 if cluster == "laptop" else 2048
    asked = Scenario.from_mapping(
        PLAN, [f"cluster={{name: {cluster}, gpus: {gpus}}}", "layout={}", "training.global_batch=4096"]
    )
    machine = build_exploration_tables(asked).machine
    chance = np.random.default_rng(0)
    for reach in (2, 8, 64, 1024, gpus):
        for _ in range(20):
            low = int(chance.integers(0, max(1, gpus - reach)))
            group = np.unique(chance.integers(low, min(gpus, low + reach), size=3))
            if len(group) > 1:
                inside = [name for name, unit in machine.levels if len(np.unique(unit[group])) == 1]
                assert (inside or [machine.top])[0] == asked.cluster.fabric.highest_tier(group)


def test_sizes_are_those_that_the_cluster_can_have() -> None:
    sizes = build_exploration_tables(scenario()).choices["gpus"]
    assert list(sizes) == sorted(set(sizes))
    assert all(size <= 8 or size % 8 == 0 for size in sizes)
    assert {1, 8, 1024} <= set(sizes)


@pytest.mark.parametrize(
    ("placement", "nodes", "largest"),
    [("{per_node: 4}", [0, 0, 0, 0, 1, 1, 1, 1], 1024), ("{order: [8, 9, 0-5]}", [1, 1, 0, 0, 0, 0, 0, 0], 8)],
)
def test_ranks_are_drawn_where_the_scenario_places_them(placement: str, nodes: list[int], largest: int) -> None:
    """More GPUs than the scenario's are offered where the placement says which they would be."""
    found = build_exploration_tables(scenario().with_overrides(f"cluster.placement={placement}"))
    (tier, unit), *_ = found.machine.levels
    assert tier == "nvlink"
    assert unit[:8].tolist() == nodes
    assert len(unit) == largest
    assert any("cluster.placement" in note for note in found.notes)


@pytest.mark.parametrize(("cluster", "said"), [("gb200-nvl72", True), ("dgx-h100", False)])
def test_sizes_that_use_other_parts_of_each_domain_are_said(cluster: str, said: bool) -> None:
    """1,024 GPUs are on 15 racks, which takes all 72 of most; 128 are on two, 64 of each."""
    found = build_exploration_tables(scenario().with_overrides(f"cluster.name={cluster}"))
    assert found.choices["gpus"][-1] == 1024
    assert any("72 GPUs of each that the largest size offered, 1,024" in note for note in found.notes) == said


def test_steps_of_other_places_of_experts_are_those_that_run_simulates() -> None:
    asked = Scenario.from_mapping(MIXTURES["mixed"])
    (found,) = [scaling_study for scaling_study in build_exploration(asked).studies if scaling_study.name == "experts"]
    assert [point.label for point in found.points if point.is_baseline] == ["ep 4, alltoall"]
    simulated = {point.label: point.step_time for point in found.points if not point.missing_reason}
    changes = {"ep 8, alltoall": "layout.ep=8", "ep 4, deepep": "layout.dispatcher=deepep"}
    for label, change in changes.items():
        assert simulated[label] == simulate(asked.with_overrides(change)).step_time
    assert len({*simulated.values()}) == len(simulated)
    assert "16" in next(point.missing_reason for point in found.points if point.label.startswith("ep 16"))
