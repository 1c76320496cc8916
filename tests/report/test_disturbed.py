"""Several steps, stragglers and jitter on the page, in the table and in the comparison: small pipelines, simulated."""

import io
import json
import re
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from clustersim.report.answer import page_view
from clustersim.report.answer_timeline import shown_ranks, timeline_of
from clustersim.report.comparison import comparison_page, write_comparison
from clustersim.report.hover import number_of, what
from clustersim.report.page import render_page
from clustersim.report.table import render_table
from clustersim.report.theme import CATEGORIES, Category
from clustersim.report.timeline import drawing, timeline_caption, timeline_figure
from clustersim.report.view import PageView, Timeline
from clustersim.report.wording import disturbed_line, gpu_line
from clustersim.result import Result
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

SMALL: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 4, "dp": 2, "data": "zero1"},
    "training": {"sequence": 4096, "global_batch": 16},
}
SLOW = "disturbances.slow={gpu: 9, speed: 0.8}"  # stage 2 is ranks 8 to 11


def scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(SMALL, overrides, source="small")


def result_of(*overrides: str) -> Result:
    return simulate(scenario(*overrides))


def printed(view: PageView) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render_table(view))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def figures(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, flags=re.DOTALL)
    assert match is not None
    return {figure["name"]: figure for figure in json.loads(match[1])}


@pytest.fixture(scope="module")
def slow() -> Result:
    return result_of(SLOW)


@pytest.fixture(scope="module")
def steps() -> Result:
    return result_of("steps=3", "disturbances.jitter=5%")


def test_one_healthy_step_says_nothing_of_steps_and_stragglers() -> None:
    view = page_view(result_of())
    assert (view.verdict.steps, view.waiting, view.subject.disturbed, view.timeline.ends) == (None, None, "", ())
    assert not {"steps", "waiting"} & figures(render_page(view)).keys()
    assert not re.search("disturbed|straggler|steps:", printed(view))


def test_table_and_page_name_the_slow_rank_and_by_how_much(slow: Result) -> None:
    view = page_view(slow)
    for text in (printed(view), render_page(view)):
        assert "GPU 9 at 80 % speed" in text
        assert "rank 9 (stage 2)" in text
        assert "25.0%" in text  # 1 / 0.8 of the time


def test_the_slow_rank_is_shown_beside_a_rank_of_its_stage_that_is_not(slow: Result) -> None:
    rows = page_view(slow).timeline.rows
    titles = [row.title for row in rows if row.label == "stage 2"]
    assert "stage 2, slow rank 9" in titles
    assert len(titles) == 2
    assert [row.label for row in rows if row.label != "stage 2"] == ["stage 0", "stage 1", "stage 3"]


def test_the_slow_rank_computes_longest_and_waits_least_of_its_stage(slow: Result) -> None:
    waiting = page_view(slow).waiting
    assert waiting is not None
    (straggler,) = waiting.stragglers.slowest
    assert straggler.waits == pytest.approx(waiting.waits.least[straggler.kind])
    assert slow.to_json()["stragglers"]["slowest"][0]["ranks"] == [9]
    drawn = figures(render_page(page_view(slow)))["waiting"]
    assert [trace["name"] for trace in drawn["traces"]] == ["from least to most", "mean", "straggler"]


def test_a_box_says_what_it_waited_inside_and_by_how_much_it_was_slowed(slow: Result) -> None:
    traces = {trace["name"]: trace for trace in figures(render_page(page_view(slow)))["timeline"]["traces"]}
    assert any("slowed by communication by" in text for text in traces["backward"]["hovertext"])
    partner = timeline_of(slow, [int(slow.trace.representative[8])])  # meets rank 9 in every layer
    texts = next(trace["hovertext"] for trace in timeline_figure(drawing(partner)).traces if trace["name"] == "forward")
    assert all("inside for ranks that it meets" in text for text in texts)


def test_jitter_makes_no_straggler_and_the_page_says_so_without_a_figure() -> None:
    view = page_view(result_of("disturbances.jitter={std: 0.5 %, seed: 3}"))
    assert "jitter 0.5 % (normal, seed 3)" in printed(view)
    assert "none is a straggler" in render_page(view)
    assert "waiting" not in figures(render_page(view))


def test_of_ranks_that_all_differ_those_on_the_critical_path_are_shown() -> None:
    result = result_of("disturbances.jitter=5%")
    trace, ranks = result.trace, shown_ranks(result)
    on_path = np.bincount(trace.rank[result.path], minlength=16)
    assert result.program.kind[ranks].tolist() == [0, 1, 2, 3]
    assert on_path[ranks].min() > 0
    assert page_view(result).timeline.path.row.tolist()


