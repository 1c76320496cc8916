"""What is different? Several answers side by side, each against the first, and one of them close up."""

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.report.answer import plain_view, with_kernels
from clustersim.report.difference_page import part_changes
from clustersim.report.document import Card, document, figure_card, section
from clustersim.report.figure import Figure, axis, layout, legend, time_scale, typed, wrapped
from clustersim.report.files import write_text_atomically
from clustersim.report.keys import Cells, signed, table
from clustersim.report.page import stages_card, timeline_card, waiting_card
from clustersim.report.verdict import foot
from clustersim.report.view import PageView, Verdict
from clustersim.report.wording import mfu_words
from clustersim.units import format_step_time

if TYPE_CHECKING:
    from clustersim.answer import Answer

_PARTS_LEAD: Final = (
    "Seconds of each part more (to the right) or less than in {first}, the mean over ranks. Together they are what the "
    "step is longer by, the diamond."
)


def write_comparison(results: "Mapping[str, Answer]", path: str | Path, *, title: str, shown: str) -> None:
    """Write a page of answers by name, the first of which the others are compared with; shown: the one close up.

    Raises OutputError if `path` cannot be written.
    """
    views = {name: plain_view(each) for name, each in results.items()}
    views[shown] = replace(views[shown], timeline=with_kernels(results[shown], views[shown].timeline))
    write_text_atomically(path, comparison_page(views, title, shown))


def comparison_page(views: Mapping[str, PageView], title: str, shown: str) -> str:
    """The page as HTML text."""
    close, first = views[shown], next(iter(views))
    subject = close.subject
    lead = f"{subject.model} on {close.trust.ranks:,} × {subject.gpu} ({subject.cluster}). {subject.layout}"
    cards = [
        Card(section(title, _table(views), lead=lead)),
        figure_card(f"What differs from {first}", difference_figure(views), lead=_PARTS_LEAD.format(first=first)),
        Card(section(f"Close up: {shown}", f"<p>{escape(subject.disturbed or 'nothing is disturbed')}</p>")),
        *([waiting_card(close.waiting, close.verdict.step_time, close.timeline.row_word)] if close.waiting else []),
        stages_card(close.breakdown, close.timeline),
        timeline_card(close.timeline),
        Card(section("How far to trust this", foot(close))),
    ]
    return document(title, cards)


def difference_figure(views: Mapping[str, PageView]) -> Figure:
    """For each answer but the first a bar to each side: by how much parts are longer and shorter."""
    (_, base), *others = views.items()
    changes = np.array([each.breakdown.step - base.breakdown.step for _, each in others]).reshape(len(others), -1)
    names = [escape(name) for name, _ in others]
    whole = changes.sum(axis=1)
    scale = time_scale(float(np.abs(whole).max(initial=0.0)))
    diamond = {"symbol": "diamond", "size": 11, "color": "@ink", "line": {"width": 1.5, "color": "@surface"}}
    net = {
        "type": "scatter", "mode": "markers", "name": "step", "y": names, "x": typed(whole / scale.size),
        "customdata": [signed(value) for value in whole.tolist()], "marker": diamond,
        "hovertemplate": "<b>%{y}</b><br>step: %{customdata}<extra></extra>",
    }  # fmt: skip
    return Figure(
        name="difference",
        traces=[*part_changes(names, changes, scale), net],
        layout=layout(
            barmode="relative",
            showlegend=True,
            legend=legend(traceorder="normal"),
            xaxis=axis(f"longer than {escape(next(iter(views)))} by [{scale.unit}]", fixedrange=True, zeroline=True),
            yaxis=axis("", autorange="reversed", fixedrange=True, type="category", ticksuffix="  "),
            dragmode=False,
            bargap=0.4,
        ),
        height=130 + 44 * len(others),
        narrow={
            "height": 300 + 52 * len(others),
            "legend": {"font": {"size": 9}},
            "yaxis": {"tickmode": "array", "tickvals": names, "ticktext": [wrapped(name) for name, _ in others]},
        },
    )


def _table(views: Mapping[str, PageView]) -> str:
    """Step time, loss and rate of each answer."""
    base = next(iter(views.values())).verdict
    rows = (_row(name, view.verdict, base) for name, view in views.items())
    return table(("case", "step time", "longer by", "tokens/s", "MFU"), rows)


def _row(name: str, verdict: Verdict, base: Verdict) -> Cells:
    longer = f"{verdict.step_time / base.step_time - 1:.1%}"
    used = mfu_words(verdict.mfu, verdict.mfu_causal)
    return Cells((name, format_step_time(verdict.step_time), longer, f"{verdict.tokens_per_s:,.0f}", used))
