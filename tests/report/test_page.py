import base64
import html
import io
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from clustersim.cost.timing import Provenance
from clustersim.report.document import PLOTLY
from clustersim.report.notebook import fragment
from clustersim.report.page import render_page, write_page
from clustersim.report.table import render_table
from clustersim.report.view import Breakdown, Memory, PageView, Spans, Trust
from clustersim.report.view import Path as CriticalPath
from clustersim.report.wording import PROVENANCE_MEANINGS, PROVENANCE_NAMES
from tests.report.unpack import figures

View = Callable[..., PageView]
HOSTILE = "</script><b>&'\"x"


def without_plotly(text: str) -> str:
    """The page without plotly.js, which holds addresses of maps that it is never asked to draw."""
    return re.sub(r'<script type="text/plain" id="plotly">[^<]*</script>', "", text)


def test_nothing_is_loaded_from_outside(make_view: View) -> None:
    text = render_page(make_view())
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=", text) == []
    assert "default-src 'none'" in text
    assert "http" not in without_plotly(text).replace("http-equiv", "")


def test_plotly_is_in_the_page_once_and_the_page_is_small(make_view: View) -> None:
    text = render_page(make_view(16, 64, 8))
    (library,) = re.findall(r'<script type="text/plain" id="plotly">([^<]*)</script>', text)
    assert zlib.decompress(base64.b64decode(library)) == PLOTLY.read_bytes()
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
    mean, path = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    for shown in (mean, path):
        ends = [0.0] + [part["base"][0] + part["x"][0] for part in shown]
        assert [part["base"][0] for part in shown] == pytest.approx(ends[:-1])
        assert whole["x"][0] == pytest.approx(ends[-1])
    assert [part["y"] for part in mean] == [part["y"] for part in path]
    assert whole["x"][0] / 1e3 == pytest.approx(view.verdict.step_time)


def test_what_is_only_rounding_is_no_part(make_view: View) -> None:
    view = make_view()
    step, stages = view.breakdown.step.copy(), view.breakdown.stages.copy()
    step[2] = stages[:, 2] = 1e-16 * view.verdict.step_time
    text = render_page(replace(view, breakdown=replace(view.breakdown, step=step, stages=stages)))
    assert "recompute" not in {trace["name"] for trace in figures(text)["waterfall"]["traces"]}


def test_more_stages_than_fit_are_sampled_and_the_caption_says_so(make_view: View) -> None:
    view = make_view(80, 2)
    assert "64 of 80 stages are shown" in render_page(view)
    assert len(figures(render_page(view))["timeline"]["layout"]["yaxis"]["tickvals"]) == 64


def test_one_stage_and_one_rank_without_communication_make_a_page(make_view: View) -> None:
    view = make_view(1, 1)
    drawn = figures(render_page(replace(view, trust=replace(view.trust, ranks=1, simulated_ranks=1))))
    assert set(drawn) == {"waterfall", "timeline", "memory", "peaks"}


def test_an_empty_answer_makes_a_page(make_view: View) -> None:
    view = make_view(1, 1)
    whole, real = np.zeros(0, dtype=np.int64), np.zeros(0)
    nothing = Spans(*[whole] * 5, *[real] * 4, *[whole] * 3, real, real, texts=())
    empty = replace(
        view,
        timeline=replace(view.timeline, spans=nothing, path=CriticalPath(whole, whole, real, real, whole > 0)),
        breakdown=Breakdown((), (), real, np.zeros((1, 0)), real),
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


def test_suggestions_stand_apart_from_warnings(make_view: View) -> None:
    text = without_plotly(render_page(make_view(warning="odd batch", suggestion="tp 8 would fit")))
    assert '<ul class="alerts"><li>odd batch</li></ul>' in text
    assert "<h3>What would make it fit</h3><ul><li>tp 8 would fit</li></ul>" in text
    assert "What would make it fit" not in without_plotly(render_page(make_view()))


@pytest.mark.parametrize("provenance", list(Provenance))
def test_table_and_page_call_the_source_of_a_duration_the_same_and_the_page_explains_it(
    make_view: View, provenance: Provenance
) -> None:
    view = make_view()
    trust = replace(view.trust, provenance={provenance: 1.0})
    text = without_plotly(render_page(replace(view, trust=trust)))
    assert PROVENANCE_NAMES[provenance] in text
    assert PROVENANCE_MEANINGS[provenance] in html.unescape(text)
    assert PROVENANCE_NAMES[provenance] in printed(view, trust)


def printed(view: PageView, trust: Trust) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(render_table(replace(view, trust=trust)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_experience_says_stands_under_the_verdict(make_view: View) -> None:
    text = without_plotly(render_page(make_view()))
    assert text.index("as fast as others") < text.index("Where the time goes")


def test_a_long_step_has_both_units_in_the_headline(make_view: View) -> None:
    view = make_view()
    text = render_page(replace(view, verdict=replace(view.verdict, step_time=2.736e5)))
    assert "3<small>&nbsp;d</small> 4<small>&nbsp;h</small>" in text


def test_rows_are_called_pipeline_ranks_where_each_holds_several_stages(make_view: View) -> None:
    view = make_view(80, 2)
    timeline = replace(view.timeline, row_word="pipeline rank", row_note="Rank 0 holds stages 0 and 80.")
    text = without_plotly(render_page(replace(view, timeline=timeline)))
    assert "<h2>Each pipeline rank</h2>" in text
    assert "One row for each pipeline rank" in text
    assert "64 of 80 pipeline ranks are shown" in text
    assert text.count("Rank 0 holds stages 0 and 80.") == 2  # under the stages and under the timeline


def test_the_rate_of_a_slow_chip_has_its_own_unit(make_view: View) -> None:
    view = make_view()
    text = render_page(replace(view, verdict=replace(view.verdict, model_flops_per_gpu=9.662e10)))
    assert "<dt>GFLOP/s per GPU</dt><dd>96.62</dd>" in text


def test_small_screens_get_short_names_of_rows(make_view: View) -> None:
    view = make_view(3)
    step = view.breakdown.stages.sum(axis=1, keepdims=True)
    apart = view.breakdown.stages + step * np.arange(3)[:, None]
    view = replace(view, breakdown=replace(view.breakdown, stages=apart))
    drawn = figures(render_page(view))["stages"]["narrow"]["yaxis"]
    assert drawn["tickvals"] == ["stage 0", "stage 1", "stage 2"]
    assert drawn["ticktext"] == ["0 ", "1 ", "2 "]
