"""The what-if strip: bars by equal work, values as text, marks for what does not fit, reasons for what was left out."""

import html
import re
from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from clustersim.report.panels.what_if import what_if_panel
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport

GIB = 2.0**30


def outcome(step_time: float, *, tokens: float = 1.0, fits: bool = True) -> WhatIfOutcome:
    return WhatIfOutcome(step_time, 2.0, tokens, 100.0 * tokens * 2.0 / step_time, 70 * GIB, fits, category_changes={})


STRIP = WhatIfReport(
    2.0,
    100.0,
    True,
    (
        WhatIf("slower", "links <at> 0.9x", outcome(2.5), "modelled & more"),
        WhatIf("batch", "twice the batch", outcome(3.0, tokens=2.0)),
        WhatIf("none", "nothing recomputed", outcome(1.5, fits=False)),
        WhatIf("same", "no effect", outcome(2.0)),
        WhatIf("first", "NVLink at 0.9x", None, "no NVLink <here>"),
        WhatIf("second", "NVLink at 2x", None, "no NVLink <here>"),
    ),
)


def bars(strip: WhatIfReport) -> dict[str, Any]:
    (figure,) = what_if_panel(strip).figures
    (trace,) = figure.traces
    return trace


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the table."""
    found = re.findall(r"<tr.*?>(.*?)</tr>", text.replace("\N{NO-BREAK SPACE}", " "))
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in found]


def test_a_bar_is_as_long_as_the_same_work_takes_longer() -> None:
    trace = bars(STRIP)
    seconds = np.frombuffer(b64decode(trace["x"]["bdata"]))
    assert seconds.tolist() == pytest.approx([500.0, -500.0, -500.0, 0.0])  # ms
    assert trace["text"] == ["+25.0%", "-25.0%", "-25.0% ✕", "no change"]
    assert trace["y"][0] == "links &lt;at&gt; 0.9x"


def test_longer_and_what_does_not_fit_are_told_without_their_colour() -> None:
    marker = bars(STRIP)["marker"]
    assert marker["pattern"]["shape"] == ["/", "", "x", ""]
    assert marker["color"] == ["@alarm", "@good", "@muted", "@good"]


def test_the_table_has_step_times_as_they_are_and_changes_for_the_same_work() -> None:
    found = rows(what_if_panel(STRIP).html)
    assert found[1] == ["as it is", "2.000 s", "", "100", "✓ fits"]
    assert found[2] == ["links <at> 0.9x", "2.500 s", "+500 ms (+25.0%)", "80", "✓ fits"]
    assert found[3] == ["twice the batch", "3.000 s", "-500 ms (-25.0%)", "133.3", "✓ fits"]
    assert found[4] == ["nothing recomputed", "1.500 s", "-500 ms (-25.0%)", "133.3", "✕ does not fit"]


def test_what_was_not_tried_stands_by_its_reason_and_notes_by_their_change() -> None:
    text = what_if_panel(STRIP).html
    assert "<li>NVLink at 0.9x, NVLink at 2x: no NVLink &lt;here&gt;</li>" in text
    assert "links &lt;at&gt; 0.9x: modelled &amp; more." in text
    assert "<here>" not in text


def test_where_nothing_was_tried_there_are_reasons_and_no_figure() -> None:
    card = what_if_panel(WhatIfReport(2.0, 100.0, True, STRIP.skipped))
    assert card.figures == ()
    assert "No change was simulated" in card.html
    assert "no NVLink" in card.html


def test_where_no_change_matters_the_axis_still_has_a_length() -> None:
    (figure,) = what_if_panel(WhatIfReport(2.0, 100.0, True, (STRIP.cases[3],))).figures
    for low, high in (figure.layout["xaxis"]["range"], figure.narrow["xaxis"]["range"]):
        assert low < 0.0 < high


def test_every_bar_and_its_words_have_room_on_the_axis() -> None:
    (figure,) = what_if_panel(STRIP).figures
    low, high = figure.layout["xaxis"]["range"]
    wider_low, wider_high = figure.narrow["xaxis"]["range"]
    assert wider_low < low < -500.0
    assert wider_high > high > 500.0
