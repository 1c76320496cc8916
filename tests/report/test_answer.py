"""A real result on the page: a small pipeline, simulated."""

import html

import numpy as np
import pytest

from clustersim.answer import Answer
from clustersim.memory.footprint import SHARDED
from clustersim.memory.footprint import Category as Use
from clustersim.report.answer import USE_LOOKS, memory_of, page_view
from clustersim.report.answer_table import PART_LOOKS
from clustersim.report.page import render_page
from clustersim.report.theme import CATEGORIES, Category
from clustersim.report.view import PageView
from clustersim.report.wording import layout_line, row_note, stage_name
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.simulated import simulated

SMALL = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 32},
    "layout": {"tp": 2, "pp": 4, "dp": 4, "data": "zero1"},
    "schedule": "1f1b",
    "training": {"sequence": 4096, "global_batch": 32, "microbatch": 1, "precision": "bf16", "recompute": "none"},
}


@pytest.fixture(scope="module")
def result() -> Answer:
    return simulate(Scenario.from_mapping(SMALL, source="small"))


@pytest.fixture(scope="module")
def view(result: Answer) -> PageView:
    return page_view(result)


def test_parts_sum_to_the_step_time_as_a_whole_and_on_each_stage(view: PageView) -> None:
    assert view.breakdown.step.sum() == pytest.approx(view.verdict.step_time)
    assert view.breakdown.stages.sum(axis=1) == pytest.approx(view.verdict.step_time)


def test_every_stage_runs_every_microbatch_forward_and_backward(view: PageView) -> None:
    spans = view.timeline.spans
    for stage in range(4):
        for category in (Category.FORWARD, Category.BACKWARD):
            chosen = (spans.row == stage) & (spans.category == CATEGORIES.index(category)) & (spans.microbatch >= 0)
            assert set(spans.microbatch[chosen].tolist()) == set(range(8))


def test_nothing_starts_before_its_cause_has_ended(view: PageView) -> None:
    spans = view.timeline.spans
    caused = np.flatnonzero(spans.cause >= 0)
    assert len(caused) > 0
    assert np.all(spans.end[spans.cause[caused]] <= spans.start[caused] * (1 + 1e-12))
    assert np.all(spans.waiting <= spans.start)


def test_a_stage_waits_for_the_computation_of_its_neighbour_and_not_for_its_own_receive(view: PageView) -> None:
    spans = view.timeline.spans
    first = np.flatnonzero((spans.row == 1) & (spans.lane == 0) & (spans.microbatch == 0))[0]
    cause = int(spans.cause[first])
    assert (spans.row[cause], spans.lane[cause], spans.microbatch[cause]) == (0, 0, 0)


def test_the_memory_that_is_drawn_peaks_where_the_ledger_does(result: Answer, view: PageView) -> None:
    for stage, ledger in zip(view.memory.stages, result.ledgers, strict=True):
        assert stage.held.sum(axis=0).max() == pytest.approx(ledger.peak)
        assert np.all(stage.held >= 0)


def test_the_critical_path_goes_forward_in_time_and_ends_with_the_step(view: PageView) -> None:
    path = view.timeline.path
    assert np.all(np.diff(path.end) >= 0)
    assert path.end[-1] == pytest.approx(view.verdict.step_time)


def test_every_part_and_every_use_of_memory_has_a_look(view: PageView) -> None:
    assert len(view.breakdown.labels) == len(PART_LOOKS) == len(set(PART_LOOKS.values()))
    assert set(USE_LOOKS) == set(Use)


def test_the_page_of_a_result_names_what_was_simulated(view: PageView) -> None:
    text = render_page(view)
    assert "tp 2 · pp 4 · dp 4 · ZeRO-1 · 1f1b · no recompute · bf16" in text
    assert "matmul" in text or "attention" in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.recompute=full", "full recompute"),
        ("training.recompute=selective", "selective recompute"),
        ("layout.data=ddp", "DDP"),
    ],
)
def test_strategies_are_called_what_people_call_them(override: str, words: str) -> None:
    assert words in layout_line(Scenario.from_mapping(SMALL, source="small", overrides=[override]))


def test_a_stage_of_several_chunks_is_a_pipeline_rank_and_the_note_says_what_it_holds() -> None:
    scenario = Scenario.from_mapping(SMALL, source="small", overrides=["schedule={interleaved: {chunks: 8}}"])
    assert stage_name(scenario, 3) == "pipeline rank 3"
    assert "32 stages (chunks)" in row_note(scenario)
    assert "pipeline rank 0 holds stages 0, 4, 8, ..., 28." in row_note(scenario)
    plain = Scenario.from_mapping(SMALL, source="small")
    assert (stage_name(plain, 3), row_note(plain)) == ("stage 3", "")


def test_equal_kernels_of_a_pass_are_one_line_with_their_count(view: PageView) -> None:
    details = [text for text in view.timeline.spans.texts if "mlp.up" in text]
    assert details
    assert all(len(set(lines)) == len(lines) for lines in (detail.split("\n") for detail in details))
    assert any("8 × mlp.up" in detail for detail in details)  # 32 layers on 4 stages


def test_what_experience_says_is_on_the_page(view: PageView) -> None:
    assert view.trust.experience in html.unescape(render_page(view))
    assert view.trust.suggestions == ()


def test_memory_of_experts_stands_apart_and_both_make_up_all() -> None:
    """Eight experts of three 4096 x 14336 matrices in each of two layers, over four ranks; all else is whole."""
    result = simulated("model={preset: mixtral-8x7b, layers: 8}", "layout={tp: 1, pp: 4, dp: 4, data: zero1, ep: 4}")
    (first, *_), ledger = memory_of(result).stages, result.ledgers[0].at_peak()
    assert first.experts is not None
    assert first.experts[0] == 2 * 8 / 4 * 3 * 4096 * 14336
    assert first.experts[1] + first.others[1] == pytest.approx(sum(ledger[use] for use in SHARDED))
    assert all(stage.experts is None for stage in memory_of(simulated()).stages)
