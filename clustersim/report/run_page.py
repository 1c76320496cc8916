"""Which page shows a run? One self-contained HTML file: no server, no network, no second file.

Panels in the order of a reader's questions: memory fit and speed, time breakdown, stragglers, timeline
(also of all ranks), communication overlap, memory, network, critical path, what-if changes, and confidence.
"""

from collections.abc import Iterator
from html import escape

from clustersim.report.draw.rank_heatmap import build_heatmap, heatmap_panel
from clustersim.report.draw.timeline_figure import timeline_figure, timeline_panel
from clustersim.report.html_document import Panel, html_document, render_panel
from clustersim.report.panels.critical_path import build_critical_path, critical_path_panel
from clustersim.report.panels.memory import memory_panels
from clustersim.report.panels.network import build_network, network_panel
from clustersim.report.panels.overlap import build_overlap, overlap_panel
from clustersim.report.panels.step_times import drawn_steps_panel, steps_panel
from clustersim.report.panels.stragglers import stragglers_panel
from clustersim.report.panels.time_breakdown import breakdown_panel, stages_panel
from clustersim.report.panels.topology import result_topology, topology_panel
from clustersim.report.panels.verdict import confidence_panel, verdict_panel
from clustersim.report.panels.what_if import what_if_panel
from clustersim.report.result_timeline import build_timeline
from clustersim.report.row_selection import select_ranks
from clustersim.report.step_breakdown import step_breakdown
from clustersim.report.straggler_labels import has_straggler_content
from clustersim.report.timeline_arrays import build_drawing
from clustersim.results.nearest_run import NearestRun
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.what_if import WhatIfReport

_VERDICT_PIXELS = (
    1040  # at a notebook width of 1280; an iframe cannot size itself to its content, and narrower ones scroll
)


def run_page(result: SimulationResult, what_ifs: WhatIfReport | None = None, nearest: NearestRun | None = None) -> str:
    """The complete page as HTML; what_ifs: simulated changes; nearest: the most similar published run."""
    return html_document(result.scenario.name, list(run_panels(result, what_ifs, nearest)))


def run_panels(
    result: SimulationResult, what_ifs: WhatIfReport | None = None, nearest: NearestRun | None = None
) -> Iterator[Panel]:
    """Panels of the page, from top to bottom."""
    ranks = select_ranks(result)
    times, timeline = step_breakdown(result, ranks), build_timeline(result, ranks)
    has_several_rows = len(timeline.rows) > 1
    yield verdict_panel(result, what_ifs, nearest)
    yield breakdown_panel(result, times)
    if result.scenario.steps > 1:
        yield steps_panel(result)
    if result.drawn_step_times:
        yield drawn_steps_panel(result)
    if has_several_rows:
        yield stages_panel(times, timeline)
    if has_straggler_content(result):
        yield stragglers_panel(result)
    yield timeline_panel(timeline)
    if (dominant := build_heatmap(result)) is not None:
        yield heatmap_panel(dominant)
    if (overlap := build_overlap(result)) is not None:
        yield overlap_panel(overlap)
    yield from memory_panels(result, has_several_rows)
    yield topology_panel(result_topology(result))
    yield network_panel(build_network(result))
    if (critical_path := build_critical_path(result)) is not None:
        yield critical_path_panel(critical_path)
    if what_ifs:
        yield what_if_panel(what_ifs)
    yield confidence_panel(result)


def notebook_html(result: SimulationResult) -> str:
    """HTML for notebooks (`_repr_html_`): the verdict and the timeline in an iframe.

    The iframe holds a whole document, so that neither the notebook's style nor a second result interferes, and
    it works offline; the cost is plotly.js (0.6 MB) in every displayed result.
    """
    figure = timeline_figure(build_drawing(build_timeline(result, select_ranks(result))))
    title, height = result.scenario.name, _VERDICT_PIXELS + figure.height
    content = html_document(title, [verdict_panel(result), render_panel("figure.html", figure, figure=figure)])
    return (
        f'<iframe srcdoc="{escape(content)}" title="{escape(title)}" '
        f'style="width:100%;height:{height}px;border:0;resize:vertical" sandbox="allow-scripts"></iframe>'
    )
