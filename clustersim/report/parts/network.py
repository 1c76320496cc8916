"""How much is the network used, by whom, and where is it full?

A heatmap of tiers over time, the links that are used most, and which axis of the layout crosses which tier.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from clustersim.analysis.alike import steady
from clustersim.analysis.network import AxisUse, BusyLink, NetworkUse, TierUse, network_use
from clustersim.analysis.network_bytes import Metered
from clustersim.arrays import FloatArray
from clustersim.assembly import library_of
from clustersim.report.document import Card, card, prose
from clustersim.report.draw.bars import Drawn, note
from clustersim.report.figure import MUTED, Figure, axis, layout, share_words, time_scale
from clustersim.report.keys import Cells, noted, stacked, table, titled, wide
from clustersim.report.parts.network_words import LINK_WORDS, LISTED_LOOKS, axis_words
from clustersim.scenario import Contention
from clustersim.units import format_bandwidth, format_bytes, format_seconds

if TYPE_CHECKING:
    from clustersim.answer import Answer

STAYS_BELOW: Final = "stays below"
NOT_USED: Final = "–"
OVER_COLOUR: Final = "#D55E00"
_STOPS: Final = (0.0, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0)  # of utilisation: little is to be seen, too
_VISIBLE: Final = 5e-4  # of what a link carries
_ROW: Final = 34  # pixels
_SCALE_ROOM: Final = 52  # pixels of the scale of colours
SAME: Final = 0.05
"""Of utilisation: neighbours in time that differ by less have one colour, that of their mean."""


@dataclass(frozen=True, slots=True)
class Network:
    """What the card shows.

    shared: links are shared in the run; recorded: some times are those of a record; hosts: ranks copy to their hosts.
    """

    use: NetworkUse
    shared: bool
    recorded: bool
    hosts: bool = False


def network_of(result: "Answer") -> Network | None:
    """How the links were used; None where the ranks exchange nothing."""
    scenario, program = result.scenario, result.program
    cluster, cost = scenario.cluster, scenario.cost
    volumes = Metered(cluster.fabric, library_of(scenario), program.groups)
    use = network_use(result.rows, cluster.fabric, volumes)
    if use is None:
        return None
    healthy = not scenario.disturbances.network  # else no collective is looked up in the record
    recorded = healthy and cost.record is not None and bool(cost.record.collectives)
    return Network(use, shared=cost.network is Contention.SHARED, recorded=recorded, hosts=result.host is not None)


def network_card(network: Network | None) -> Card:
    """The heatmap with its numbers, and the tables; a sentence where there is nothing to see."""
    if network is None:
        return card("Network", Markup("<p>The ranks exchange nothing: no network is used.</p>"))
    use = network.use
    tables = (
        titled("Tiers", wide(_tier_table(use.tiers))),
        titled("Busiest links", wide(_link_table(use.busiest))),
        titled("Which axis crosses which tier", wide(_axis_table(use))),
    )
    lead = prose("network", over=_over(network), recorded=network.recorded)
    caption = prose("network_caption", shared=network.shared, over=_over(network), hosts=network.hosts)
    return card("Network", utilisation_figure(use), *tables, lead=lead, caption=caption)


def _over(network: Network) -> bool:
    """Whether a tier carries more than it could, because axes do not slow each other."""
    return not network.shared and any(tier.peak > 1.0 for tier in network.use.tiers)


def utilisation_figure(use: NetworkUse) -> Figure:
    """Tiers by time, the GPUs' own links at the bottom."""
    scale = time_scale(use.seconds)
    labels = [LINK_WORDS[tier.kind] for tier in use.tiers]
    most = max(1.0, *(tier.peak for tier in use.tiers))
    width = use.seconds / len(use.tiers[0].over_time) / scale.size
    trace = {
        "type": "heatmap", "y": labels, "x0": width / 2, "dx": width,
        "z": [_rounded(steady(tier.over_time, SAME)) for tier in use.tiers],
        "customdata": [_rounded(tier.over_time) for tier in use.tiers],
        "zmin": 0.0, "zmax": most, "colorscale": colour_scale(most), "ygap": 3,
        "showscale": True, "colorbar": _scale_of_colours(),
        "hovertemplate": f"<b>%{{y}}</b><br>at %{{x:.4~g}} {scale.unit}: %{{customdata:.1%}} used<extra></extra>",
    }  # fmt: skip
    return Figure(
        name="network",
        traces=[trace],
        layout=layout(
            xaxis=axis(f"time [{scale.unit}]", range=[0, use.seconds / scale.size], showgrid=False),
            yaxis=axis("", fixedrange=True, type="category", ticksuffix=" ", showgrid=False),
            annotations=[_numbers(label, tier) for label, tier in zip(labels, use.tiers, strict=True)],
            margin={"l": 8, "r": 170, "t": _SCALE_ROOM, "b": 40},
        ),
        height=60 + _SCALE_ROOM + _ROW * len(labels),
        narrow={"annotations": [], "margin": {"l": 8, "r": 8, "t": _SCALE_ROOM, "b": 40}},
    )