def test_pieces_of_the_path_are_not_joined_over_ranks_that_are_not_shown(slow: Result) -> None:
    timeline = page_view(slow).timeline

    def links(shown: Timeline) -> int:
        (line,) = [trace for trace in timeline_figure(drawing(shown)).traces if trace["type"] == "scatter"]
        return int(np.isnan(np.frombuffer(b64decode(line["x"]["bdata"]))).sum())

    follows = timeline.path.follows.copy()
    follows[np.flatnonzero(np.diff(timeline.path.row))[0] + 1] = False
    broken = replace(timeline, path=replace(timeline.path, follows=follows))
    assert links(broken) == links(timeline) - 1
    assert "runs through ranks that are not shown" in timeline_caption(drawing(broken))


def test_steps_are_told_as_mean_and_distribution(steps: Result) -> None:
    view = page_view(steps)
    text = printed(view)
    assert "mean of 3 steps: min " in text
    assert view.verdict.steps is not None
    assert view.verdict.step_time == pytest.approx(view.verdict.steps.times.mean())
    spread = list(steps.to_json()["step_time_distribution_s"].values())
    assert spread == sorted(spread)
    assert "per training step, the mean of 3" in render_page(view)
    drawn = figures(render_page(view))["steps"]
    assert drawn["traces"][0]["mode"] == "lines+markers"


def test_the_timeline_shows_all_steps_and_counts_microbatches_from_the_beginning_of_each(steps: Result) -> None:
    timeline = page_view(steps).timeline
    assert timeline.ends == pytest.approx(np.cumsum(steps.step_times)[:2])
    spans = timeline.spans
    assert spans.end.max() == pytest.approx(steps.step_times.sum(), rel=0.01)  # the last rank of all is not shown
    forwards = np.flatnonzero(spans.category == CATEGORIES.index(Category.FORWARD))
    assert {number_of(spans, int(span)) for span in forwards if spans.microbatch[span] >= 0} == set(range(8))
    last = int(forwards[spans.microbatch[forwards].argmax()])
    assert what(spans, last) == "forward of microbatch 7, step 3"
    assert len(timeline_figure(drawing(timeline)).layout["shapes"]) == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ""),
        ([SLOW], "GPU 9 at 80 % speed"),
        (["disturbances.slow={node: 1, speed: 0.5}"], "GPUs 8-15 at 50 % speed"),
        (["disturbances.nics={gpu: 3, bandwidth: 0.25}"], "NICs of GPU 3 at 25 %"),
        (["disturbances.background={leaf: 30%}"], "30 % of every leaf link loaded by others"),
        (["disturbances.jitter={std: 2%, distribution: lognormal, seed: 7}"], "jitter 2 % (lognormal, seed 7)"),
        ([SLOW, "disturbances.jitter=1%"], "GPU 9 at 80 % speed; jitter 1 % (normal, seed 0)"),
        (
            ["disturbances.slow=[" + ", ".join(f"{{gpu: {gpu}, speed: 0.9}}" for gpu in range(5)) + "]"],
            "GPU 0 at 90 % speed; GPU 1 at 90 % speed; GPU 2 at 90 % speed; 2 more of the kind",
        ),
    ],
)
def test_what_is_disturbed_is_one_line(overrides: Sequence[str], words: str) -> None:
    assert disturbed_line(scenario(*overrides)) == words


def test_of_mixed_accelerators_each_is_counted() -> None:
    mixed = scenario("cluster.mixed={node: 1, accelerator: h200-sxm-141gb}")
    assert gpu_line(scenario()) == "h100-sxm-80gb"
    assert gpu_line(mixed) == "(8 h100-sxm-80gb + 8 h200-sxm-141gb)"


def test_a_comparison_takes_every_case_against_the_first_and_shows_one_close_up(slow: Result, tmp_path: Path) -> None:
    healthy = result_of()
    results = {"healthy": healthy, "one <slow> GPU": slow}
    write_comparison(results, tmp_path / "page.html", title="cost", shown="one <slow> GPU")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"<td>{slow.step_time / healthy.step_time - 1:.1%}</td>" in text
    assert "Close up: one &lt;slow&gt; GPU" in text
    assert set(figures(text)) == {"difference", "waiting", "stages", "timeline"}


def test_differences_of_parts_sum_to_the_difference_of_the_step(slow: Result) -> None:
    views = {"healthy": page_view(result_of()), "slow": page_view(slow)}
    *parts, step = figures(comparison_page(views, "cost", "healthy"))["difference"]["traces"]
    values = [np.frombuffer(b64decode(trace["x"]["bdata"])) for trace in (*parts, step)]
    assert sum(value[0] for value in values[:-1]) == pytest.approx(values[-1][0], rel=1e-2)
