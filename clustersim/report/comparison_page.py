"""What is different? Several answers side by side, each against the first, and one of them close up."""

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from clustersim.common.units import format_signed_seconds
from clustersim.report import labels
from clustersim.report.draw.charts import chart, diamond, in_lines, points
from clustersim.report.draw.timeline_figure import timeline_card
from clustersim.report.figure import Figure, axis, time_scale, typed
from clustersim.report.html_document import document, drawn
from clustersim.report.panels.difference_bars import part_changes
from clustersim.report.panels.stragglers import is_told, waiting_card
from clustersim.report.panels.time_breakdown import stages_card
from clustersim.report.panels.verdict import foot_card
from clustersim.report.result_timeline import timeline_of
from clustersim.report.row_selection import shown_ranks
from clustersim.report.step_breakdown import times_of

if TYPE_CHECKING:
    from clustersim.results.simulation_result import SimulationResult


def comparison_page(results: "Mapping[str, SimulationResult]", title: str, shown: str) -> str:
    """The page as HTML text."""
    close = results[shown]
    timeline = timeline_of(close, ranks := shown_ranks(close))
    cards = [
        drawn(
            "comparison.html", title=title, results=results, close=close, shown=shown, wording=labels,
            figure=difference_figure(results),
        ),
        *([waiting_card(close)] if is_told(close) else []),
        stages_card(times_of(close, ranks), timeline),
        timeline_card(timeline),
        foot_card(close),
    ]  # fmt: skip
    return document(title, cards)


def difference_figure(results: "Mapping[str, SimulationResult]") -> Figure:
    """For each answer but the first a bar to each side: by how much parts are longer and shorter."""
    base, *others = (times_of(result).step for result in results.values())
    changes = np.array([other - base for other in others]).reshape(len(others), -1)
    first, *names = results
    labels, whole = [escape(name) for name in names], changes.sum(axis=1)
    scale = time_scale(float(np.abs(whole).max(initial=0.0)))
    net = points(
        "step", typed(whole / scale.size), labels, diamond("@ink", 1.5),
        customdata=[format_signed_seconds(value) for value in whole.tolist()],
        hovertemplate="<b>%{y}</b><br>step: %{customdata}<extra></extra>",
    )  # fmt: skip
    return chart(
        "difference",
        [*part_changes(labels, changes, scale), net],
        axis(f"longer than {escape(first)} by [{scale.unit}]", zeroline=True),
        height=130 + 44 * len(others),
        narrow={
            "height": 300 + 52 * len(others),
            "legend": {"font": {"size": 9}},
            "yaxis": in_lines(labels, names),
        },
        stacked="relative",
        bargap=0.4,
    )