def _rounded(values: FloatArray) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def _scale_of_colours() -> Drawn:
    """Above the rows, in percent; its title says what has one colour."""
    title = f"used of nominal; neighbours within {SAME:.0%} have one colour"
    return {
        "orientation": "h", "thickness": 8, "len": 0.6, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom",
        "tickformat": ".0%", "outlinewidth": 0, "tickfont": {"size": 10, "color": MUTED},
        "title": {"text": title, "side": "top", "font": {"size": 11, "color": MUTED}},
    }  # fmt: skip


def colour_scale(most: float) -> list[list[Any]]:
    """From clear to blue at 100 %, so that it reads on light and dark; orange above. most: utilisation at the end.

    >>> colour_scale(1.0)[0], colour_scale(1.0)[-1]
    ([0.0, 'rgba(38,143,214,0.1)'], [1.0, 'rgba(38,143,214,1)'])
    >>> colour_scale(2.0)[-2:]
    [[0.5, '#D55E00'], [1.0, '#D55E00']]
    """
    within = [[stop / most, f"rgba(38,143,214,{0.1 + 0.9 * stop**0.4:.3g})"] for stop in _STOPS]
    return within if most <= 1.0 else [*within, [1.0 / most, OVER_COLOUR], [1.0, OVER_COLOUR]]


def _numbers(label: str, tier: TierUse) -> Drawn:
    """Mean and peak, at the right of a row."""
    words = escape(f"mean {share_words(tier.mean)}, peak {share_words(tier.peak)}")
    return note(words, 1.01, label, xref="paper", xanchor="left")


def _tier_table(tiers: Sequence[TierUse]) -> str:
    return table(("tier", "mean", "peak", "busiest link"), map(_tier, reversed(tiers)))


def _tier(tier: TierUse) -> Cells:
    about = f"{tier.links:,} links, {format_bandwidth(tier.capacity)} together"
    shares = map(share_words, (tier.mean, tier.peak, tier.busiest))
    return Cells((noted(LINK_WORDS[tier.kind], about), *shares))


def _link_table(links: Sequence[BusyLink]) -> str:
    rows = (
        Cells((_link(each), format_seconds(each.seconds), share_words(each.utilisation), _users(each)))
        for each in links
    )
    return table(("link", "at full rate", "of the step", "used by"), rows)


def _link(busy: BusyLink) -> Markup:
    link, others = busy.link, busy.alike - 1
    cables = f", {busy.parallel:,} cables" if busy.parallel > 1 else ""
    alike = f", and {others:,} alike" if others else ""
    about = f"{LINK_WORDS[link.kind]}, {format_bandwidth(link.bandwidth)}{cables}{alike}"
    return noted(f"{link.source} → {link.target}", about)


def _users(busy: BusyLink) -> Markup:
    total = sum(busy.carried.values())
    shares = sorted(((amount / total, axis) for axis, amount in busy.carried.items()), reverse=True)
    return stacked(
        Markup("{} {}").format(axis_words(axis), share_words(share)) for share, axis in shares if share >= _VISIBLE
    )


def _axis_table(use: NetworkUse) -> str:
    """Tiers from the top, axes side by side."""
    order = list(LISTED_LOOKS)
    axes = sorted(use.axes, key=lambda each: order.index(each.axis))
    columns = [[_amount(each.sent / use.gpus), *reversed(list(_crossings(each, use.gpus)))] for each in axes]
    names = ["sent in all", *(LINK_WORDS[tier.kind] for tier in reversed(use.tiers))]
    return table(
        ("per GPU and step", *(axis_words(each.axis) for each in axes)),
        map(Cells, zip(names, *columns, strict=True)),
    )


def _crossings(axis: AxisUse, gpus: int) -> Iterable[str]:
    """A cell for each tier: bytes, and their share where it is not all."""
    crossing = axis.crossing.tolist()
    highest = max((place for place, amount in enumerate(crossing) if amount > 0.0), default=-1)
    below = (_cell(amount / gpus, amount / axis.sent) for amount in crossing[: highest + 1])
    return chain(below, [STAYS_BELOW] * (len(crossing) - highest - 1))


def _cell(amount: float, share: float) -> str:
    if amount <= 0.0:
        return NOT_USED
    return noted(_amount(amount), share_words(share)) if share < 1.0 - _VISIBLE else _amount(amount)


def _amount(amount: float) -> str:
    """Bytes; a mean over GPUs may be less than one."""
    return format_bytes(amount) if amount >= 1.0 else "<1 B"
