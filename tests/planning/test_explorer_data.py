"""Explorer data besides the tables: steps of the scaling studies are those of `simulate`."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.common.processes import worker_pool
from clustersim.common.units import format_bytes
from clustersim.planning.explorer.explorer_data import build_exploration, build_exploration_tables
from clustersim.planning.explorer.omissions import describe_omissions, drawn_scenario, without_mtp_layers
from clustersim.planning.explorer.scaling_studies import assemble_studies, step_tasks
from clustersim.results.explorer_tables import ExplorerData, ScalingStudy
from clustersim.results.memory_check import check, memory_timelines
from tests.planning.explorer_scenarios import MOE_SCENARIOS, few_choices

MAPPING = {
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
    return Scenario.from_mapping(MAPPING)


@cache
def explored_with_progress() -> tuple[ExplorerData, tuple[int, ...]]:
    progress: list[int] = []
    return build_exploration(scenario(), progress.append), tuple(progress)


def study(name: str) -> ScalingStudy:
    return next(study for study in explored_with_progress()[0].studies if study.name == name)


def test_progress_is_reported_once_per_simulated_step() -> None:
    assert explored_with_progress()[1] == tuple(range(1, len(step_tasks(scenario())) + 1))


@pytest.mark.slow
def test_steps_are_the_same_on_worker_processes() -> None:
    tasks = step_tasks(scenario())
    with worker_pool(2) as pool:
        simulated = {variant: pool.submit(task) for variant, task in tasks.items()}
        points = {variant: future.result() for variant, future in simulated.items()}
    assert assemble_studies(scenario(), points) == explored_with_progress()[0].studies


def test_the_scenario_is_in_every_study_as_it_is_simulated() -> None:
    expected = simulate(scenario())
    for scaling_study in explored_with_progress()[0].studies:
        (baseline,) = [point for point in scaling_study.points if point.is_baseline]
        assert baseline.step_time == expected.step_time
        assert baseline.peak_memory == expected.peak_memory
        assert baseline.bubble_fraction == expected.to_json()["bubble_fraction"]
        assert baseline.tokens_per_gpu * 8 == pytest.approx(expected.tokens_per_second)


def test_the_baseline_is_that_of_every_study() -> None:
    baseline = explored_with_progress()[0].baseline
    assert baseline is not None
    assert baseline == next(point for point in study("weak").points if point.is_baseline)


def test_weak_scaling_keeps_the_step_time_and_strong_scaling_raises_throughput() -> None:
    """Weak: constant work per GPU, nearly constant step time; strong: the same work, more throughput with more GPUs."""
    weak = [point for point in study("weak").points if not point.missing_reason]
    strong = [point for point in study("strong").points if not point.missing_reason]
    assert len(weak) >= 3
    assert len(strong) >= 3
    assert [point.step_time for point in weak] == pytest.approx([weak[0].step_time] * len(weak), rel=0.2)
    rates = [point.tokens_per_gpu * point.gpus for point in strong]
    assert rates == sorted(rates)


def test_impossible_points_are_listed_with_their_reason() -> None:
    small = Scenario.from_mapping(MAPPING, ["cluster=laptop", "layout={dp: 2}", "training.global_batch=2"])
    missing = {
        point.gpus: point.missing_reason for point in build_exploration(small).studies[0].points if point.missing_reason
    }
    assert set(missing) == {4, 8}
    assert all("GPUs do not fit" in reason for reason in missing.values())


def test_too_many_passes_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fewer GPUs the same batch is more microbatches; the baseline is always simulated."""
    monkeypatch.setattr("clustersim.planning.explorer.scaling_studies.MAX_STUDY_PASSES", 4)
    strong_study = next(
        scaling_study for scaling_study in build_exploration(scenario()).studies if scaling_study.name == "strong"
    )
    assert [point.gpus for point in strong_study.points if "passes" in point.missing_reason] == [4]


