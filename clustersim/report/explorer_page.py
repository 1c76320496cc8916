"""How do DDP, ZeRO, tensor and pipeline parallelism place a model, and what do they cost? A page to play with.

Everything is in the page: tables of what the package answers (`results.explorer_tables`), in which its script looks up and
sums what it shows for any choice, and steps that were simulated beforehand.
"""

import json
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from clustersim.memory.footprint import MemoryCategory as Use
from clustersim.report.draw.charts import plot
from clustersim.report.figure import Figure, axis, legend, packed, script_json
from clustersim.report.html_document import document, drawn
from clustersim.report.labels import mfu_words
from clustersim.report.legend_markup import key
from clustersim.report.panels.explorer_steps import step_figures
from clustersim.report.theme import USE_LOOKS
from clustersim.results.explorer_tables import Exploration

_SCRIPTS: Final = (
    "explorer_model", "explorer_groups", "explorer", "explorer_experts", "explorer_ranks", "explorer_words",
)  # fmt: skip
_STACK: Final = (
    Use.PARAMETERS, Use.COPIES, Use.GRADIENTS, Use.OPTIMIZER, Use.ACTIVATIONS, Use.GATHERED, Use.MESSAGES,
    Use.WORKSPACE, Use.COMMUNICATION, Use.CONTEXT, Use.FRAGMENTATION,
)  # fmt: skip
"""Parts of memory from the bottom of a bar."""


def explorer_page(exploration: Exploration) -> str:
    """The page as HTML text."""
    memory, bubble, pictures = _memory_figure(), _bubble_figure(), step_figures(exploration.studies)
    page = drawn(
        "explorer.html", memory, bubble, *pictures.values(), memory=memory, bubble=bubble, pictures=pictures,
        exploration=exploration, facts=Markup(script_json(_facts(exploration))), dumps=json.dumps, mfu_words=mfu_words,
    )  # fmt: skip
    return document(f"explore {exploration.name}", [page], scripts=_SCRIPTS, styles=("explorer",))


def _facts(exploration: Exploration) -> dict[str, str]:
    """What the page's script reads, packed; studies are drawn here, notes and choices are in the page's text."""
    known = {name: getattr(exploration, name) for name in ("models", "formats", "machine", "start", "tables")}
    known["simulated_bubble"] = None if exploration.own is None else exploration.own.bubble
    text = json.dumps(known, default=_plain, separators=(",", ":"), allow_nan=False)
    return packed(np.frombuffer(text.encode(), np.uint8))


def _plain(value: Any) -> Any:
    """An array as a list, a dataclass as a mapping."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {dataclass_field.name: getattr(value, dataclass_field.name) for dataclass_field in fields(value)}


def _memory_figure() -> Figure:
    looks = {use: USE_LOOKS[use] for use in _STACK}
    parts = [
        {"name": use.value, "label": look.label, "colour": look.colour, "pattern": look.pattern, "key": key(look)}
        for use, look in looks.items()
    ]
    shown = {"barmode": "stack", "legend": legend(traceorder="normal", y=1.02), "dragmode": False, "bargap": 0.35}
    x = axis("", type="category", fixedrange=True, tickfont={"size": 13})
    y = axis("memory of the fullest GPU [GiB]", fixedrange=True)
    narrow = {"showlegend": False, "xaxis": {"tickfont": {"size": 10}}}  # the table below has the colours, too
    figure = plot("explorer-memory", [], x, y, height=430, narrow=narrow, **shown)
    return replace(figure, behaviour="explorer_memory", facts={"parts": parts})


def _bubble_figure() -> Figure:
    x = axis("microbatches of a step on each replica", type="log", fixedrange=True)
    y = axis("bubble, share of the step", ticksuffix=" %", fixedrange=True, rangemode="tozero")
    figure = plot("explorer-bubble", [], x, y, height=330, narrow={}, dragmode=False)
    return replace(figure, behaviour="explorer_bubble")
