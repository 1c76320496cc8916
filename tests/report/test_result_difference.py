"""Difference of two results: categories sum to the step time difference on the terminal, the page and in JSON."""

import html
import io
import json
import re
from base64 import b64decode

import numpy as np
import pytest
from rich.console import Console

from clustersim.report.result_difference import ResultDifference, compare_results, format_input, headline, number_rows
from clustersim.report.result_difference_page import difference_page, difference_waterfall, stages_figure
from clustersim.report.terminal.difference import render_difference
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TIME_CATEGORIES
from tests.report.page_reader import figures_by_name
from tests.sentences import parts
from tests.small_pipeline import simulate_pipeline

TITLES = ("plain <a>", "changed & b")


@pytest.fixture(scope="module")
def plain() -> SimulationResult:
    return simulate_pipeline()


OVERRIDES_BY_CASE = {
    "layout": ["layout.tp=4", "layout.pp=2"],
    "same pipeline": ["schedule=gpipe", "training.recompute=full"],
    "slow": ["degradations.slow={gpu: 9, speed: 0.5}"],
    "one rank": ["layout={}", "cluster.gpus=1", "training.global_batch=1", "training.sequence=512"],
    "steps": ["steps=3", "degradations.jitter=2 %"],
    "another machine": ["cluster.name=dgx-a100"],
}


@pytest.fixture(scope="module", params=OVERRIDES_BY_CASE)
def pair(request: pytest.FixtureRequest, plain: SimulationResult) -> tuple[SimulationResult, SimulationResult]:
    return plain, simulate_pipeline(*OVERRIDES_BY_CASE[request.param])


def rendered_text(difference: ResultDifference) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render_difference(difference))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def render_page(first: SimulationResult, second: SimulationResult) -> str:
    return difference_page(compare_results(first, second, TITLES), (first, second))


def test_category_deltas_sum_to_step_time_difference(pair: tuple[SimulationResult, SimulationResult]) -> None:
    difference = compare_results(*pair, TITLES)
    step_time_delta = pair[1].step_time - pair[0].step_time
    assert difference.step_time_delta == step_time_delta
    assert difference.mean_deltas.sum() == pytest.approx(step_time_delta, rel=1e-9, abs=1e-9 * pair[0].step_time)
    json_deltas = [category["delta"] for category in difference.to_json()["categories_s"]]
    assert sum(json_deltas) == pytest.approx(step_time_delta, rel=1e-6, abs=1e-6 * pair[0].step_time)


def test_losses_sum_to_both_steps_and_those_that_change_most_come_first(
    pair: tuple[SimulationResult, SimulationResult],
) -> None:
    difference = compare_results(*pair, TITLES)
    losses = difference.to_json()["losses_s"]
    for side, result in zip(("first", "second"), pair, strict=True):
        assert sum(loss[side] for loss in losses) == pytest.approx(result.step_time, rel=1e-6)
    deltas = {loss["category"]: loss["delta"] for loss in losses}
    names = [name for name, *_ in difference.loss_rows]
    assert set(names) == set(deltas)
    assert names[-1] == "ideal"
    changes = [abs(deltas[name]) for name in names[:-1]]
    assert changes == sorted(changes, reverse=True)
    assert all(name in rendered_text(difference) for name in names)


def test_waterfall_runs_between_the_two_step_times(pair: tuple[SimulationResult, SimulationResult]) -> None:
    difference = compare_results(*pair, TITLES)
    first, *bars, second = difference_waterfall(difference).traces
    ends = [first["x"][0]]
    for bar in bars:
        assert bar["base"][0] == pytest.approx(ends[-1])
        ends.append(bar["base"][0] + bar["x"][0])
    assert ends[-1] == pytest.approx(second["x"][0])
    assert second["x"][0] / first["x"][0] == pytest.approx(pair[1].step_time / pair[0].step_time)
    for low, high in (difference_waterfall(difference).layout["xaxis"]["range"],):
        assert low <= min(ends)
        assert max(ends) < high


def test_stage_deltas_sum_to_the_difference(plain: SimulationResult) -> None:
    second = simulate_pipeline(*OVERRIDES_BY_CASE["same pipeline"])
    difference = compare_results(plain, second, TITLES)
    assert difference.row_labels == ("stage 0", "stage 1", "stage 2", "stage 3")
    sums = difference.row_deltas.sum(axis=1)
    assert sums == pytest.approx(np.full(4, difference.step_time_delta), rel=1e-6)
    drawn = [np.frombuffer(b64decode(trace["x"]["bdata"])) for trace in stages_figure(difference).traces]
    assert sum(drawn) == pytest.approx(sums * 1e3, rel=0.02)  # in ms; categories too small to see are not drawn
    assert "stage 3" in rendered_text(difference)
    stages_json = difference.to_json()["stages"]
    assert [sum(category["delta"] for category in row["categories_s"]) for row in stages_json] == pytest.approx(
        sums.tolist(), rel=1e-6
    )


