"""How do DDP, ZeRO, tensor and pipeline parallelism place a model, and at what cost? An interactive page.

Everything is in the page: lookup tables (`results.explorer_tables`) from which its script computes the result
of any choice, and steps that were simulated beforehand.
"""

import json
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from clustersim.memory.footprint import MemoryCategory as Use
from clustersim.report.draw.charts import xy_figure
from clustersim.report.figure import Figure, axis_layout, compress_array, legend_layout, script_json
from clustersim.report.html_document import html_document, render_panel
from clustersim.report.labels import format_mfu
from clustersim.report.legend_markup import colour_swatch
from clustersim.report.panels.explorer_steps import step_figures
from clustersim.report.theme import MEMORY_CATEGORY_STYLES
from clustersim.results.explorer_tables import ExplorerData

_SCRIPTS: Final = (
    "explorer_model", "explorer_groups", "explorer", "explorer_experts", "explorer_ranks", "explorer_words",
)  # fmt: skip
_STACK_ORDER: Final = (
    Use.PARAMETERS, Use.COPIES, Use.GRADIENTS, Use.OPTIMIZER, Use.ACTIVATIONS, Use.GATHERED, Use.MESSAGES,
    Use.WORKSPACE, Use.COMMUNICATION, Use.CONTEXT, Use.FRAGMENTATION,
)  # fmt: skip
"""Memory categories of a bar, from bottom to top."""


def explorer_page(exploration: ExplorerData) -> str:
    """The page as HTML."""
    memory, bubble, step_figures_by_title = _memory_figure(), _bubble_figure(), step_figures(exploration.studies)
    panel = render_panel(
        "explorer.html",
        memory,
        bubble,
        *step_figures_by_title.values(),
        memory=memory,
        bubble=bubble,
        pictures=step_figures_by_title,
        exploration=exploration,
        facts=Markup(script_json(_script_data(exploration))),
        dumps=json.dumps,
        mfu_words=format_mfu,
    )
    return html_document(f"explore {exploration.name}", [panel], scripts=_SCRIPTS, styles=("explorer",))


def _script_data(exploration: ExplorerData) -> dict[str, str]:
    """Packed data of the page's script, without studies, notes and choices, which the page's HTML has."""
    data = {name: getattr(exploration, name) for name in ("models", "formats", "machine", "start", "tables")}
    data["verdict_suffix"] = " without what is not drawn" if exploration.warnings else ""
    data["simulated_bubble"] = None if exploration.baseline is None else exploration.baseline.bubble_fraction
    text = json.dumps(data, default=_to_plain, separators=(",", ":"), allow_nan=False)
    return compress_array(np.frombuffer(text.encode(), np.uint8))


def _to_plain(value: Any) -> Any:
    """JSON fallback: an array as a list, a dataclass as a mapping."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {dataclass_field.name: getattr(value, dataclass_field.name) for dataclass_field in fields(value)}


def _memory_figure() -> Figure:
    styles = {use: MEMORY_CATEGORY_STYLES[use] for use in _STACK_ORDER}
    segments = [
        {
            "name": use.value,
            "label": style.label,
            "colour": style.colour,
            "pattern": style.pattern,
            "key": colour_swatch(style),
        }
        for use, style in styles.items()
    ]
    options = {
        "barmode": "stack",
        "legend": legend_layout(traceorder="normal", y=1.02),
        "dragmode": False,
        "bargap": 0.35,
    }
    x = axis_layout("", type="category", fixedrange=True, tickfont={"size": 13})
    y = axis_layout("memory of the peak-memory GPU [GiB]", fixedrange=True)
    wide_margin, narrow_margin = {"l": 8, "r": 84, "t": 8, "b": 40}, {"r": 12, "t": 24}  # space for the capacity
    # On small screens the table below shows the colours.
    narrow = {"showlegend": False, "xaxis": {"tickfont": {"size": 10}}, "margin": narrow_margin}
    figure = xy_figure("explorer-memory", [], x, y, height=430, narrow=narrow, margin=wide_margin, **options)
    return replace(figure, client_script="explorer_memory", script_data={"parts": segments})


def _bubble_figure() -> Figure:
    x = axis_layout("microbatches of a step on each replica", type="log", fixedrange=True)
    y = axis_layout("bubble, share of the step", ticksuffix=" %", fixedrange=True, rangemode="tozero")
    figure = xy_figure("explorer-bubble", [], x, y, height=330, narrow={}, dragmode=False)
    return replace(figure, client_script="explorer_bubble")
