"""The run page: self-contained, escaped, with correct panels."""

import base64
import html
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clustersim import simulate
from clustersim.cost.timing import Provenance
from clustersim.memory.footprint import MemoryCategory as Use
from clustersim.report.draw.timeline_figure import timeline_panel
from clustersim.report.html_document import PLOTLY_PATH, html_document
from clustersim.report.labels import PROVENANCE_LABELS
from clustersim.report.panels.memory import StageMemory, memory_figure
from clustersim.report.panels.time_breakdown import stages_panel, waterfall_figure
from clustersim.report.run_page import notebook_html, run_page
from clustersim.report.step_breakdown import StepBreakdown
from clustersim.report.timeline_data import PipelineTimeline, TimelineSpans
from clustersim.report.timeline_data import TimelinePath as CriticalPath
from clustersim.results.oom_suggestions import MemorySuggestion
from clustersim.results.time_categories import TIME_CATEGORIES
from tests.report.page_reader import figures_by_name
from tests.small_pipeline import override_result, pipeline_scenario, render_terminal, simulate_pipeline

Make = Callable[..., PipelineTimeline]
HTML_INJECTION = "</script><b>&'\"x"


def without_plotly(text: str) -> str:
    """The page without plotly.js, which contains URLs of map services that are never used."""
    return re.sub(r'<script type="text/plain" id="plotly">[^<]*</script>', "", text)


def test_page_loads_no_external_resources() -> None:
    text = run_page(simulate_pipeline())
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=", text) == []
    assert "default-src 'none'" in text
    assert "http" not in without_plotly(text).replace("http-equiv", "")


def test_plotly_is_embedded_once_and_the_page_is_small(make_timeline: Make) -> None:
    text = html_document("small", [timeline_panel(make_timeline(16, 64, 8))])
    (library,) = re.findall(r'<script type="text/plain" id="plotly">([^<]*)</script>', text)
    assert zlib.decompress(base64.b64decode(library)) == PLOTLY_PATH.read_bytes()
    assert len(text.encode()) < 15e6


def test_names_are_escaped(make_timeline: Make) -> None:
    hostile = override_result(
        simulate_pipeline(), scenario=simulate_pipeline().scenario.with_overrides(f"name={json.dumps(HTML_INJECTION)}")
    )
    text = without_plotly(
        run_page(
            override_result(
                hostile,
                interval_description=HTML_INJECTION,
                oom_suggestions=(MemorySuggestion((), HTML_INJECTION),),
                model_limitations=(HTML_INJECTION,),
            )
        )
    )
    timeline_page = without_plotly(
        html_document(HTML_INJECTION, [timeline_panel(make_timeline(4, 8, 1, HTML_INJECTION))])
    )
    for page in (text, timeline_page):
        assert "<b>&" not in page
        assert HTML_INJECTION not in page
        assert page.count("</script>") == 2
    assert "&lt;/script&gt;&lt;b&gt;" in figures_by_name(timeline_page)["timeline"]["layout"]["yaxis"]["ticktext"][0]


