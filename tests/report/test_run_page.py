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
from clustersim.results.time_categories import TIME_CATEGORIES
from tests.report.page_reader import figures
from tests.small_pipeline import pipeline, printed, said, simulated

Make = Callable[..., PipelineTimeline]
HOSTILE = "</script><b>&'\"x"


def without_plotly(text: str) -> str:
    """The page without plotly.js, which holds addresses of maps that it is never asked to draw."""
    return re.sub(r'<script type="text/plain" id="plotly">[^<]*</script>', "", text)


def test_nothing_is_loaded_from_outside() -> None:
    text = run_page(simulated())
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=", text) == []
    assert "default-src 'none'" in text
    assert "http" not in without_plotly(text).replace("http-equiv", "")


def test_plotly_is_in_the_page_once_and_the_page_is_small(make_timeline: Make) -> None:
    text = html_document("small", [timeline_panel(make_timeline(16, 64, 8))])
    (library,) = re.findall(r'<script type="text/plain" id="plotly">([^<]*)</script>', text)
    assert zlib.decompress(base64.b64decode(library)) == PLOTLY_PATH.read_bytes()
    assert len(text.encode()) < 15e6


def test_hostile_names_stay_text(make_timeline: Make) -> None:
    hostile = said(simulated(), scenario=simulated().scenario.with_overrides(f"name={json.dumps(HOSTILE)}"))
    text = without_plotly(run_page(said(hostile, experience=HOSTILE, suggestions=(HOSTILE,), not_modelled=(HOSTILE,))))
    rows = without_plotly(html_document(HOSTILE, [timeline_panel(make_timeline(4, 8, 1, HOSTILE))]))
    for item in (text, rows):
        assert "<b>&" not in item
        assert HOSTILE not in item
        assert item.count("</script>") == 2
    assert "&lt;/script&gt;&lt;b&gt;" in figures(rows)["timeline"]["layout"]["yaxis"]["ticktext"][0]


def test_the_waterfall_begins_each_part_where_the_last_one_ended_and_sums_to_the_step() -> None:
    times = StepBreakdown(
        np.arange(1.0, len(TIME_CATEGORIES) + 1),
        np.arange(1.0, len(TIME_CATEGORIES) + 1)[::-1],
        np.zeros((0, len(TIME_CATEGORIES))),
    )
    *parts, whole = waterfall_figure(times).traces
    mean, path = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    for shown in (mean, path):
        ends = [0.0] + [part["base"][0] + part["x"][0] for part in shown]
        assert [part["base"][0] for part in shown] == pytest.approx(ends[:-1])
        assert whole["x"][0] == pytest.approx(ends[-1])
    assert [part["y"] for part in mean] == [part["y"] for part in path]
    assert whole["x"][0] == pytest.approx(times.step_seconds)


def test_what_is_only_rounding_is_no_part() -> None:
    step = np.zeros(len(TIME_CATEGORIES))
    step[:2] = 1.0, 1e-16
    names = {
        trace["name"] for trace in waterfall_figure(StepBreakdown(step, np.zeros_like(step), step[None, :])).traces
    }
    assert "compute" in names and "recompute" not in names


def test_more_rows_than_fit_are_sampled_and_the_caption_says_so(make_timeline: Make) -> None:
    text = html_document("many", [timeline_panel(make_timeline(80, 2))])
    assert "64 of 80 stages are shown" in text
    assert len(figures(text)["timeline"]["layout"]["yaxis"]["tickvals"]) == 64


def test_a_step_in_which_nothing_happens_is_drawn(make_timeline: Make) -> None:
    whole, real = np.zeros(0, dtype=np.int64), np.zeros(0)
    nothing = TimelineSpans(*[whole] * 5, *[real] * 4, *[whole] * 3, real, real, texts=())
    path = CriticalPath(whole, whole, real, real, whole > 0)
    assert timeline_panel(replace(make_timeline(1, 1), spans=nothing, path=path)).figures
    parts = np.zeros(len(TIME_CATEGORIES))
    (end,) = waterfall_figure(StepBreakdown(parts, parts, parts[None, :])).traces
    assert end["x"] == [0.0]


def test_the_fullest_stage_is_chosen_first() -> None:
    stages = [
        StageMemory(n, f"stage {n}", np.zeros(1), np.full((len(Use), 1), size))
        for n, size in enumerate((1.0, 3.0, 2.0))
    ]
    assert [name for name, _ in memory_figure(stages, 80 * 2.0**30, 1.0).choices] == ["stage 1", "stage 0", "stage 2"]
    assert '<option value="0">stage 0</option>' in run_page(simulated())


def test_the_page_is_whole_or_not_there(tmp_path: Path) -> None:
    simulate(pipeline()).save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").endswith("</html>\n")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_notebook_gets_one_frame_with_a_document_of_its_own() -> None:
    text = notebook_html(simulated(f"name={json.dumps(HOSTILE)}"))
    assert text.startswith("<iframe srcdoc=")
    assert text.count("<") == 2


def test_suggestions_stand_apart_from_warnings() -> None:
    odd = said(simulated("training.global_batch=10"), suggestions=("tp 8 would fit",))
    warned = odd.scenario.warnings
    text = without_plotly(run_page(odd))
    assert "<h3>What would make it fit</h3><ul><li>tp 8 would fit</li></ul>" in text
    assert [warning for warning in warned if f'<ul class="alerts"><li>{html.escape(warning)}' in text] == [*warned][:1]
    assert "What would make it fit" not in without_plotly(run_page(simulated()))


@pytest.mark.parametrize("provenance", list(Provenance))
def test_table_and_page_call_the_source_of_a_duration_the_same_and_the_page_explains_it(provenance: Provenance) -> None:
    result = said(simulated(), provenance={provenance.value: 1.0})
    text = without_plotly(run_page(result))
    assert PROVENANCE_LABELS[provenance] in text
    assert re.search(
        rf'<th scope="row">{PROVENANCE_LABELS[provenance]}</th>.*?<td colspan="3">\w.*?\.</td>', text, re.DOTALL
    )
    assert PROVENANCE_LABELS[provenance] in printed(result)


def test_what_experience_says_stands_under_the_verdict() -> None:
    text = without_plotly(run_page(said(simulated(), experience="as fast as others")))
    assert text.index("as fast as others") < text.index("Where the time goes")


def test_a_long_step_has_both_units_in_the_headline() -> None:
    assert "3<small>&nbsp;d</small> 4<small>&nbsp;h</small>" in run_page(said(simulated(), step_time=2.736e5))


def test_rows_are_called_pipeline_ranks_where_each_holds_several_stages(make_timeline: Make) -> None:
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


def test_the_rate_of_a_slow_chip_has_its_own_unit() -> None:
    assert "<dt>GFLOP/s per GPU</dt><dd>96.62</dd>" in run_page(said(simulated(), flops_per_gpu=9.662e10))


def test_small_screens_get_short_names_of_rows(make_timeline: Make) -> None:
    step = np.ones(len(TIME_CATEGORIES))
    apart = step + len(TIME_CATEGORIES) * np.arange(3.0)[:, None]
    (figure,) = stages_panel(StepBreakdown(step, step, apart), make_timeline(3, 8)).figures
    drawn = figure.narrow["yaxis"]
    assert drawn["tickvals"] == ["stage 0", "stage 1", "stage 2"]
    assert drawn["ticktext"] == ["0 ", "1 ", "2 "]
