"""Multiple steps, stragglers and jitter on the page, in the table and in the comparison page."""

import html
import re
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clustersim.common.units import format_seconds
from clustersim.report.comparison_page import comparison_page
from clustersim.report.draw.timeline_figure import timeline_caption
from clustersim.report.labels import describe_degradations, describe_gpus
from clustersim.report.panels.stragglers import SHARED_DELAY_NOTE, waiting_figure
from clustersim.report.result_timeline import build_timeline
from clustersim.report.row_selection import select_ranks
from clustersim.report.run_page import run_page
from clustersim.report.step_breakdown import step_breakdown
from clustersim.report.straggler_labels import describe_no_stragglers, has_straggler_content
from clustersim.report.theme import CATEGORY_STYLES, CategoryStyle
from clustersim.report.timeline_arrays import build_drawing
from clustersim.report.timeline_data import PipelineTimeline
from clustersim.results.simulation_result import SimulationResult
from tests.report.page_reader import decode_arrays, figures_by_name
from tests.sentences import parts
from tests.small_pipeline import pipeline_scenario, render_terminal, simulate_pipeline

SLOW_GPU = "degradations.slow={gpu: 9, speed: 0.8}"  # stage 2 is ranks 8 to 11


def shown_timeline(result: SimulationResult) -> PipelineTimeline:
    return build_timeline(result, select_ranks(result))


@pytest.fixture(scope="module")
def slow() -> SimulationResult:
    return simulate_pipeline(SLOW_GPU)


@pytest.fixture(scope="module")
def timeline(slow: SimulationResult) -> PipelineTimeline:
    return shown_timeline(slow)


@pytest.fixture(scope="module")
def page(slow: SimulationResult) -> str:
    return run_page(slow)


@pytest.fixture(scope="module")
def steps() -> SimulationResult:
    return simulate_pipeline("steps=3", "degradations.jitter=5%")


def test_healthy_single_step_has_no_steps_or_stragglers() -> None:
    healthy = simulate_pipeline()
    assert not has_straggler_content(healthy)
    assert shown_timeline(healthy).step_ends == ()
    assert not {"steps", "waiting"} & figures_by_name(run_page(healthy)).keys()
    assert not re.search("disturbed|straggler|steps:", render_terminal(healthy))


def test_table_and_page_name_the_slow_rank_and_by_how_much(slow: SimulationResult, page: str) -> None:
    for text in (render_terminal(slow, 200), page):
        assert "GPU 9 at 80 % speed" in text
        assert "rank 9 (stage 2)" in text
        assert "25.0%" in text  # 1 / 0.8 of the time


def test_slow_rank_has_a_row_next_to_a_healthy_rank(timeline: PipelineTimeline) -> None:
    rows = timeline.rows
    titles = [row.title for row in rows if row.label == "stage 2"]
    assert "stage 2, slow rank 9" in titles
    assert len(titles) == 2
    assert [row.label for row in rows if row.label != "stage 2"] == ["stage 0", "stage 1", "stage 3"]


def test_straggler_waits_least_in_its_stage(slow: SimulationResult) -> None:
    (straggler,) = slow.stragglers.slowest
    assert straggler.wait_seconds == pytest.approx(slow.wait_times.minimum[straggler.program_index])
    assert slow.to_json()["stragglers"]["slowest"][0]["ranks"] == [9]
    drawn = waiting_figure(slow).traces
    assert [trace["name"] for trace in drawn] == ["the one that waits most", "mean", "straggler"]


def decode_x(trace: dict[str, Any]) -> list[float]:
    return np.frombuffer(b64decode(trace["x"]["bdata"])).tolist()


def test_waits_are_drawn_relative_to_the_minimum(slow: SimulationResult, page: str) -> None:
    waits = slow.wait_times
    longest, mean, straggler = figures_by_name(page)["waiting"]["traces"]
    assert decode_x(longest) == pytest.approx(1e3 * (waits.maximum - waits.minimum), abs=1e-6)  # in ms
    assert decode_x(mean) == pytest.approx(1e3 * (waits.mean - waits.minimum), abs=1e-6)
    assert decode_x(straggler) == [0.0]
    assert (
        decode_x(mean)[2] > 0.5 * decode_x(longest)[2] > 5.0
    )  # one of four ranks is slow and its group peers wait for it


def test_slow_nic_is_detected_by_communication_time() -> None:
    result = simulate_pipeline("degradations.nics={gpu: 9, bandwidth: 2 %}")
    first = result.stragglers.slowest[0]
    assert (first.ranks, first.has_slow_kernels) == ((9,), False)
    label = "straggler: rank 9 (stage 2): communication takes "
    assert f"{label}{format_seconds(first.comm_delay)} longer than the median of its stage" in render_terminal(
        result, 200
    )
    assert SHARED_DELAY_NOTE in run_page(result)
    assert "stage 2, slow rank 9" in [row.title for row in shown_timeline(result).rows]
    assert result.to_json()["stragglers"]["slowest"][0]["communication_delay_s"] == first.comm_delay


