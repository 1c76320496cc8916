"""How is a page put together? Cards of HTML and figures in one document, made by templates (`report/templates`).

It needs nothing else, neither a network nor a second file: plotly.js is in it once, compressed to a third, and a
content security policy forbids it to load anything. Of plotly.js it is the cartesian bundle (`assets/plotly`, with its
licence and where it is from), a third of the whole: no page draws anything that it has not. Templates escape what is
not `Markup`, so text from a user's file stays text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from markupsafe import Markup

from clustersim.common import units
from clustersim.report.figure import Figure, packed, script_json, share_words

if TYPE_CHECKING:  # a terminal's answer does not wait for it
    from jinja2 import Environment

_ASSETS: Final = Path(__file__).parent / "assets"
PLOTLY: Final = _ASSETS / "plotly" / "plotly-cartesian.min.js"


@dataclass(frozen=True, slots=True)
class Card:
    """A part of the page: its HTML, and the figures that have a slot in it."""

    html: str
    figures: tuple[Figure, ...] = ()


def card(title: str, figure: Figure, *, lead: str = "", caption: str = "") -> Card:
    """A card of one figure."""
    return drawn("card.html", title=title, figure=figure, lead=lead, caption=caption)


def drawn(template: str, *figures: Figure, **context: object) -> Card:
    """A card that has a template of its own. figures: for which it has slots, if these are not the context's own."""
    own = tuple(item for item in context.values() if isinstance(item, Figure))
    return Card(render(template, **context), figures or own)


def render(template: str, **context: object) -> Markup:
    """A template as HTML."""
    return Markup(_environment().get_template(template).render(context))


def prose(name: str, **values: object) -> Markup:
    """What is said above a card (`words.html`)."""
    said: Markup = getattr(_environment().get_template("words.html").module, name)(**values)
    return said


def document(title: str, cards: Sequence[Card], *, scripts: Sequence[str] = (), styles: Sequence[str] = ()) -> str:
    """A self-contained HTML document. scripts, styles: further assets, by name, beside those that the figures need."""
    figures = [figure for card in cards for figure in card.figures]
    behaviours = [name for figure in figures if figure.behaviour for name in _behaviour(figure.behaviour)]
    page = render(
        "page.html",
        title=title,
        cards=[Markup(card.html) for card in cards],
        style=_joined(("page", *styles), "css"),
        plotly=_plotly(),
        figures=Markup(script_json([figure.as_json() for figure in figures])),
        script=_joined(dict.fromkeys(("page", *behaviours, *scripts)), "js"),
    )
    return f"{page}\n"


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("clustersim.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {name.removeprefix("format_"): getattr(units, name) for name in dir(units) if "format_" in name}
    made.filters |= {
        "share": share_words,
        "percent": "{:.1%}".format,
        "whole": "{:,}".format,
        "change": "{:+.1%}".format,
    }
    return made


def _behaviour(name: str) -> list[str]:
    """The assets of a behaviour: the one of its name, and those that go on with `_`."""
    return [name, *sorted(path.stem for path in _ASSETS.glob(f"{name}_*.js"))]


@cache
def _plotly() -> str:
    """plotly.js, as `packed` writes it."""
    return packed(np.frombuffer(PLOTLY.read_bytes(), dtype=np.uint8))["z"]


def _joined(names: Iterable[str], kind: str) -> Markup:
    return Markup("\n".join((_ASSETS / f"{name}.{kind}").read_text(encoding="utf-8") for name in names))
