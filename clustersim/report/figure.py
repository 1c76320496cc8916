"""What is a figure before the browser draws it? Plotly traces and a layout, as plain dictionaries.

They equal what plotly.graph_objects would build, without its validation time (0.2 s). Arrays are base64
typed arrays, which plotly.js decodes. A colour that starts with `@` names a CSS variable of the page and is
resolved by the page's script, so that figures follow the reader's light or dark scheme.
"""

import base64
import json
import re
import textwrap
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clustersim.report.theme import CategoryStyle

if TYPE_CHECKING:
    from plotly import graph_objects

Traces = list[dict[str, Any]]

MUTED = "@muted"
SURFACE = "@surface"
GRID = "@grid"
_BASE_STYLE = {"paper_bgcolor": "@surface", "plot_bgcolor": "@surface", "font": {"size": 12, "color": "@ink"}}
_ZLIB_LEVEL = 6  # zlib's default


@dataclass(frozen=True, slots=True)
class Figure:
    """One plotly figure.

    height: CSS pixels; narrow: layout changes for small screens; choices: alternatives to `traces` by label, of
    which the reader selects one (the first is shown initially).

    If there is more data than can be drawn at once, client_script is the asset that draws what the current axis
    ranges need (`report/assets`) from `arrays` (typed arrays by name, as `compress_array` returns them) and
    `script_data` (plain data).
    """

    name: str
    traces: Traces
    layout: Mapping[str, Any]
    height: int
    narrow: Mapping[str, Any]
    choices: tuple[tuple[str, Traces], ...] = ()
    client_script: str = ""
    arrays: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    script_data: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The figure as the page's script reads it."""
        return {
            "name": self.name,
            "traces": self.traces,
            "layout": {**self.layout, "height": self.height},
            "narrow": self.narrow,
            "choices": [traces for _, traces in self.choices],
            "behaviour": self.client_script,
            "arrays": self.arrays,
            "facts": self.script_data,
        }

    def to_plotly(self) -> "graph_objects.Figure":
        """Convert to a plotly Figure for notebooks and papers; it looks as on a page in the light scheme."""
        from plotly import graph_objects

        traces = self.choices[0][1] if self.choices else self.traces
        layout = {**_BASE_STYLE, **self.layout, "height": self.height}
        return graph_objects.Figure(_resolve_colours(traces), _resolve_colours(layout))


def _resolve_colours(value: Any) -> Any:
    """Replace names of CSS variables by their colours, recursively."""
    if isinstance(value, Mapping):
        return {key: _resolve_colours(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_resolve_colours(item) for item in value]
    return _light_colours().get(value[1:], value) if isinstance(value, str) and value.startswith("@") else value


@cache
def _light_colours() -> dict[str, str]:
    """Colours of the page's CSS variables in the light scheme, which comes first in the file."""
    style = (Path(__file__).parent / "assets" / "page.css").read_text(encoding="utf-8")
    return dict(reversed(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", style)))


def encode_floats(values: ArrayLike) -> dict[str, str]:
    """Encode a one-dimensional array as a plotly.js typed array (float64, base64)."""
    raw = np.ascontiguousarray(values, dtype="<f8")
    return {"dtype": "f8", "bdata": base64.b64encode(raw.tobytes()).decode("ascii")}


_TYPED_ARRAY_DTYPES = frozenset({"u1", "u2", "u4", "i2", "i4", "f4", "f8"})


def compress_array(values: NDArray[Any]) -> dict[str, str]:
    """Compress an array for a client script (zlib, base64); ValueError for a dtype without a JavaScript typed array."""
    dtype = values.dtype.str[1:]
    if dtype not in _TYPED_ARRAY_DTYPES:
        raise ValueError(f"no typed array of {values.dtype}; one of {', '.join(sorted(_TYPED_ARRAY_DTYPES))}")
    raw = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()
    return {"dtype": dtype, "z": base64.b64encode(zlib.compress(raw, _ZLIB_LEVEL)).decode("ascii")}


def script_json(value: object) -> str:
    """JSON that is safe inside a <script> element: without `<`, so no text in it can close the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def bar_marker(style: CategoryStyle) -> dict[str, Any]:
    """Plotly marker of bars of this category."""
    bar_style: dict[str, Any] = {"color": style.colour, "line": {"width": 0.6, "color": SURFACE}}
    if style.pattern:
        hatching = {"shape": style.pattern, "size": 6, "solidity": 0.25, "fgcolor": SURFACE}
        bar_style["pattern"] = {**hatching, "bgcolor": style.colour}
    return bar_style


def axis_layout(title: str, **extra: Any) -> dict[str, Any]:
    """Axis layout in the common style."""
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": MUTED}},
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": GRID,
        "automargin": True,
        "tickfont": {"size": 11},
        **extra,
    }


def base_layout(**extra: Any) -> dict[str, Any]:
    """Figure layout in the common style; the page's script fills in fonts and colours."""
    return {
        "margin": {"l": 8, "r": 12, "t": 8, "b": 40},
        "barmode": "overlay",
        "hovermode": "closest",
        "showlegend": False,
        "dragmode": "zoom",
        **extra,
    }


def legend_layout(**extra: Any) -> dict[str, Any]:
    """Layout of a horizontal legend above the plot."""
    return {"orientation": "h", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom", "font": {"size": 11}, **extra}


def wrap_label(label: str, width: int = 15) -> str:
    """An escaped label in short lines, for small screens."""
    return "<br>".join(escape(line) for line in textwrap.wrap(label, width))


def narrow_labels(labels: list[str], short: list[str]) -> dict[str, Any]:
    """Layout changes for small screens: a small legend, and short category labels on the y axis."""
    return {
        "legend": {"font": {"size": 9}},
        "yaxis": {"tickmode": "array", "tickvals": labels, "ticktext": [f"{label} " for label in short]},
    }


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Unit of an axis: a value is drawn at value / unit_size."""

    unit: str
    unit_size: float


def format_share(share: float) -> str:
    """A share in percent; a positive share never reads as zero.

    >>> format_share(0.415), format_share(0.00003), format_share(0.0)
    ('41.5%', '<0.1%', '0.0%')
    """
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


_LONG_TIMES = (AxisScale("d", 86_400.0), AxisScale("h", 3600.0), AxisScale("min", 60.0))
_TIMES = (AxisScale("s", 1.0), AxisScale("ms", 1e-3), AxisScale("us", 1e-6), AxisScale("ns", 1e-9))


def time_scale(longest: float) -> AxisScale:
    """Best unit of a time axis up to `longest` seconds; long units from twice their size on, as in `format_seconds`.

    >>> time_scale(9.3).unit, time_scale(0.02).unit, time_scale(2.7e5).unit
    ('s', 'ms', 'd')
    """
    long_scales = (scale for scale in _LONG_TIMES if longest > 2 * scale.unit_size)
    short_scales = (scale for scale in _TIMES if longest >= scale.unit_size)
    return next(chain(long_scales, short_scales), _TIMES[0 if longest <= 0 else -1])