def test_dead_nvlink_is_detected_by_its_groups_communication() -> None:
    result = simulate_pipeline("degradations.links=[{between: [gpu9, nvswitch1], dead: true}]")
    assert {rank for straggler in result.stragglers.slowest for rank in straggler.ranks} == {
        8,
        9,
    }  # a tensor-parallel group


def test_straggler_of_a_single_program_does_not_wait() -> None:
    overrides = [
        "layout={tp: 1, dp: 16, data: fsdp}",
        "training.global_batch=16",
        "degradations.slow={gpu: 9, speed: 0.8}",
    ]
    result = simulate_pipeline(*overrides)
    assert has_straggler_content(result)
    (straggler,) = result.stragglers.slowest
    assert (straggler.ranks, straggler.wait_seconds) == ((9,), 0.0)
    assert "<td>0 s</td></tr>" in run_page(result)


@pytest.mark.parametrize(
    "override",
    [
        "degradations.background={leaf: 30%}",
        "degradations.nics={gpu: 9, bandwidth: 99 %}",
        "degradations.jitter=0.01 %",
    ],
)
@pytest.mark.parametrize("steps", ["steps=1", "steps=2"])
def test_invisible_degradations_are_reported(override: str, steps: str) -> None:
    result = simulate_pipeline(override, steps)
    assert has_straggler_content(result)
    assert result.stragglers.rank_count == 0
    assert describe_degradations(result.scenario) in describe_no_stragglers(result)
    page = run_page(result)
    for text in (" ".join(render_terminal(result, 200).split()), html.unescape(page)):
        assert parts("not visible ... kernel or communication time ... single ranks").search(text)
        assert "none is a straggler" not in text
    assert "Waiting and stragglers" in page
    assert ("Jitter evens out" in describe_no_stragglers(result)) is ("jitter" in override)


def test_table_and_page_show_critical_path_and_mean(slow: SimulationResult, page: str) -> None:
    assert step_breakdown(slow).critical_path_seconds.sum() == pytest.approx(slow.step_time)
    slowed_seconds = slow.critical_path_breakdown["slowed by communication"]
    (line,) = [line for line in render_terminal(slow, 200).splitlines() if line.startswith("slowed by communication")]
    assert format_seconds(slowed_seconds) in line
    assert f"<td>{format_seconds(slowed_seconds)}</td></tr>" in page
    for text in (" ".join(render_terminal(slow, 200).split()), page):
        assert parts("shortening tasks ... not on it does not shorten the step").search(text)


def test_breakdown_lines_fit_80_characters(slow: SimulationResult) -> None:
    lines = render_terminal(slow, 80).splitlines()
    assert not [line for line in lines if line.strip() and not line.strip(" █▏▎▍▌▋▊▉")]  # a bar that did not fit


def test_boxes_have_waiting_and_slowdown_times(slow: SimulationResult, timeline: PipelineTimeline) -> None:
    assert decode_arrays(build_drawing(timeline).arrays)["slowed"].sum() == pytest.approx(
        timeline.spans.slowed.sum(), rel=1e-6
    )
    partner = build_drawing(
        build_timeline(slow, [int(slow.trace.representative[8])])
    )  # synchronizes with rank 9 in every layer
    arrays = decode_arrays(partner.arrays)
    assert (arrays["waited"][arrays["style"] == CATEGORY_STYLES.index(CategoryStyle.FORWARD)] > 0).all()


def test_jitter_has_no_straggler_but_a_waiting_figure() -> None:
    result = simulate_pipeline("degradations.jitter={std: 0.5 %, seed: 3}")
    assert "jitter 0.5 % (normal, seed 3)" in render_terminal(result)
    page = run_page(result)
    assert "the ranks wait for whoever comes last each time" in page
    assert "waiting" in figures_by_name(page)


def test_shown_ranks_are_on_the_critical_path_under_jitter() -> None:
    result = simulate_pipeline("degradations.jitter=5%")
    trace, ranks = result.trace, select_ranks(result)
    on_path = np.bincount(trace.rank[result.critical_path], minlength=16)
    assert result.program.program_index[ranks].tolist() == [0, 1, 2, 3]
    assert on_path[ranks].min() > 0
    assert shown_timeline(result).path.row.tolist()


def test_path_segments_do_not_link_across_hidden_ranks(timeline: PipelineTimeline) -> None:
    def link_count(drawn_timeline: PipelineTimeline) -> int:
        return int(decode_arrays(build_drawing(drawn_timeline).arrays)["pathFollows"].sum())

    follows = timeline.path.is_connected.copy()
    crossing = np.flatnonzero(np.diff(timeline.path.row)) + 1
    follows[crossing[follows[crossing]][0]] = False
    broken = replace(timeline, path=replace(timeline.path, is_connected=follows))
    assert link_count(broken) == link_count(timeline) - 1
    assert "runs through ranks that are not shown" in timeline_caption(build_drawing(broken))


