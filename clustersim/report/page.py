"""What does a person look at? One HTML file that needs nothing else: no server, no network, no second file.

From top to bottom in the order of questions: does it fit and how fast is it, where does the time go, what happens when,
what does memory do, how far can this be trusted. plotly.js is in the file once; a content security policy forbids the
page to load anything.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from clustersim.report.breakdown import stage_breakdown, waterfall
from clustersim.report.figure import Figure, script_json, share_words
from clustersim.report.files import write_text_atomically
from clustersim.report.memory import memory_figure, peak_figure
from clustersim.report.theme import Category
from clustersim.report.timeline import drawing, timeline_caption, timeline_figure
from clustersim.report.verdict import foot, verdict_card
from clustersim.report.view import Breakdown, PageView
from clustersim.units import format_seconds

_ASSETS: Final = Path(__file__).parent / "assets"
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)


def write_page(view: PageView, path: str | Path) -> None:
    """Write the page to `path`, wholly or not at all; raise OutputError if it cannot be written."""
    write_text_atomically(path, render_page(view))


def render_page(view: PageView) -> str:
    """The whole page as HTML text."""
    drawn = drawing(view.timeline)
    breakdown, rows, word = view.breakdown, view.timeline.rows, view.timeline.row_word
    figures = [waterfall(breakdown), timeline_figure(drawn)]
    sections = [
        verdict_card(view),
        section("Where the time goes", _side_by_side(slot(figures[0]), parts_table(breakdown)), lead=_PARTS_LEAD),
        section(
            _TIMELINE_TITLES[len(rows) > 1],
            slot(figures[1]),
            lead=_ROWS_LEAD.format(row=word) * (len(rows) > 1) + _TIMELINE_LEAD,
            caption=timeline_caption(drawn),
        ),
    ]
    if len(rows) > 1:
        figures.append(stage_breakdown(breakdown, rows))
        stages = section(
            f"Each {word}", slot(figures[-1]), lead=_STAGES_LEAD.format(row=word), caption=view.timeline.row_note
        )
        sections.insert(2, stages)
    if view.memory.stages:
        of = f" of the {word}" if len(rows) > 1 else ""
        figures += [memory_figure(view.memory, view.verdict.step_time), peak_figure(view.memory, rows)]
        sections.append(section("Memory over time", slot(figures[-2]), lead=_MEMORY_LEAD.format(of=of)))
        sections.append(section("Memory at the peak", slot(figures[-1])))
    sections.append(section("How far to trust this", foot(view)))
    return document(view.subject.title, sections, figures)


_PARTS_LEAD: Final = "Mean over all ranks. Each part begins where the one before it ends; together they are the step."
_TIMELINE_TITLES: Final = ("Timeline", "Pipeline timeline")
_STAGES_LEAD: Final = "Every bar is the whole step of one {row}: work in colour, waiting in hatched grey."
_ROWS_LEAD: Final = "One row for each {row}; numbers are microbatches, lighter shades are later model chunks. "
_TIMELINE_LEAD: Final = (
    "Thin lanes are communication, the outline is the critical path. Drag to zoom, double-click to see the whole step, "
    "point at a box for its contents and its cause, click the legend to hide a kind."
)
_MEMORY_LEAD: Final = "What one GPU{of} holds. The dashed line is what it has."


def section(title: str, body: str, *, lead: str = "", caption: str = "") -> str:
    """A card of the page. title, lead and caption are plain text; body is HTML."""
    before = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    after = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{before}{body}{after}</section>'


def _side_by_side(left: str, right: str) -> str:
    return f'<div class="two wide-left">{left}{right}</div>'


def slot(figure: Figure) -> str:
    """Where a figure will be drawn, with the reader's choice above it if there is one."""
    options = "".join(
        f'<option value="{index}">{escape(label)}</option>' for index, (label, _) in enumerate(figure.choices)
    )
    choice = (
        f'<label class="choice">show <select data-figure="{figure.name}">{options}</select></label>'
        if len(figure.choices) > 1
        else ""
    )
    plot = f'<div class="plot" id="{figure.name}" style="min-height:{figure.height}px"></div>'
    return f'<div class="slot">{choice}{plot}</div>'


def document(title: str, sections: Sequence[str], figures: Sequence[Figure]) -> str:
    """A self-contained HTML document of cards and figures."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · clustersim</title><style>{_asset('page.css')}</style></head>\n"
        f"<body><main>{''.join(sections)}</main>\n{scripts(figures)}</body></html>\n"
    )


def scripts(figures: Sequence[Figure]) -> str:
    """plotly.js, the figures and the script that draws them."""
    from plotly.offline import get_plotlyjs

    content = script_json([figure.as_json() for figure in figures])
    return (
        f"<script>{get_plotlyjs()}</script>\n"
        f'<script type="application/json" id="figures">{content}</script>\n'
        f"<script>{_asset('page.js')}</script>\n"
    )


def parts_table(breakdown: Breakdown) -> str:
    """The parts in numbers, and their sum."""
    total = float(breakdown.step.sum())
    rows = "".join(
        _parts_row(
            _key(breakdown.categories[part]) + escape(breakdown.labels[part]), float(breakdown.step[part]), total
        )
        for part in breakdown.present
    )
    whole = f'<tr class="sum"><th scope="row">step</th><td>{format_seconds(total)}</td><td>100.0%</td></tr>'
    head = "<thead><tr><th>part</th><th>time</th><th>share</th></tr></thead>"
    return f'<table class="parts">{head}<tbody>{rows}{whole}</tbody></table>'


def _parts_row(name: str, seconds: float, total: float) -> str:
    share = share_words(seconds / total)
    return f'<tr><th scope="row">{name}</th><td>{format_seconds(seconds)}</td><td>{share}</td></tr>'


def _key(category: Category) -> str:
    hatched = " hatched" if category.pattern else ""
    return f'<i class="key{hatched}" style="background-color:{category.colour}"></i>'


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
