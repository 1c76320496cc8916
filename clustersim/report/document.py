"""How is a page put together? Cards of HTML and figures in one document.

It needs nothing else, neither a network nor a second file: plotly.js is in it once, compressed to a third, and a
content security policy forbids it to load anything. Of plotly.js it is the cartesian bundle (`assets/plotly`, with its
licence and where it is from), a third of the whole: no page draws anything that it has not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.report.figure import Figure, packed, script_json

_ASSETS: Final = Path(__file__).parent / "assets"
STYLE: Final = _ASSETS / "page.css"
PLOTLY: Final = _ASSETS / "plotly" / "plotly-cartesian.min.js"
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)


@dataclass(frozen=True, slots=True)
class Card:
    """A part of the page: its HTML, and the figures that have a slot in it."""

    html: str
    figures: tuple[Figure, ...] = ()


def section(title: str, body: str, *, lead: str = "", caption: str = "") -> str:
    """A card of the page. title, lead and caption are plain text; body is HTML."""
    before = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    after = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{before}{body}{after}</section>'


def figure_card(title: str, figure: Figure, *, lead: str = "", caption: str = "") -> Card:
    """A card with one figure."""
    return Card(section(title, slot(figure), lead=lead, caption=caption), (figure,))


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


def document(title: str, cards: Sequence[Card], *, scripts: Sequence[str] = (), styles: Sequence[str] = ()) -> str:
    """A self-contained HTML document. scripts, styles: further assets, by name, beside those that the figures need."""
    figures = [figure for card in cards for figure in card.figures]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · clustersim</title><style>{_joined(('page', *styles), 'css')}</style></head>\n"
        f"<body><main>{''.join(card.html for card in cards)}</main>\n{_scripts(figures, scripts)}</body></html>\n"
    )


def _scripts(figures: Sequence[Figure], scripts: Sequence[str]) -> str:
    """plotly.js, packed as arrays are, the figures, the script that draws them and the behaviours that it finds."""
    content = script_json([figure.as_json() for figure in figures])
    behaviours = [name for figure in figures if figure.behaviour for name in _behaviour(figure.behaviour)]
    return (
        f'<script type="text/plain" id="plotly">{_plotly()}</script>\n'
        f'<script type="application/json" id="figures">{content}</script>\n'
        f"<script>{_joined(dict.fromkeys(('page', *behaviours, *scripts)), 'js')}</script>\n"
    )


def _behaviour(name: str) -> list[str]:
    """The assets of a behaviour: the one of its name, and those that go on with `_`."""
    return [name, *sorted(path.stem for path in _ASSETS.glob(f"{name}_*.js"))]


@cache
def _plotly() -> str:
    """plotly.js, as `packed` writes it."""
    return packed(np.frombuffer(PLOTLY.read_bytes(), dtype=np.uint8))["z"]


def _joined(names: Iterable[str], kind: str) -> str:
    return "\n".join((_ASSETS / f"{name}.{kind}").read_text(encoding="utf-8") for name in names)