@pytest.mark.parametrize(
    "changes",
    [
        ["cluster.gpus=1", "layout={}"],
        ["cluster.gpus=8", "layout={dp: 8, data: data_parallel}"],
        pytest.param(["schedule=zb-1p"], marks=pytest.mark.slow),
        ["schedule={orders: {rows: ['0F0,0F1,0B0,0B1', '1F0,1B0,1F1,1B1']}}", "training.global_batch=4"],
        pytest.param(["model=llama3-405b", "layout={dp: 8}"], marks=pytest.mark.slow),
    ],
    ids=["one GPU", "one process", "zero bubble", "a written order", "fits nowhere"],
)
def test_any_scenario_can_be_explored(changes: list[str]) -> None:
    scenario_to_explore = Scenario.from_mapping(MAPPING, changes)
    exploration = build_exploration(scenario_to_explore)
    assert any(
        point.is_baseline and not point.missing_reason
        for scaling_study in exploration.studies
        for point in scaling_study.points
    )
    assert bool(exploration.notes) == (changes[0].startswith("schedule") or "data_parallel" in changes[-1])
    start = exploration.start
    assert all(value in exploration.choices[key] for key, value in start.items())
    assert start["schedule"] in {"1f1b", "gpipe", "interleaved", "bfs"}


@pytest.mark.parametrize("cluster", ["dgx-h100", "llama3-roce", "laptop"])
def test_network_tiers_match_the_fabric(cluster: str) -> None:
    """For random groups, the first tier one of whose units contains the group is the tier reported by the fabric."""
    gpus = 2 if cluster == "laptop" else 2048
    large_scenario = Scenario.from_mapping(
        MAPPING, [f"cluster={{name: {cluster}, gpus: {gpus}}}", "layout={}", "training.global_batch=4096"]
    )
    machine = build_exploration_tables(large_scenario).machine
    rng = np.random.default_rng(0)
    for spread in (2, 8, 64, 1024, gpus):
        for _ in range(20):
            low = int(rng.integers(0, max(1, gpus - spread)))
            group = np.unique(rng.integers(low, min(gpus, low + spread), size=3))
            if len(group) > 1:
                covering_tiers = [name for name, unit in machine.levels if len(np.unique(unit[group])) == 1]
                assert (covering_tiers or [machine.top])[0] == large_scenario.cluster.fabric.highest_tier(group)


def test_offered_sizes_are_multiples_of_a_node() -> None:
    sizes = explored_with_progress()[0].choices["gpus"]
    assert list(sizes) == sorted(set(sizes))
    assert all(size <= 8 or size % 8 == 0 for size in sizes)
    assert {1, 8, 1024} <= set(sizes)


@pytest.mark.parametrize(
    ("placement", "nodes", "largest"),
    [("{per_node: 4}", [0, 0, 0, 0, 1, 1, 1, 1], 1024), ("{order: [8, 9, 0-5]}", [1, 1, 0, 0, 0, 0, 0, 0], 8)],
)
def test_the_page_uses_the_scenarios_rank_placement(placement: str, nodes: list[int], largest: int) -> None:
    """More GPUs than the scenario's are offered if the placement rule defines which they would be."""
    exploration = build_exploration_tables(scenario().with_overrides(f"cluster.placement={placement}"))
    (tier, unit), *_ = exploration.machine.levels
    assert tier == "nvlink"
    assert unit[:8].tolist() == nodes
    assert len(unit) == largest
    assert any("cluster.placement" in note for note in exploration.notes)


@pytest.mark.parametrize(("cluster", "is_noted"), [("gb200-nvl72", True), ("dgx-h100", False)])
def test_sizes_that_fill_domains_differently_are_noted(cluster: str, is_noted: bool) -> None:
    """1,024 GPUs are on 15 racks, most of them with all 72 in use; 128 are on two, 64 of each."""
    exploration = build_exploration_tables(scenario().with_overrides(f"cluster.name={cluster}"))
    assert exploration.choices["gpus"][-1] == 1024
    assert any("72 GPUs of each that the largest size offered, 1,024" in note for note in exploration.notes) == is_noted


