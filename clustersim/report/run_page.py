"""What does a person look at? One HTML file that needs nothing else: no server, no network, no second file.

From top to bottom in the order of questions: does it fit and how fast is it, where does the time go, who waits for
whom, what happens when, on all ranks too, what hides behind what, what do memory and the network do, what makes the
step as long as it is, what would change it, how far can this be trusted.
"""

from collections.abc import Iterator
from html import escape

from clustersim.report.draw.rank_heatmap import dominant_of, heatmap_card
from clustersim.report.draw.timeline_figure import timeline_card, timeline_figure
from clustersim.report.html_document import Card, document, drawn
from clustersim.report.panels.critical_path import critical_path_card, critical_path_of
from clustersim.report.panels.memory import memory_cards
from clustersim.report.panels.network import network_card, network_of
from clustersim.report.panels.overlap import overlap_card, overlap_of
from clustersim.report.panels.step_times import steps_card
from clustersim.report.panels.stragglers import is_told, waiting_card
from clustersim.report.panels.time_breakdown import parts_card, stages_card
from clustersim.report.panels.topology import picture_of, topology_card
from clustersim.report.panels.verdict import foot_card, verdict_card
from clustersim.report.panels.what_if import what_if_card
from clustersim.report.result_timeline import timeline_of
from clustersim.report.row_selection import shown_ranks
from clustersim.report.step_breakdown import times_of
from clustersim.report.timeline_arrays import drawing
from clustersim.results.nearest_run import NearestRun
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.what_if import WhatIfs

_VERDICT_PIXELS = 1040  # in a notebook of 1280; a frame cannot ask for what its content needs, and narrower ones scroll


def run_page(result: SimulationResult, what_ifs: WhatIfs | None = None, nearest: NearestRun | None = None) -> str:
    """The whole page as HTML text; what_ifs: changes that were simulated; nearest: the published run most like it."""
    return document(result.scenario.name, list(cards(result, what_ifs, nearest)))


def cards(
    result: SimulationResult, what_ifs: WhatIfs | None = None, nearest: NearestRun | None = None
) -> Iterator[Card]:
    """The parts of the page, from top to bottom."""
    ranks = shown_ranks(result)
    times, timeline = times_of(result, ranks), timeline_of(result, ranks)
    several = len(timeline.rows) > 1
    yield verdict_card(result, what_ifs, nearest)
    yield parts_card(result, times)
    if result.scenario.steps > 1:
        yield steps_card(result)
    if several:
        yield stages_card(times, timeline)
    if is_told(result):
        yield waiting_card(result)
    yield timeline_card(timeline)
    if (dominant := dominant_of(result)) is not None:
        yield heatmap_card(dominant)
    if (overlap := overlap_of(result)) is not None:
        yield overlap_card(overlap)
    yield from memory_cards(result, several)
    yield topology_card(picture_of(result))
    yield network_card(network_of(result))
    if (path := critical_path_of(result)) is not None:
        yield critical_path_card(path)
    if what_ifs:
        yield what_if_card(what_ifs)
    yield foot_card(result)


def fragment(result: SimulationResult) -> str:
    """What a notebook shows: the verdict and the timeline in a frame of their own, as HTML for `_repr_html_`.

    The frame holds a whole document, so that neither the notebook's style nor a second result disturbs it, and it
    works offline; the price is plotly.js (0.6 MB) in every displayed result.
    """
    figure = timeline_figure(drawing(timeline_of(result, shown_ranks(result))))
    title, height = result.scenario.name, _VERDICT_PIXELS + figure.height
    content = document(title, [verdict_card(result), drawn("figure.html", figure, figure=figure)])
    return (
        f'<iframe srcdoc="{escape(content)}" title="{escape(title)}" '
        f'style="width:100%;height:{height}px;border:0;resize:vertical" sandbox="allow-scripts"></iframe>'
    )
