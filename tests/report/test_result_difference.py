"""Two answers: parts sum to the difference of the step times, in words, on the page and in JSON; lanes are aligned."""

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
from tests.report.page_reader import figures
from tests.small_pipeline import simulated

TITLES = ("plain <a>", "changed & b")


@pytest.fixture(scope="module")
def plain() -> SimulationResult:
    return simulated()


CHANGES = {
    "layout": ["layout.tp=4", "layout.pp=2"],
    "same pipeline": ["schedule=gpipe", "training.recompute=full"],
    "slow": ["disturbances.slow={gpu: 9, speed: 0.5}"],
    "one rank": ["layout={}", "cluster.gpus=1", "training.global_batch=1", "training.sequence=512"],
    "steps": ["steps=3", "disturbances.jitter=2 %"],
    "another machine": ["cluster.name=dgx-a100"],
}


@pytest.fixture(scope="module", params=CHANGES)
def pair(request: pytest.FixtureRequest, plain: SimulationResult) -> tuple[SimulationResult, SimulationResult]:
    return plain, simulated(*CHANGES[request.param])


def printed(difference: ResultDifference) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render_difference(difference))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def page_of(first: SimulationResult, second: SimulationResult) -> str:
    return difference_page(compare_results(first, second, TITLES), (first, second))


def test_parts_sum_to_the_difference_of_the_step_times(pair: tuple[SimulationResult, SimulationResult]) -> None:
    difference = compare_results(*pair, TITLES)
    longer = pair[1].step_time - pair[0].step_time
    assert difference.step_time_delta == longer
    assert difference.mean_deltas.sum() == pytest.approx(longer, rel=1e-9, abs=1e-9 * pair[0].step_time)
    rows = [part["delta"] for part in difference.to_json()["parts_s"]]
    assert sum(rows) == pytest.approx(longer, rel=1e-6, abs=1e-6 * pair[0].step_time)


def test_the_waterfall_begins_at_one_step_time_and_ends_at_the_other(
    pair: tuple[SimulationResult, SimulationResult],
) -> None:
    difference = compare_results(*pair, TITLES)
    first, *parts, second = difference_waterfall(difference).traces
    ends = [first["x"][0]]
    for bar in parts:
        assert bar["base"][0] == pytest.approx(ends[-1])
        ends.append(bar["base"][0] + bar["x"][0])
    assert ends[-1] == pytest.approx(second["x"][0])
    assert second["x"][0] / first["x"][0] == pytest.approx(pair[1].step_time / pair[0].step_time)
    for low, high in (difference_waterfall(difference).layout["xaxis"]["range"],):
        assert low <= min(ends)
        assert max(ends) < high


def test_every_stage_of_the_same_pipeline_sums_to_the_difference(plain: SimulationResult) -> None:
    second = simulated(*CHANGES["same pipeline"])
    difference = compare_results(plain, second, TITLES)
    assert difference.row_labels == ("stage 0", "stage 1", "stage 2", "stage 3")
    sums = difference.row_deltas.sum(axis=1)
    assert sums == pytest.approx(np.full(4, difference.step_time_delta), rel=1e-6)
    drawn = [np.frombuffer(b64decode(trace["x"]["bdata"])) for trace in stages_figure(difference).traces]
    assert sum(drawn) == pytest.approx(sums * 1e3, rel=0.02)  # in ms; parts too small to see are not drawn
    assert "stage 3" in printed(difference)
    answer = difference.to_json()["stages"]
    assert [sum(part["delta"] for part in row["parts_s"]) for row in answer] == pytest.approx(sums.tolist(), rel=1e-6)


def test_stages_of_other_pipelines_are_not_compared(plain: SimulationResult) -> None:
    second = simulated(*CHANGES["layout"])
    difference = compare_results(plain, second, TITLES)
    assert difference.to_json()["stages"] is None
    assert "difference-stages" not in figures(page_of(plain, second))
    assert "stage 0" not in printed(difference)
    interleaved = simulated("schedule.interleaved.chunks=2")
    assert compare_results(plain, interleaved, TITLES).row_labels == ()


