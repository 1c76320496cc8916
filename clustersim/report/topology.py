"""What does the cluster look like? A picture by tiers, drawn the same for one node and for 16,384 GPUs.

Each tier is a line of boxes, all of a few and ever fewer of many; between two tiers stands what connects them. The
picture shows how many there are and how fast the way up is, not which cable goes where.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from clustersim.report.document import Card, document, section, slot
from clustersim.report.figure import Figure, Traces, layout
from clustersim.report.files import write_text_atomically

_MOST_DRAWN: Final = 36
_MOST_EXTRA: Final = 2.3  # boxes for each doubling beyond eight
_BOX: Final = 0.26  # height of a box, in tiers
_WORDS: Final = 0.24  # height of a line of words
_TIER_COLOURS: Final = ("#009E73", "#56B4E9", "#E69F00", "#0072B2", "#CC79A7", "#D55E00", "#8D96A0")
_TIER_PIXELS: Final = 104


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of a cluster.

    kind: "GPU", "leaf switch"; bandwidth: of the way up, per direction and with its unit,
    empty for the top; note: anything else, such as "8 per node" or "1:7 oversubscribed".
    """

    kind: str
    count: int
    bandwidth: str = ""
    note: str = ""


def write_topology_page(title: str, tiers: Sequence[Tier], path: str | Path) -> None:
    """Write the picture as one self-contained page; raise OutputError if it cannot be written."""
    write_text_atomically(path, topology_page(title, tiers))


def topology_page(title: str, tiers: Sequence[Tier]) -> str:
    """A page with the picture and a table; tiers from the GPUs up."""
    figure = topology_figure(tiers)
    return document(title, [Card(section(title, slot(figure) + _table(tiers), lead=_LEAD), (figure,))])


_LEAD: Final = (
    "Each line is a tier, GPUs at the bottom; of many equal boxes only some are drawn. Between two tiers stands the "
    "bandwidth of the way up, in each direction."
)


def topology_figure(tiers: Sequence[Tier]) -> Figure:
    """Boxes as bars, connections as bands, words between them."""
    traces: Traces = []
    for level, tier in enumerate(tiers):
        if level + 1 < len(tiers):
            traces.append(_ways_up(level, tier, tiers[level + 1]))
        traces.append(_boxes(level, tier))
    return Figure(
        name="topology",
        traces=traces,
        layout=layout(
            xaxis={"range": [-0.02, 1.02], "visible": False, "fixedrange": True},
            yaxis={"range": [-0.45, len(tiers) - 0.8], "visible": False, "fixedrange": True},
            annotations=[note for level, tier in enumerate(tiers) for note in _words(level, tier)],
            dragmode=False,
            margin={"l": 4, "r": 4, "t": 4, "b": 4},
        ),
        height=_TIER_PIXELS * len(tiers) + 40,
        narrow={},
    )


def drawn(count: int) -> int:
    """How many boxes stand for `count`: all of a few, then ever fewer, so that a tier of 16,384 is 33 boxes wide.

    >>> [drawn(count) for count in (1, 8, 100, 16384)]
    [1, 8, 16, 33]
    """
    return min(count, 8) + round(_MOST_EXTRA * math.log2(max(1.0, count / 8)))


def _places(count: int) -> list[float]:
    boxes = min(drawn(count), _MOST_DRAWN)
    return [0.5 + (index - (boxes - 1) / 2) / _MOST_DRAWN for index in range(boxes)]


def _boxes(level: int, tier: Tier) -> dict[str, Any]:
    places = _places(tier.count)
    return {
        "type": "bar",
        "x": places,
        "y": [_BOX] * len(places),
        "base": [level - _BOX / 2] * len(places),
        "width": 0.8 / _MOST_DRAWN,
        "marker": {"color": _TIER_COLOURS[level % len(_TIER_COLOURS)], "cornerradius": 3},
        "hovertemplate": escape(f"{tier.count:,} × {tier.kind}") + "<extra></extra>",
    }


def _ways_up(level: int, lower: Tier, upper: Tier) -> dict[str, Any]:
    """A pale band as wide as the two tiers that it joins."""
    half = 0.5 / _MOST_DRAWN
    below, above = _places(lower.count), _places(upper.count)
    bottom, top = level + _BOX / 2 + 0.03, level + 1 - _BOX / 2 - _WORDS
    return {
        "type": "scatter",
        "mode": "lines",
        "fill": "toself",
        "fillcolor": "@track",
        "x": [below[0] - half, below[-1] + half, above[-1] + half, above[0] - half],
        "y": [bottom, bottom, top, top],
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _words(level: int, tier: Tier) -> list[dict[str, Any]]:
    name = f"<b>{tier.count:,} × {escape(tier.kind)}</b>"
    up = " · ".join(escape(words) for words in (f"↑ {tier.bandwidth}" if tier.bandwidth else "", tier.note) if words)
    common = {"x": 0.5, "xanchor": "center", "showarrow": False}
    return [
        {**common, "y": level - _BOX / 2 - _WORDS / 2, "text": name, "font": {"size": 13}},
        *(
            [{**common, "y": level + 0.5 - _WORDS / 2, "text": up, "font": {"size": 12, "color": "@muted"}}]
            if up
            else []
        ),
    ]


def _table(tiers: Sequence[Tier]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(tier.kind)}</th><td>{tier.count:,}</td><td>{escape(tier.bandwidth)}</td>'
        f'<td class="words">{escape(tier.note)}</td></tr>'
        for tier in reversed(tiers)
    )
    head = "<tr><th>tier</th><th>count</th><th>way up, per direction</th><th>note</th></tr>"
    return f'<table class="parts"><thead>{head}</thead><tbody>{rows}</tbody></table>'
