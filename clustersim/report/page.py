"""What does a person look at? One HTML file that needs nothing else: no server, no network, no second file.

From top to bottom in the order of questions: does it fit and how fast is it, where does the time go, who waits for
whom, what happens when, on all ranks too, what hides behind what, what do memory and the network do, what makes the
step as long as it is, what would change it, how far can this be trusted.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from clustersim.analysis.losses import BELOW_PEAK
from clustersim.report.breakdown import IDEAL, stage_bars, stage_breakdown, waterfall
from clustersim.report.critical_path import critical_path_card
from clustersim.report.document import Card, document, figure_card, section, slot
from clustersim.report.figure import share_words
from clustersim.report.files import write_text_atomically
from clustersim.report.heatmap import heatmap_card
from clustersim.report.keys import Cells, named, table
from clustersim.report.memory import experts_table, memory_figure, peak_bars, peak_figure
from clustersim.report.network import network_card
from clustersim.report.overlap import overlap_card
from clustersim.report.steps import shown_steps, steps_figure
from clustersim.report.timeline import timeline_caption, timeline_figure
from clustersim.report.timeline_arrays import drawing
from clustersim.report.topology import topology_card
from clustersim.report.verdict import foot, verdict_card
from clustersim.report.view import ROUNDING, Breakdown, PageView, Steps, Timeline, Verdict, Waiting
from clustersim.report.waiting import stragglers_table, waiting_figure
from clustersim.report.what_if import what_if_card
from clustersim.units import Seconds, format_flops, format_seconds, format_step_time


def write_page(view: PageView, path: str | Path) -> None:
    """Write the page to `path`, wholly or not at all; raise OutputError if it cannot be written."""
    write_text_atomically(path, render_page(view))


def render_page(view: PageView) -> str:
    """The whole page as HTML text."""
    return document(view.subject.title, list(cards(view)))


def cards(view: PageView) -> Iterator[Card]:
    """The parts of the page, from top to bottom."""
    several, steps = len(view.timeline.rows) > 1, view.verdict.steps
    yield Card(verdict_card(view))
    yield _parts_card(view.breakdown, view.verdict)
    if steps:
        yield _steps_card(steps)
    if several:
        yield stages_card(view.breakdown, view.timeline)
    if view.waiting:
        yield waiting_card(view.waiting, view.verdict.step_time, view.timeline.row_word)
    yield timeline_card(view.timeline)
    if view.dominant:
        yield heatmap_card(view.dominant, view.breakdown.categories)
    if view.overlap:
        yield overlap_card(view.overlap)
    if view.memory.stages:
        yield from _memory_cards(view)
    yield from _network_cards(view)
    if view.critical_path:
        yield critical_path_card(view.critical_path, view.breakdown.categories)
    if view.what_ifs:
        yield what_if_card(view.what_ifs)
    yield Card(section("How far to trust this", foot(view)))


_PARTS_LEAD: Final = (
    "Wide bars are the mean over all ranks, thin ones the critical path: the chain of tasks that makes the step as "
    "long as it is; to shorten what is not on it does not help. Communication on the path counts in full, also where a "
    "kernel hides it from the mean. Each part begins where the one before it ends."
)
_IDEAL: Final = (
    "The ideal step of {seconds} is one in which every GPU does nothing but the model's FLOP (forward and backward, "
    "nothing twice, attention as a full matrix) at its dense peak of {peak} in the format that it computes in."
)
_NO_IDEAL: Final = (
    "No ideal step is drawn: the model's FLOP at the peak, with attention as a full matrix by convention, would take "
    "longer than kernels that skip what the causal mask hides."
)
_TIMELINE_TITLES: Final = ("Timeline", "Pipeline timeline")
_STAGES_LEAD: Final = "Every bar is the whole step of one {row}: work in colour, waiting in hatched grey."
_ROWS_LEAD: Final = "One row for each {row}; numbers are microbatches, lighter shades are later model chunks. "
_SLOW_LEAD: Final = "Slow ranks have rows of their own, beside one that is not slow. "
_STEPS_LEAD: Final = "Dashed lines are the ends of steps. "
_TIMELINE_LEAD: Final = (
    "Thin lanes are communication, the outline is the critical path. Drag to zoom, double-click to see the whole step, "
    "point at a box for its contents and its cause, click the legend to hide a kind."
)
_MEMORY_LEAD: Final = "What one GPU{of} holds{step}. The dashed line is what it has."
_WAITING_LEAD: Final = (
    "The rank of each {row} that waits least is the one that the others wait for. Shown is how much longer they wait "
    "than that one, which stands at zero: the bar ends at the one that waits most, the dot is their mean."
)


def _parts_card(breakdown: Breakdown, verdict: Verdict) -> Card:
    figure = waterfall(breakdown)
    body = _side_by_side(slot(figure), parts_table(breakdown))
    return Card(section("Where the time goes", body, lead=_PARTS_LEAD, caption=_ideal(breakdown, verdict)), (figure,))


def _ideal(breakdown: Breakdown, verdict: Verdict) -> str:
    """What is called ideal, in one sentence; why there is none, where there is none."""
    if not breakdown.ideal:
        return _NO_IDEAL
    peak = format_flops(verdict.model_flops_per_gpu / verdict.mfu)
    return _IDEAL.format(seconds=format_step_time(breakdown.ideal), peak=peak)


def _steps_card(steps: Steps) -> Card:
    lead = f"{len(steps.times):,} successive steps. What the page says of a step is their mean."
    if len(shown_steps(steps.times)) < len(steps.times):
        lead += " Of every few neighbours the shortest and the longest are drawn."
    return figure_card("Step times", steps_figure(steps), lead=lead)


def stages_card(breakdown: Breakdown, timeline: Timeline) -> Card:
    """The whole step of every row."""
    drawn = stage_bars(breakdown, timeline.rows)
    lead = _STAGES_LEAD.format(row=timeline.row_word) + drawn.note("the step")
    figure = stage_breakdown(breakdown, drawn)
    return figure_card(f"Each {timeline.row_word}", figure, lead=lead, caption=timeline.row_note)


def waiting_card(waiting: Waiting, step_time: Seconds, row_word: str) -> Card:
    """Who waits for whom; a sentence where nobody in particular."""
    if waiting.spread < ROUNDING * step_time:
        return Card(section("Who waits for whom", stragglers_table(waiting)))
    figure = waiting_figure(waiting)
    body = _side_by_side(slot(figure), stragglers_table(waiting))
    return Card(section("Who waits for whom", body, lead=_WAITING_LEAD.format(row=row_word)), (figure,))


def timeline_card(timeline: Timeline) -> Card:
    """When each row does what."""
    drawn, several = drawing(timeline), len(timeline.rows) > 1
    slow = any(row.told for row in timeline.rows)
    rows = _ROWS_LEAD.format(row=timeline.row_word) * several + _SLOW_LEAD * slow
    lead, caption = rows + _STEPS_LEAD * bool(timeline.ends) + _TIMELINE_LEAD, timeline_caption(drawn)
    return figure_card(_TIMELINE_TITLES[several], timeline_figure(drawn), lead=lead, caption=caption)


def _memory_cards(view: PageView) -> Iterator[Card]:
    of = f" of the {view.timeline.row_word}" if len(view.timeline.rows) > 1 else ""
    lead = _MEMORY_LEAD.format(of=of, step=", in the first step" if view.verdict.steps else "")
    yield figure_card("Memory over time", memory_figure(view.memory, view.verdict.step_time), lead=lead)
    shown, all_stages = len(view.memory.stages), view.memory.of_stages
    some = f"{shown} of {all_stages:,} {view.timeline.row_word}s are shown, the fullest among them."
    note = peak_bars(view.memory).note("the capacity").strip()
    figure, caption = peak_figure(view.memory), f"{some if shown < all_stages else ''} {note}".strip()
    yield Card(section("Memory at the peak", slot(figure) + experts_table(view.memory), caption=caption), (figure,))


def _network_cards(view: PageView) -> Iterator[Card]:
    """The cluster with the layout laid over it, and what its links carry."""
    if view.topology:
        yield topology_card(view.topology)
    if view.network:
        yield network_card(view.network)
    elif view.topology:
        yield Card(section("Network", "<p>The ranks exchange nothing: no network is used.</p>"))


def _side_by_side(left: str, right: str) -> str:
    return f'<div class="two wide-left">{left}{right}</div>'


def parts_table(breakdown: Breakdown) -> str:
    """The parts in numbers, and their sum."""
    total = float(breakdown.step.sum())
    rows = [row for part in breakdown.present.tolist() for row in _part_rows(breakdown, part, total)]
    mean, path = format_step_time(total), format_step_time(float(breakdown.path.sum()))
    return table(("part", "mean", "share", "critical path"), [*rows, Cells(("step", mean, "100.0%", path), "sum")])


def _part_rows(breakdown: Breakdown, part: int, total: Seconds) -> Iterator[Cells]:
    """A part's name, its mean and share, and its time on the critical path; of computation what of it is ideal."""
    mean, path = float(breakdown.step[part]), float(breakdown.path[part])
    name = named(breakdown.categories[part], breakdown.labels[part])
    yield Cells((name, format_seconds(mean), share_words(mean / total), format_seconds(path)))
    if part == 0 and breakdown.ideal:
        for words, seconds in ((IDEAL, breakdown.ideal), (BELOW_PEAK, mean - breakdown.ideal)):
            yield Cells((words, format_seconds(seconds), share_words(seconds / total), ""), "of")
