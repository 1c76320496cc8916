"""How is a page put together?

Panels of HTML and figures in one document, rendered by Jinja (`report/templates`).

The document is self-contained: plotly.js is embedded once, compressed to a third, and a content security
policy forbids loading anything, and running any script but the two of the document, which it names by their
hashes. It embeds plotly.js's cartesian bundle (`assets/plotly`, with its licence and origin), a third of the
full library; no page uses other trace types. Templates escape everything that is not `Markup`, so text from a
user's file stays text.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from markupsafe import Markup

from clustersim.common import units
from clustersim.report.figure import Figure, compress_array, format_share, script_json

if TYPE_CHECKING:  # deferred: terminal output does not need it
    from jinja2 import Environment

_ASSET_DIR: Final = Path(__file__).parent / "assets"
PLOTLY_PATH: Final = _ASSET_DIR / "plotly" / "plotly-cartesian.min.js"


@dataclass(frozen=True, slots=True)
class Panel:
    """A section of a page: its HTML, and the figures that it has slots for."""

    html: str
    figures: tuple[Figure, ...] = ()


def figure_panel(title: str, figure: Figure, *, lead: str = "", caption: str = "") -> Panel:
    """Panel of one figure."""
    return render_panel("card.html", title=title, figure=figure, lead=lead, caption=caption)


def render_panel(template: str, *figures: Figure, **context: object) -> Panel:
    """Panel rendered from its own template. figures: those with a slot in it, if not the figures in the context."""
    context_figures = tuple(value for value in context.values() if isinstance(value, Figure))
    return Panel(render_template(template, **context), figures or context_figures)


def render_template(template: str, **context: object) -> Markup:
    """Render a template to HTML."""
    return Markup(_jinja_environment().get_template(template).render(context))


def render_text(macro: str, **values: object) -> Markup:
    """Render a text macro of `words.html`, such as the introduction of a panel."""
    text: Markup = getattr(_jinja_environment().get_template("words.html").module, macro)(**values)
    return text


def html_document(
    title: str, panels: Sequence[Panel], *, scripts: Sequence[str] = (), styles: Sequence[str] = ()
) -> str:
    """Self-contained HTML document. scripts, styles: names of assets in addition to those that the figures need."""
    figures = [figure for panel in panels for figure in panel.figures]
    figure_scripts = [
        name for figure in figures if figure.client_script for name in _script_assets(figure.client_script)
    ]
    script = _concatenate_assets(dict.fromkeys(("page", *figure_scripts, *scripts)), "js")
    html = render_template(
        "page.html",
        script_hashes=[_script_hash(script), _plotly_hash()],
        title=title,
        cards=[Markup(panel.html) for panel in panels],
        style=_concatenate_assets(("page", *styles), "css"),
        plotly=_packed_plotly(),
        figures=Markup(script_json([figure.as_json() for figure in figures])),
        script=script,
    )
    return f"{html}\n"


@cache
def _jinja_environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("clustersim.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        name.removeprefix("format_"): getattr(units, name) for name in dir(units) if "format_" in name
    }
    environment.filters |= {
        "share": format_share,
        "percent": "{:.1%}".format,
        "whole": "{:,}".format,
        "change": "{:+.1%}".format,
        "sentence": _capitalize_first,
    }
    return environment


def _capitalize_first(text: str) -> str:
    """Text as a sentence: its first letter is a capital, but that of a key (`layout.tp: ...`) is as it is."""
    first_word = text.partition(" ")[0]
    return text if set(first_word) & set("._:=") else text[:1].upper() + text[1:]


def _script_assets(name: str) -> list[str]:
    """Names of a client script's assets: the file of its name, and those whose names continue with `_`."""
    return [name, *sorted(path.stem for path in _ASSET_DIR.glob(f"{name}_*.js"))]


def _script_hash(text: str) -> Markup:
    """The source of a content security policy that allows one inline script, by its text."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return Markup(f"'sha256-{digest}'")


@cache
def _plotly_hash() -> Markup:
    return _script_hash(PLOTLY_PATH.read_text(encoding="utf-8"))


@cache
def _packed_plotly() -> str:
    """plotly.js, compressed as by `compress_array`."""
    return compress_array(np.frombuffer(PLOTLY_PATH.read_bytes(), dtype=np.uint8))["z"]


def _concatenate_assets(names: Iterable[str], suffix: str) -> Markup:
    return Markup("\n".join((_ASSET_DIR / f"{name}.{suffix}").read_text(encoding="utf-8") for name in names))