@pytest.mark.slow
def test_expert_study_points_match_simulate() -> None:
    moe_scenario = Scenario.from_mapping(MOE_SCENARIOS["mixed"])
    (expert_study,) = [
        scaling_study for scaling_study in build_exploration(moe_scenario).studies if scaling_study.name == "experts"
    ]
    assert [point.label for point in expert_study.points if point.is_baseline] == ["ep 4, alltoall"]
    simulated = {point.label: point.step_time for point in expert_study.points if not point.missing_reason}
    changes = {"ep 8, alltoall": "layout.ep=8", "ep 4, deepep": "layout.dispatcher=deepep"}
    for label, change in changes.items():
        assert simulated[label] == simulate(moe_scenario.with_overrides(change)).step_time
    assert len({*simulated.values()}) == len(simulated)
    assert "16" in next(point.missing_reason for point in expert_study.points if point.label.startswith("ep 16"))


def test_mtp_layers_are_left_out_with_their_memory() -> None:
    """Tables are those of the model without them; a sentence says what `check` finds with and without them."""
    mapping = {**MOE_SCENARIOS["latent"], "cluster": {"name": "dgx-h800", "gpus": 32}}
    mapping["layout"] = {**mapping["layout"], "dp": 8, "layers_per_stage": [3, 3, 3, 3]}
    without = Scenario.from_mapping(mapping)
    with_mtp = without.with_overrides(["model.mtp_layers=1"])
    drawn = without_mtp_layers(with_mtp)
    assert (drawn.model, drawn.layout) == (without.model, without.layout)
    sentence = describe_omissions(with_mtp, drawn)
    assert sentence is not None
    assert "1 multi-token prediction (MTP) layer of" in sentence
    assert sentence.endswith(".")
    assert "pipeline rank 3 of the scenario" in sentence
    for scenario_checked in (without, with_mtp):
        assert format_bytes(memory_timelines(scenario_checked)[3].peak) in sentence
    report = check(with_mtp)
    assert format_bytes(report.peak_memory_bytes) in sentence
    assert ("does not fit" in sentence) is not report.fits
    assert without_mtp_layers(without) is without


def test_a_partition_for_mtp_layers_alone_is_drawn_evenly() -> None:
    """A stage that holds an MTP layer only would be empty without it."""
    layout_string = "Ettttt|ttttt|tt|mL"
    mapping = {
        "model": {"preset": "llama-tiny", "layers": 12, "mtp_layers": 1},
        "cluster": {"name": "dgx-h100", "gpus": 8},
    }
    layout = {"pp": 4, "dp": 2, "layers_per_stage": layout_string}
    with_mtp = Scenario.from_mapping({**MAPPING, **mapping, "layout": layout})
    assert without_mtp_layers(with_mtp).layout.layers_per_stage is None
    (warning,) = build_exploration_tables(with_mtp).warnings
    assert "1 multi-token prediction" in warning


