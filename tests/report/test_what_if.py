"""The what-if panel: bars at equal work, values as text, markers for OOM, reasons for skipped cases."""

import html
import re
from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from clustersim.report.panels.what_if import what_if_panel
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport

GIB = 2.0**30


def build_outcome(step_time: float, *, tokens: float = 1.0, fits: bool = True) -> WhatIfOutcome:
    return WhatIfOutcome(step_time, 2.0, tokens, 100.0 * tokens * 2.0 / step_time, 70 * GIB, fits, 0.9, 0.0, {})


WHAT_IFS = WhatIfReport(
    2.0,
    100.0,
    True,
    0.58,
    (
        WhatIf("slower", "links <at> 0.9x", build_outcome(2.5), "modelled & more"),
        WhatIf("batch", "twice the batch", build_outcome(3.0, tokens=2.0)),
        WhatIf("none", "nothing recomputed", build_outcome(1.5, fits=False)),
        WhatIf("same", "no effect", build_outcome(2.0)),
        WhatIf("first", "NVLink at 0.9x", None, "no NVLink <here>"),
        WhatIf("second", "NVLink at 2x", None, "no NVLink <here>"),
    ),
)


def bar_trace(what_ifs: WhatIfReport) -> dict[str, Any]:
    (figure,) = what_if_panel(what_ifs).figures
    (trace,) = figure.traces
    return trace


def table_cells(text: str) -> list[list[str]]:
    """The cells of every row of the table."""
    table_rows = re.findall(r"<tr.*?>(.*?)</tr>", text.replace("\N{NO-BREAK SPACE}", " "))
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in table_rows]


def test_bar_length_is_the_time_difference_at_equal_work() -> None:
    trace = bar_trace(WHAT_IFS)
    seconds = np.frombuffer(b64decode(trace["x"]["bdata"]))
    assert seconds.tolist() == pytest.approx([500.0, -500.0, -500.0, 0.0])  # ms
    assert trace["text"] == ["+25.0%", "-25.0%", "-25.0% ✕", "no change"]
    assert trace["y"][0] == "links &lt;at&gt; 0.9x"


def test_patterns_encode_slowdown_and_fit() -> None:
    marker = bar_trace(WHAT_IFS)["marker"]
    assert marker["pattern"]["shape"] == ["/", "", "x", ""]
    assert marker["color"] == ["@alarm", "@good", "@muted", "@good"]


def test_table_has_step_times_and_changes_at_equal_work() -> None:
    cells = table_cells(what_if_panel(WHAT_IFS).html)
    assert cells[1] == ["as it is", "2.000 s", "", "100", "? may fit, 58%"]
    assert cells[2] == ["links <at> 0.9x", "2.500 s", "+500 ms (+25.0%)", "80", "✓ fits"]
    assert cells[3] == ["twice the batch", "3.000 s", "-500 ms (-25.0%)", "133.3", "✓ fits"]
    assert cells[4] == ["nothing recomputed", "1.500 s", "-500 ms (-25.0%)", "133.3", "✕ does not fit"]


def test_skipped_cases_have_reasons_and_notes() -> None:
    text = what_if_panel(WHAT_IFS).html
    assert "<li>NVLink at 0.9x, NVLink at 2x: no NVLink &lt;here&gt;</li>" in text
    assert "links &lt;at&gt; 0.9x: modelled &amp; more." in text
    assert "<here>" not in text


def test_all_cases_skipped_has_no_figure() -> None:
    card = what_if_panel(WhatIfReport(2.0, 100.0, True, 0.58, WHAT_IFS.skipped))
    assert card.figures == ()
    assert "No change was simulated" in card.html
    assert "no NVLink" in card.html


def test_axis_has_a_range_without_effects() -> None:
    (figure,) = what_if_panel(WhatIfReport(2.0, 100.0, True, 0.58, (WHAT_IFS.cases[3],))).figures
    for low, high in (figure.layout["xaxis"]["range"], figure.narrow["xaxis"]["range"]):
        assert low < 0.0 < high


def test_axis_range_includes_bar_labels() -> None:
    (figure,) = what_if_panel(WHAT_IFS).figures
    low, high = figure.layout["xaxis"]["range"]
    wider_low, wider_high = figure.narrow["xaxis"]["range"]
    assert wider_low < low < -500.0
    assert wider_high > high > 500.0