def test_steps_are_reported_as_mean_and_distribution(steps: SimulationResult) -> None:
    assert "mean of 3 steps: min " in render_terminal(steps)
    assert steps.step_time == pytest.approx(steps.step_times.mean())
    spread = list(steps.to_json()["step_time_distribution_s"].values())
    assert spread == sorted(spread)
    page = run_page(steps)
    assert "per training step, the mean of 3" in page
    assert figures_by_name(page)["steps"]["traces"][0]["mode"] == "lines+markers"


def test_timeline_shows_all_steps_with_per_step_microbatches(steps: SimulationResult) -> None:
    timeline = shown_timeline(steps)
    assert timeline.step_ends == pytest.approx(np.cumsum(steps.step_times)[:2])
    spans = timeline.spans
    assert spans.end.max() == pytest.approx(steps.step_times.sum(), rel=0.01)  # the last rank of all is not shown
    forwards = np.flatnonzero(spans.category == CATEGORY_STYLES.index(CategoryStyle.FORWARD))
    assert (spans.microbatches_per_step, int(spans.microbatch[forwards].max())) == (8, 3 * 8 - 1)
    drawn = build_drawing(timeline)
    assert decode_arrays(drawn.arrays)["ends"] * drawn.tick_seconds == pytest.approx(
        timeline.step_ends, abs=drawn.tick_seconds
    )


@pytest.mark.parametrize(
    ("overrides", "description"),
    [
        ([], ""),
        ([SLOW_GPU], "GPU 9 at 80 % speed"),
        (["degradations.slow={node: 1, speed: 0.5}"], "GPUs 8-15 at 50 % speed"),
        (["degradations.nics={gpu: 3, bandwidth: 0.25}"], "NICs of GPU 3 at 25 %"),
        (
            ["degradations.links=[{between: [gpu3, nvswitch0], dead: true}]"],
            "link gpu3 - nvswitch0 dead",
        ),
        (["degradations.nics={gpu: 3, dead: true}"], "NICs of GPU 3 dead"),
        (["degradations.background={leaf: 30%}"], "30 % of every leaf link loaded by others"),
        (["degradations.jitter={std: 2%, distribution: lognormal, seed: 7}"], "jitter 2 % (lognormal, seed 7)"),
        ([SLOW_GPU, "degradations.jitter=1%"], "GPU 9 at 80 % speed; jitter 1 % (normal, seed 0)"),
        (
            ["degradations.slow=[" + ", ".join(f"{{gpu: {gpu}, speed: 0.9}}" for gpu in range(5)) + "]"],
            "GPU 0 at 90 % speed ... GPU 1 at 90 % speed ... GPU 2 at 90 % speed ... 2 more",
        ),
    ],
)
def test_degradation_line(overrides: Sequence[str], description: str) -> None:
    assert parts(description).match(describe_degradations(pipeline_scenario(*overrides)))


@pytest.mark.parametrize(
    ("what", "description"),
    [("dead: true", "1 of 16 links"), ("dead: 3", "3 of 16 links"), ("bandwidth: 0.5", "16 links")],
)
def test_degradation_line_counts_links_of_a_bundle(what: str, description: str) -> None:
    suffix = "at 50 %" if "bandwidth" in what else "dead"
    pod = ["cluster={name: llama3-roce, gpus: 512}", "layout.dp=64", "training.global_batch=64"]
    change = f"degradations.links=[{{from: leaf0.0, to: spine0.0, {what}}}]"
    assert describe_degradations(pipeline_scenario(*pod, change)) == f"{description} leaf0.0 -> spine0.0 {suffix}"


def test_gpu_line_counts_mixed_accelerators() -> None:
    mixed = pipeline_scenario("cluster.mixed={node: 1, accelerator: h200-sxm-141gb}")
    assert describe_gpus(pipeline_scenario()) == "h100-sxm-80gb"
    assert describe_gpus(mixed) == "(8 h100-sxm-80gb + 8 h200-sxm-141gb)"


def test_comparison_page_against_the_first_with_detail(slow: SimulationResult) -> None:
    healthy = simulate_pipeline()
    results = {"healthy": healthy, "one <slow> GPU": slow}
    text = comparison_page(results, "cost", "one <slow> GPU")
    assert f"<td>{slow.step_time / healthy.step_time - 1:.1%}</td>" in text
    assert "Close up: one &lt;slow&gt; GPU" in text
    assert set(figures_by_name(text)) == {"difference", "waiting", "stages", "timeline"}


def test_comparison_category_deltas_sum_to_step_delta(slow: SimulationResult) -> None:
    results = {"healthy": simulate_pipeline(), "slow": slow}
    *category_traces, step = figures_by_name(comparison_page(results, "cost", "healthy"))["difference"]["traces"]
    values = [np.frombuffer(b64decode(trace["x"]["bdata"])) for trace in (*category_traces, step)]
    assert sum(value[0] for value in values[:-1]) == pytest.approx(values[-1][0], rel=1e-2)