def test_stages_of_different_pipelines_are_not_compared(plain: SimulationResult) -> None:
    second = simulate_pipeline(*OVERRIDES_BY_CASE["layout"])
    difference = compare_results(plain, second, TITLES)
    assert difference.to_json()["stages"] is None
    assert "difference-stages" not in figures_by_name(render_page(plain, second))
    assert "stage 0" not in rendered_text(difference)
    interleaved = simulate_pipeline("schedule.interleaved.chunks=2")
    assert compare_results(plain, interleaved, TITLES).row_labels == ()


def test_equal_results_have_no_difference(plain: SimulationResult) -> None:
    difference = compare_results(plain, plain, TITLES)
    assert difference.inputs == ()
    assert difference.changed_categories == []
    assert headline(difference).startswith("both steps take ")
    assert {change for *_, change in number_rows(difference)} == {""}
    text = render_page(plain, plain)
    assert "No key of the input differs" in text
    assert set(figures_by_name(text)) == {"timeline-a", "timeline-b"}
    assert "no key of the input differs" in rendered_text(difference)


def test_json_values_equal_the_results_json(plain: SimulationResult) -> None:
    second = simulate_pipeline(*OVERRIDES_BY_CASE["layout"])
    difference_json = compare_results(plain, second, TITLES).to_json()
    for side, result in (("first", plain), ("second", second)):
        result_json = result.to_json()
        assert {
            key: value for key, value in difference_json[side].items() if key != "title"
        }.items() <= result_json.items()
    assert difference_json["delta"]["mfu"] == pytest.approx(second.mfu - plain.mfu)
    assert difference_json["inputs"] == [
        {"key": "layout.tp", "first": 2, "second": 4},
        {"key": "layout.pp", "first": 4, "second": 2},
    ]
    json.dumps(difference_json, allow_nan=False)


def test_headline_states_direction_and_ratio(plain: SimulationResult) -> None:
    slow = simulate_pipeline(*OVERRIDES_BY_CASE["slow"])
    relative_change = slow.step_time / plain.step_time - 1.0
    slower, faster = compare_results(plain, slow, TITLES), compare_results(slow, plain, TITLES)
    assert f"({relative_change:+.1%}) longer than A's" in headline(slower)
    assert "shorter than A's" in headline(faster)
    assert f"({relative_change:+.1%})" in rendered_text(slower)


def test_rounding_errors_are_no_difference(plain: SimulationResult) -> None:
    difference = compare_results(plain, plain, TITLES)
    assert difference.format_delta(1e-12 * plain.step_time) == difference.format_delta(0.0) == "0 s"
    assert difference.format_delta(-1e-3) == "-1 ms"
    assert not re.search(r"[+-]\d", rendered_text(difference))


def test_different_tokens_per_step_are_noted(plain: SimulationResult) -> None:
    difference = compare_results(plain, simulate_pipeline("training.global_batch=32"), TITLES)
    (note,) = difference.notes
    assert parts("B has 2 times the tokens ... tokens/s per GPU").search(note)
    assert "2 times the tokens" in rendered_text(difference)
    assert compare_results(plain, simulate_pipeline(*OVERRIDES_BY_CASE["slow"]), TITLES).notes == ()


def test_user_text_is_escaped(plain: SimulationResult) -> None:
    text = render_page(plain, simulate_pipeline("name=<b>x</b>"))
    assert "plain &lt;a&gt;" in text
    assert "<b>x</b>" not in text
    assert html.escape("<b>x</b>") in text


def test_only_text_values_may_wrap(plain: SimulationResult) -> None:
    text = render_page(plain, simulate_pipeline("name=a long note"))
    assert re.findall(r'class="words">(.*?)<', text) == ["A", "B", "not given", "a long note"]


def test_timelines_share_one_axis(plain: SimulationResult) -> None:
    second = simulate_pipeline(*OVERRIDES_BY_CASE["steps"])
    drawn = figures_by_name(render_page(plain, second))
    first_figure, second_figure = (drawn[name] for name in ("timeline-a", "timeline-b"))
    assert first_figure["layout"]["xaxis"]["range"] == second_figure["layout"]["xaxis"]["range"]
    assert first_figure["facts"]["size"] == second_figure["facts"]["size"]
    low, high = first_figure["layout"]["xaxis"]["range"]
    assert (low, high * first_figure["facts"]["size"]) == (0, pytest.approx(second.step_times.sum(), rel=0.01))


def test_categories_are_in_breakdown_order(pair: tuple[SimulationResult, SimulationResult]) -> None:
    names = [category["category"] for category in compare_results(*pair, TITLES).to_json()["categories_s"]]
    breakdown_order = [category.value for category in TIME_CATEGORIES]
    assert names == sorted(names, key=breakdown_order.index)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "not given"), (0.5, "0.5"), ("25 MiB", "25 MiB"), ({"gpu": [1, 2]}, "{gpu: [1, 2]}"), (False, "false")],
)
def test_input_values_are_formatted(value: object, text: str) -> None:
    assert format_input(value) == text
