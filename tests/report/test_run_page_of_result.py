"""The run page of a real result: a small simulated pipeline."""

import html

import numpy as np
import pytest

from clustersim.build import build_plan
from clustersim.memory.footprint import SHARDED_CATEGORIES
from clustersim.memory.footprint import MemoryCategory as Use
from clustersim.report.labels import describe_layout, stage_name
from clustersim.report.panels.memory import memory_panels, stage_memories
from clustersim.report.result_timeline import build_timeline, describe_stage_placement
from clustersim.report.row_selection import select_ranks
from clustersim.report.run_page import run_page
from clustersim.report.step_breakdown import step_breakdown
from clustersim.report.theme import CATEGORY_STYLES, MEMORY_CATEGORY_STYLES, TIME_CATEGORY_STYLES, CategoryStyle
from clustersim.report.timeline_data import PipelineTimeline
from clustersim.results.memory_check import build_footprint
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TIME_CATEGORIES
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.small_pipeline import simulate_pipeline

SMALL_PIPELINE = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 32},
    "layout": {"tp": 2, "pp": 4, "dp": 4, "data": "zero1"},
    "schedule": "1f1b",
    "training": {"sequence": 4096, "global_batch": 32, "microbatch": 1, "precision": "bf16", "recompute": "none"},
}


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return simulate(Scenario.from_mapping(SMALL_PIPELINE, default_name="small"))


@pytest.fixture(scope="module")
def timeline(result: SimulationResult) -> PipelineTimeline:
    return build_timeline(result, select_ranks(result))


def test_time_categories_sum_to_step_time_in_total_and_per_stage(result: SimulationResult) -> None:
    times = step_breakdown(result, select_ranks(result))
    assert times.mean_seconds.sum() == pytest.approx(result.step_time)
    assert times.row_seconds.sum(axis=1) == pytest.approx(result.step_time)


def test_stages_run_all_microbatches_forward_and_backward(timeline: PipelineTimeline) -> None:
    spans = timeline.spans
    for stage in range(4):
        for category in (CategoryStyle.FORWARD, CategoryStyle.BACKWARD):
            chosen = (
                (spans.row == stage) & (spans.category == CATEGORY_STYLES.index(category)) & (spans.microbatch >= 0)
            )
            assert set(spans.microbatch[chosen].tolist()) == set(range(8))


def test_spans_start_after_their_cause_ends(timeline: PipelineTimeline) -> None:
    spans = timeline.spans
    caused = np.flatnonzero(spans.cause >= 0)
    assert len(caused) > 0
    assert np.all(spans.end[spans.cause[caused]] <= spans.start[caused] * (1 + 1e-12))
    assert np.all(spans.waiting_since <= spans.start)


def test_stage_start_cause_is_the_previous_stages_compute(timeline: PipelineTimeline) -> None:
    spans = timeline.spans
    first = np.flatnonzero((spans.row == 1) & (spans.lane == 0) & (spans.microbatch == 0))[0]
    cause = int(spans.cause[first])
    assert (spans.row[cause], spans.lane[cause], spans.microbatch[cause]) == (0, 0, 0)


def test_drawn_memory_peak_equals_ledger_peak(result: SimulationResult) -> None:
    for stage, ledger in zip(stage_memories(result), result.ledgers, strict=True):
        assert stage.held_bytes.sum(axis=0).max() == pytest.approx(ledger.peak)
        assert np.all(stage.held_bytes >= 0)


def test_critical_path_is_monotonic_and_ends_with_the_step(
    result: SimulationResult, timeline: PipelineTimeline
) -> None:
    path = timeline.path
    assert np.all(np.diff(path.end) >= 0)
    assert path.end[-1] == pytest.approx(result.step_time)


def test_all_time_and_memory_categories_have_a_style() -> None:
    assert len(TIME_CATEGORIES) == len(TIME_CATEGORY_STYLES) == len(set(TIME_CATEGORY_STYLES.values()))
    assert set(MEMORY_CATEGORY_STYLES) == set(Use)


def test_run_page_names_the_scenario(result: SimulationResult) -> None:
    text = run_page(result)
    assert "tp 2 · pp 4 · dp 4 · ZeRO-1 · 1f1b · no recompute · bf16" in text
    assert "matmul" in text or "attention" in text


@pytest.mark.parametrize(
    ("override", "strategy_text"),
    [
        ("training.recompute=full", "full recompute"),
        ("training.recompute=selective", "selective recompute"),
        ("layout.data=ddp", "DDP"),
    ],
)
def test_layout_line_strategy_names(override: str, strategy_text: str) -> None:
    assert strategy_text in describe_layout(
        Scenario.from_mapping(SMALL_PIPELINE, default_name="small", overrides=[override])
    )


def test_interleaved_rows_are_pipeline_ranks_with_stage_note() -> None:
    scenario = Scenario.from_mapping(
        SMALL_PIPELINE, default_name="small", overrides=["schedule={interleaved: {chunks: 8}}"]
    )
    assert stage_name(scenario, 3) == "pipeline rank 3"
    assert "32 stages (chunks)" in describe_stage_placement(scenario)
    assert "pipeline rank 0 holds stages 0, 4, 8, ..., 28." in describe_stage_placement(scenario)
    plain = Scenario.from_mapping(SMALL_PIPELINE, default_name="small")
    assert (stage_name(plain, 3), describe_stage_placement(plain)) == ("stage 3", "")


def test_equal_kernels_are_merged_with_count(timeline: PipelineTimeline) -> None:
    details = [text for text in timeline.spans.texts if "mlp.up" in text]
    assert details
    assert all(len(set(lines)) == len(lines) for lines in (detail.split("\n") for detail in details))
    assert any("8 × mlp.up" in detail for detail in details)  # 32 layers on 4 stages


def test_prediction_interval_is_on_the_page(result: SimulationResult) -> None:
    assert result.interval_description in html.unescape(run_page(result))
    assert result.oom_suggestions == ()


def test_expert_memory_is_listed_separately_and_sums_to_total() -> None:
    """Eight experts of three 4096 x 14336 matrices in each of two layers, over four ranks; the rest is unsharded."""
    result = simulate_pipeline(
        "model={preset: mixtral-8x7b, layers: 8}", "layout={tp: 1, pp: 4, dp: 4, data: zero1, ep: 4}"
    )
    scenario, ledger = result.scenario, result.ledgers[0].peak_by_category()
    experts, non_experts = build_footprint(scenario, build_plan(scenario)).split_experts(0)
    assert experts[0] == 2 * 8 / 4 * 3 * 4096 * 14336
    assert experts[1] + non_experts[1] == pytest.approx(sum(ledger[use] for use in SHARDED_CATEGORIES))
    assert ["of experts" in card.html for card in memory_panels(result, has_several_rows=True)] == [False, True]
    assert not any("of experts" in card.html for card in memory_panels(simulate_pipeline(), has_several_rows=True))