def test_the_same_twice_differs_in_nothing(plain: SimulationResult) -> None:
    difference = compare_results(plain, plain, TITLES)
    assert difference.inputs == ()
    assert difference.changed_categories == []
    assert headline(difference).startswith("both steps take ")
    assert {change for *_, change in number_rows(difference)} == {""}
    text = page_of(plain, plain)
    assert "No key of the input differs" in text
    assert set(figures(text)) == {"timeline-a", "timeline-b"}
    assert "no key of the input differs" in printed(difference)


def test_numbers_are_those_of_run(plain: SimulationResult) -> None:
    second = simulated(*CHANGES["layout"])
    answer = compare_results(plain, second, TITLES).to_json()
    for side, result in (("first", plain), ("second", second)):
        whole = result.to_json()
        assert {key: value for key, value in answer[side].items() if key != "title"}.items() <= whole.items()
    assert answer["delta"]["mfu"] == pytest.approx(second.mfu() - plain.mfu())
    assert answer["inputs"] == [
        {"key": "layout.tp", "first": 2, "second": 4},
        {"key": "layout.pp", "first": 4, "second": 2},
    ]
    json.dumps(answer, allow_nan=False)


def test_words_say_longer_or_shorter_and_by_how_much(plain: SimulationResult) -> None:
    slow = simulated(*CHANGES["slow"])
    part = slow.step_time / plain.step_time - 1.0
    there, back = compare_results(plain, slow, TITLES), compare_results(slow, plain, TITLES)
    assert f"({part:+.1%}) longer than A's" in headline(there)
    assert "shorter than A's" in headline(back)
    assert f"({part:+.1%})" in printed(there)


def test_what_is_only_rounding_is_no_difference(plain: SimulationResult) -> None:
    difference = compare_results(plain, plain, TITLES)
    assert difference.format_delta(1e-12 * plain.step_time) == difference.format_delta(0.0) == "0 s"
    assert difference.format_delta(-1e-3) == "-1 ms"
    assert not re.search(r"[+-]\d", printed(difference))


def test_a_step_with_other_tokens_is_not_to_be_compared_by_its_time(plain: SimulationResult) -> None:
    difference = compare_results(plain, simulated("training.global_batch=32"), TITLES)
    assert difference.notes == ("a step of B has 2 times the tokens; compare tokens/s per GPU",)
    assert "2 times the tokens" in printed(difference)
    assert compare_results(plain, simulated(*CHANGES["slow"]), TITLES).notes == ()


def test_text_of_users_is_escaped(plain: SimulationResult) -> None:
    text = page_of(plain, simulated("name=<b>x</b>"))
    assert "plain &lt;a&gt;" in text
    assert "<b>x</b>" not in text
    assert html.escape("<b>x</b>") in text


def test_words_of_the_input_may_break_and_numbers_not(plain: SimulationResult) -> None:
    text = page_of(plain, simulated("name=a long note"))
    assert re.findall(r'class="words">(.*?)<', text) == ["A", "B", "not given", "a long note"]


def test_both_timelines_have_one_axis(plain: SimulationResult) -> None:
    second = simulated(*CHANGES["steps"])
    drawn = figures(page_of(plain, second))
    first, other = (drawn[name] for name in ("timeline-a", "timeline-b"))
    assert first["layout"]["xaxis"]["range"] == other["layout"]["xaxis"]["range"]
    assert first["facts"]["size"] == other["facts"]["size"]
    low, high = first["layout"]["xaxis"]["range"]
    assert (low, high * first["facts"]["size"]) == (0, pytest.approx(second.step_times.sum(), rel=0.01))


def test_parts_are_all_of_the_breakdown_s_and_in_its_order(pair: tuple[SimulationResult, SimulationResult]) -> None:
    names = [part["part"] for part in compare_results(*pair, TITLES).to_json()["parts_s"]]
    order = [part.value for part in TIME_CATEGORIES]
    assert names == sorted(names, key=order.index)


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "not given"), (0.5, "0.5"), ("25 MiB", "25 MiB"), ({"gpu": [1, 2]}, "{gpu: [1, 2]}"), (False, "false")],
)
def test_values_of_the_input_are_words(value: object, words: str) -> None:
    assert format_input(value) == words
