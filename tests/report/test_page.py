import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim.report.notebook import fragment
from clustersim.report.page import render_page, write_page
from clustersim.report.timeline import drawing, timeline_caption
from clustersim.report.view import Breakdown, Memory, PageView, Spans
from clustersim.report.view import Path as CriticalPath

View = Callable[..., PageView]
HOSTILE = "</script><b>&'\"x"


def without_plotly(text: str) -> str:
    """The page without plotly.js, which holds addresses of maps that it is never asked to draw."""
    return re.sub(r"<script>/\*\*\s+\* plotly\.js.*?</script>", "", text, flags=re.DOTALL)


def figures(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, flags=re.DOTALL)
    assert match is not None
    return {figure["name"]: figure for figure in json.loads(match[1])}


def test_nothing_is_loaded_from_outside(make_view: View) -> None:
    text = render_page(make_view())
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=", text) == []
    assert "default-src 'none'" in text
    assert "http" not in without_plotly(text).replace("http-equiv", "")


def test_plotly_is_in_the_page_once_and_the_page_is_small(make_view: View) -> None:
    text = render_page(make_view(16, 64, 8))
    assert text.count("* plotly.js v") == 1
    assert len(text.encode()) < 15e6


def test_hostile_names_stay_text(make_view: View) -> None:
    text = without_plotly(render_page(make_view(title=HOSTILE, model=HOSTILE, warning=HOSTILE, label=HOSTILE)))
    assert "<b>&" not in text
    assert HOSTILE not in text
    assert text.count("</script>") == 2
    assert "&lt;/script&gt;&lt;b&gt;" in figures(text)["timeline"]["layout"]["yaxis"]["ticktext"][0]


def test_the_waterfall_begins_each_part_where_the_last_one_ended_and_sums_to_the_step(make_view: View) -> None:
    view = make_view()
    *parts, whole = figures(render_page(view))["waterfall"]["traces"]
    ends = [0.0] + [part["base"][0] + part["x"][0] for part in parts]
    assert [part["base"][0] for part in parts] == pytest.approx(ends[:-1])
    assert whole["x"][0] == pytest.approx(ends[-1])
    assert whole["x"][0] / 1e3 == pytest.approx(view.verdict.step_time)


def test_what_is_only_rounding_is_no_part(make_view: View) -> None:
    view = make_view()
    step, stages = view.breakdown.step.copy(), view.breakdown.stages.copy()
    step[2] = stages[:, 2] = 1e-16 * view.verdict.step_time
    text = render_page(replace(view, breakdown=replace(view.breakdown, step=step, stages=stages)))
    assert "recompute" not in {trace["name"] for trace in figures(text)["waterfall"]["traces"]}


def test_each_box_says_what_when_and_what_it_waited_for(make_view: View) -> None:
    traces = {trace["name"]: trace for trace in figures(render_page(make_view(2, 2)))["timeline"]["traces"]}
    hover = traces["forward"]["hovertext"][2]  # stage 0 holds the first two boxes
    assert "forward of microbatch 0" in hover
    assert "stage 1" in hover
    assert "for forward of microbatch 0 on stage 0" in hover
    assert "128 MiB moved" in traces["pipeline communication"]["hovertext"][0]


def test_more_stages_than_fit_are_sampled_and_the_caption_says_so(make_view: View) -> None:
    view = make_view(80, 2)
    assert "64 of 80 stages are shown" in render_page(view)
    assert len(figures(render_page(view))["timeline"]["layout"]["yaxis"]["tickvals"]) == 64


def test_a_caption_tells_when_spans_were_merged(make_view: View) -> None:
    view = make_view(8, 1000)
    drawn = drawing(view.timeline)
    assert len(drawn.boxes) <= 10_000 < len(view.timeline.spans)
    assert "merged with their neighbours" in timeline_caption(drawn)
    assert timeline_caption(drawing(make_view(4, 8).timeline)) == ""


def test_one_stage_and_one_rank_without_communication_make_a_page(make_view: View) -> None:
    view = make_view(1, 1)
    drawn = figures(render_page(replace(view, trust=replace(view.trust, ranks=1, simulated_ranks=1))))
    assert set(drawn) == {"waterfall", "timeline", "memory", "peaks"}


def test_an_empty_answer_makes_a_page(make_view: View) -> None:
    view = make_view(1, 1)
    whole, real = np.zeros(0, dtype=np.int64), np.zeros(0)
    nothing = Spans(*[whole] * 5, *[real] * 4, *[whole] * 3, texts=())
    empty = replace(
        view,
        timeline=replace(view.timeline, spans=nothing, path=CriticalPath(whole, whole, real, real)),
        breakdown=Breakdown((), (), real, np.zeros((1, 0))),
        memory=Memory((), (), (), 0.0),
    )
    assert set(figures(render_page(empty))) == {"waterfall", "timeline"}


def test_the_fullest_stage_is_chosen_first_and_its_peak_is_drawn(make_view: View) -> None:
    view = make_view(4, 8)
    peaks = [float(stage.held[:, stage.peak].sum()) for stage in view.memory.stages]
    text = render_page(view)
    assert f'<option value="0">stage {int(np.argmax(peaks))}</option>' in text
    assert len(figures(text)["memory"]["choices"]) == 4


def test_the_page_is_whole_or_not_there(make_view: View, tmp_path: Path) -> None:
    write_page(make_view(), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").endswith("</html>\n")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_notebook_gets_one_frame_with_a_document_of_its_own(make_view: View) -> None:
    text = fragment(make_view(title=HOSTILE))
    assert text.startswith("<iframe srcdoc=")
    assert text.count("<") == 2