def test_waterfall_is_contiguous_and_sums_to_the_step() -> None:
    times = StepBreakdown(
        np.arange(1.0, len(TIME_CATEGORIES) + 1),
        np.arange(1.0, len(TIME_CATEGORIES) + 1)[::-1],
        np.zeros((0, len(TIME_CATEGORIES))),
    )
    *bars, step_bar = waterfall_figure(times).traces
    mean, path = bars[: len(bars) // 2], bars[len(bars) // 2 :]
    for series in (mean, path):
        ends = [0.0] + [bar["base"][0] + bar["x"][0] for bar in series]
        assert [bar["base"][0] for bar in series] == pytest.approx(ends[:-1])
        assert step_bar["x"][0] == pytest.approx(ends[-1])
    assert [bar["y"] for bar in mean] == [bar["y"] for bar in path]
    assert step_bar["x"][0] == pytest.approx(times.step_seconds)


def test_rounding_errors_have_no_bar() -> None:
    step = np.zeros(len(TIME_CATEGORIES))
    step[:2] = 1.0, 1e-16
    names = {
        trace["name"] for trace in waterfall_figure(StepBreakdown(step, np.zeros_like(step), step[None, :])).traces
    }
    assert "compute" in names and "recompute" not in names


def test_rows_above_the_limit_are_sampled_with_a_caption(make_timeline: Make) -> None:
    text = html_document("many", [timeline_panel(make_timeline(80, 2))])
    assert "64 of 80 stages are shown" in text
    assert len(figures_by_name(text)["timeline"]["layout"]["yaxis"]["tickvals"]) == 64


def test_empty_step_is_drawn(make_timeline: Make) -> None:
    no_ints, no_floats = np.zeros(0, dtype=np.int64), np.zeros(0)
    no_spans = TimelineSpans(*[no_ints] * 5, *[no_floats] * 4, *[no_ints] * 3, no_floats, no_floats, texts=())
    path = CriticalPath(no_ints, no_ints, no_floats, no_floats, no_ints > 0)
    assert timeline_panel(replace(make_timeline(1, 1), spans=no_spans, path=path)).figures
    zeros = np.zeros(len(TIME_CATEGORIES))
    (end,) = waterfall_figure(StepBreakdown(zeros, zeros, zeros[None, :])).traces
    assert end["x"] == [0.0]


def test_peak_memory_stage_is_preselected() -> None:
    stages = [
        StageMemory(n, f"stage {n}", np.zeros(1), np.full((len(Use), 1), size))
        for n, size in enumerate((1.0, 3.0, 2.0))
    ]
    assert [name for name, _ in memory_figure(stages, 80 * 2.0**30, 1.0).choices] == ["stage 1", "stage 0", "stage 2"]
    assert '<option value="0">stage 0</option>' in run_page(simulate_pipeline())


def test_page_is_written_atomically(tmp_path: Path) -> None:
    simulate(pipeline_scenario()).save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").endswith("</html>\n")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_notebook_fragment_is_one_iframe() -> None:
    text = notebook_html(simulate_pipeline(f"name={json.dumps(HTML_INJECTION)}"))
    assert text.startswith("<iframe srcdoc=")
    assert text.count("<") == 2


def test_suggestions_are_separate_from_warnings() -> None:
    suggestion = MemorySuggestion((), "tp 8 would fit")
    result = override_result(simulate_pipeline("training.global_batch=10"), oom_suggestions=(suggestion,))
    warnings = result.scenario.warnings
    text = without_plotly(run_page(result))
    assert "<h3>What would make it fit surely</h3><ul><li>tp 8 would fit</li></ul>" in text
    assert [warning for warning in warnings if f'<ul class="alerts"><li>{html.escape(warning)}' in text] == [*warnings][
        :1
    ]
    assert "What would make it fit" not in without_plotly(run_page(simulate_pipeline()))


@pytest.mark.parametrize("provenance", list(Provenance))
def test_provenance_labels_on_terminal_and_page(provenance: Provenance) -> None:
    result = override_result(simulate_pipeline(), provenance_shares={provenance.value: 1.0})
    text = without_plotly(run_page(result))
    assert PROVENANCE_LABELS[provenance] in text
    assert re.search(
        rf'<th scope="row">{PROVENANCE_LABELS[provenance]}</th>.*?<td colspan="3">\w.*?\.</td>', text, re.DOTALL
    )
    assert PROVENANCE_LABELS[provenance] in render_terminal(result)


def test_prediction_interval_follows_the_verdict() -> None:
    text = without_plotly(run_page(override_result(simulate_pipeline(), interval_description="as fast as others")))
    assert text.index("as fast as others") < text.index("Where the time goes")


def test_headline_of_long_step_has_two_units() -> None:
    assert "3<small>&nbsp;d</small> 4<small>&nbsp;h</small>" in run_page(
        override_result(simulate_pipeline(), step_time=2.736e5)
    )


def test_rows_with_several_stages_are_pipeline_ranks(make_timeline: Make) -> None:
    timeline = replace(make_timeline(80, 2), row_type="pipeline rank", row_note="Rank 0 holds stages 0 and 80.")
    step = np.ones(len(TIME_CATEGORIES))
    cards = [
        stages_panel(StepBreakdown(step, step, np.ones((80, len(TIME_CATEGORIES)))), timeline),
        timeline_panel(timeline),
    ]
    text = without_plotly(html_document("rows", cards))
    assert "<h2>Each pipeline rank</h2>" in text
    assert "One row for each pipeline rank" in text
    assert "64 of 80 pipeline ranks are shown" in text
    assert text.count("Rank 0 holds stages 0 and 80.") == 2  # under the stages and under the timeline


def test_low_flop_rate_uses_gflops() -> None:
    assert "<dt>GFLOP/s per GPU</dt><dd>96.62</dd>" in run_page(
        override_result(simulate_pipeline(), peak_flops=1e12, mfu=0.09662, mfu_causal=0.09662)
    )


def test_narrow_layout_has_short_row_labels(make_timeline: Make) -> None:
    step = np.ones(len(TIME_CATEGORIES))
    distinct_stages = step + len(TIME_CATEGORIES) * np.arange(3.0)[:, None]
    (figure,) = stages_panel(StepBreakdown(step, step, distinct_stages), make_timeline(3, 8)).figures
    drawn = figure.narrow["yaxis"]
    assert drawn["tickvals"] == ["stage 0", "stage 1", "stage 2"]
    assert drawn["ticktext"] == ["0 ", "1 ", "2 "]