def test_a_pipeline_that_only_mtp_layers_fill_is_refused() -> None:
    mapping = {**MAPPING, "model": {"preset": "llama-tiny", "layers": 2, "mtp_layers": 1}}
    mapping |= {
        "cluster": {"name": "dgx-h100", "gpus": 40},
        "layout": {"pp": 5, "dp": 8, "layers_per_stage": "E|t|t|m|L"},
    }
    with pytest.raises(InputError, match=r"model\.mtp_layers: 1.*set it to 0"):
        without_mtp_layers(Scenario.from_mapping(mapping))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["layout={cp: 4, dp: 2, cp_kind: ulysses}"], "layout.cp_kind ulysses (drawn as ring)"),
        (
            ["layout={cp: 4, dp: 2, cp_kind: ring}", "training.overheads.ring_attention=blocks"],
            "ring_attention blocks (drawn as one_kernel)",
        ),
        (
            ["training.optimizer=muon", "training.tiled_mlp=true", "layout={dp: 8}"],
            "MLPs on tiles (training.tiled_mlp) and the optimizer muon (drawn as adam of all weights)",
        ),
        (
            ["training.optimizer=muon", "layout={cp: 4, dp: 2, cp_kind: all_gather}"],
            "all_gather (drawn as ring) and",
        ),
        (
            ["model={preset: llava-1.5-7b, frozen: true}", "layout={pp: 4, dp: 2, encoder_placement: own_stage}"],
            "the encoder clip-vit-l-14-336 with its projector and that llava-1.5-7b is frozen, with which",
        ),
        (
            [
                "model=llava-1.5-7b",
                "layout={pp: 2, dp: 4, encoder_placement: own_stage, encoder_tp: 1, encoder_dp: 4}",
            ],
            "the encoder clip-vit-l-14-336 with its projector, with which pipeline rank 0 of",
        ),
    ],
)
def test_what_tables_do_not_have_is_left_out_with_its_memory(changes: list[str], words: str) -> None:
    explored = Scenario.from_mapping(MAPPING, changes)
    (warning,) = build_exploration_tables(explored).warnings
    assert words in warning
    assert format_bytes(max(timeline.peak for timeline in memory_timelines(explored))) in warning
    assert drawn_scenario(scenario()) is scenario()


def test_packed_documents_are_said_to_change_nothing_drawn() -> None:
    packed = Scenario.from_mapping(MAPPING, ["training.documents={mean: 256, sigma: 1.0}"])
    page = build_exploration_tables(packed)
    assert any("Packed documents" in note for note in page.notes)
    assert page.tables == explored_with_progress()[0].tables


def test_layers_that_exchange_tokens_or_states_are_drawn_without_context_parallelism() -> None:
    hybrid = {**MAPPING, "model": {"preset": "nemotron-h-8b", "layers": 8}}
    exploration = build_exploration_tables(Scenario.from_mapping(hybrid))
    assert exploration.choices["cp"] == (1,)
    assert any("cp is offered with attention alone" in note for note in exploration.notes)
    assert [one.name for one in exploration.models] == ["nemotron-h-8b"]


@pytest.mark.parametrize(
    ("model", "key", "words"),
    [("zamba2-1.2b", "pp", "pp is 1: layers of zamba2-1.2b"), ("dit-xl-2", "sequence", "of 256 tokens, uncut (cp 1)")],
)
def test_what_a_model_leaves_no_choice_of_is_said(model: str, key: str, words: str) -> None:
    training = {"global_batch": 8} if key == "sequence" else MAPPING["training"]
    mapping = {**MAPPING, "model": model, "layout": {"dp": 8}, "training": training}
    exploration = build_exploration_tables(Scenario.from_mapping(mapping))
    assert exploration.choices[key] == (exploration.start[key],)
    assert exploration.choices["cp"] == (1,)
    assert any(words in note for note in exploration.notes)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("nemotron-h-8b", {"cp": 2, "dp": 4}, r"layout\.cp: 2 ranks share sequences of layers with Mamba 2"),
        (
            {"preset": "llama-tiny", "mixer": "moba", "moba": {"chunk_size": 64, "topk": 2}},
            {"dp": 8},
            "block attention",
        ),
        ("dit-xl-2", {"cp": 2, "dp": 4}, r"layout\.cp: 2 ranks share the images of dit-xl-2"),
    ],
)
def test_layers_whose_memory_or_traffic_has_no_table_are_refused(model: object, layout: object, words: str) -> None:
    mapping = {**MAPPING, "model": model, "layout": layout}
    mapping |= {"training": {"global_batch": 8}} if model == "dit-xl-2" else {}
    with pytest.raises(InputError, match=words):
        build_exploration_tables(Scenario.from_mapping(mapping))
