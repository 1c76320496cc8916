"""What does the cluster look like? A picture by tiers, drawn the same for one node and for 16,384 GPUs.

Each tier is a line of boxes, at most sixteen of them drawn; between two tiers stands what connects them. The picture
shows how many there are and how fast the way up is, not which cable goes where.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from clustersim.report.figure import Figure, Traces, layout
from clustersim.report.files import write_text_atomically
from clustersim.report.page import document, section, slot

_MOST_DRAWN: Final = 16
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
    return document(title, [section(title, slot(figure) + _table(tiers), lead=_LEAD)], [figure])


_LEAD: Final = (
    "Each line is a tier, GPUs at the bottom. At most sixteen boxes of a tier are drawn. Between two tiers stands the "
    "bandwidth of one box's way up, in each direction. Lines do not show single cables."
)


def topology_figure(tiers: Sequence[Tier]) -> Figure:
    """Boxes as markers, connections as lines, words between them."""
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
            yaxis={"range": [-0.75, len(tiers) - 0.4], "visible": False, "fixedrange": True},
            annotations=[note for level, tier in enumerate(tiers) for note in _words(level, tier)],
            dragmode=False,
            margin={"l": 4, "r": 4, "t": 4, "b": 4},
        ),
        height=_TIER_PIXELS * len(tiers) + 40,
        narrow={},
    )


def _places(count: int) -> list[float]:
    drawn = min(count, _MOST_DRAWN)
    return [(index + 0.5) / drawn for index in range(drawn)]


def _boxes(level: int, tier: Tier) -> dict[str, Any]:
    places = _places(tier.count)
    return {
        "type": "scatter",
        "mode": "markers",
        "x": places,
        "y": [level] * len(places),
        "marker": {
            "symbol": "square",
            "size": 22 if len(places) > 8 else 28,
            "color": _TIER_COLOURS[level % len(_TIER_COLOURS)],
            "line": {"width": 1, "color": "@surface"},
        },
        "hovertemplate": escape(f"{tier.count:,} × {tier.kind}") + "<extra></extra>",
    }


def _ways_up(level: int, lower: Tier, upper: Tier) -> dict[str, Any]:
    """Lines from every box up to a rail and from the rail to every box above."""
    rail = level + 0.62
    points: list[tuple[float | None, float | None]] = [(0.0, rail), (1.0, rail), (None, None)]
    for places, at in ((_places(lower.count), level), (_places(upper.count), level + 1)):
        for place in places:
            points += [(place, float(at)), (place, rail), (None, None)]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"width": 1, "color": "@edge"},
        "hoverinfo": "skip",
    }


def _words(level: int, tier: Tier) -> list[dict[str, Any]]:
    more = f", {_MOST_DRAWN} drawn" if tier.count > _MOST_DRAWN else ""
    name = f"<b>{tier.count:,} × {escape(tier.kind)}</b>{more}"
    up = " · ".join(escape(words) for words in (f"↑ {tier.bandwidth}" if tier.bandwidth else "", tier.note) if words)
    common = {"x": 0.5, "xanchor": "center", "showarrow": False, "bgcolor": "@surface", "borderpad": 2}
    return [
        {**common, "y": level - 0.33, "text": name, "font": {"size": 13}},
        *([{**common, "y": level + 0.36, "text": up, "font": {"size": 12, "color": "@muted"}}] if up else []),
    ]


def _table(tiers: Sequence[Tier]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(tier.kind)}</th><td>{tier.count:,}</td><td>{escape(tier.bandwidth)}</td>'
        f'<td class="words">{escape(tier.note)}</td></tr>'
        for tier in reversed(tiers)
    )
    head = "<tr><th>tier</th><th>count</th><th>way up, per direction</th><th>note</th></tr>"
    return f'<table class="parts"><thead>{head}</thead><tbody>{rows}</tbody></table>'
