"""How is a cluster, with or without a layout, put into words and levels for its picture?"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.analysis.network_axes import AxisSpan, Crossing, axis_spans
from clustersim.hardware.cluster import Cluster, describe
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind, Tier
from clustersim.report.figure import share_words
from clustersim.report.parts import topology as drawing
from clustersim.report.parts.network_words import LINK_WORDS
from clustersim.report.placement_words import placement_line
from clustersim.units import format_bandwidth

if TYPE_CHECKING:
    from clustersim.answer import Answer

_NAMES: Final = {"gpu": "GPU", "nvswitch": "NVLink domain", "host": "PCIe root", "nic": "NIC", "switch": "switch"}
_SWITCHES: Final = ("leaf", "switch", "spine", "core")
_INSIDE: Final = {
    LinkKind.NVLINK: ("nvswitch", "gpu"),
    LinkKind.PCIE: ("host", "nic", "nvswitch", "gpu"),
    LinkKind.HOST: ("host", "nic", "gpu"),
}
"""The tier to which links inside a node lead up: the first of these that there is."""


def picture(cluster: Cluster, spans: Sequence[AxisSpan] = ()) -> drawing.Picture:
    """A cluster's tiers, and the axes of a layout on it."""
    tiers = describe(cluster)
    links, top = link_bandwidths(cluster.fabric), len(tiers) - 1
    rows = tuple(
        drawing.Tier(name, tier.count, "" if place == top else _way_up(tier, links), _note(tier, links))
        for place, (name, tier) in enumerate(zip(tier_names(tiers), tiers, strict=True))
    )
    return drawing.Picture(title(cluster), rows, tuple(_lane(span, tiers) for span in spans))


def picture_of(result: "Answer") -> drawing.Picture:
    """The cluster of a result, and the axes of its layout on it."""
    scenario = result.scenario
    return picture(scenario.cluster, axis_spans(scenario.layout, scenario.cluster.fabric, scenario.placement))


def title(cluster: Cluster) -> str:
    """The cluster's name and size."""
    return f"{cluster.name}: {size_words(cluster)}"


def size_words(cluster: Cluster) -> str:
    """How many GPUs of which kind, and which of the machine's."""
    size = f"{cluster.gpus:,} x {cluster.accelerator.name}, {cluster.gpus_per_node} per node"
    placement = placement_line(cluster)
    return f"{size}, on {placement}" if placement else size


def tier_names(tiers: Sequence[Tier]) -> list[str]:
    """What people call the tiers; of several of one kind, with their number from below."""
    kinds = [tier.kind for tier in tiers]
    names = [_NAMES.get(kind, f"{kind} switch") for kind in kinds]
    return [
        f"{name} {kinds[: place + 1].count(kind)}" if kinds.count(kind) > 1 else name
        for place, (kind, name) in enumerate(zip(kinds, names, strict=True))
    ]


def level_of(crossing: Crossing, tiers: Sequence[Tier]) -> int:
    """The tier to which links lead up, counted from the GPUs as 0."""
    kinds = [tier.kind for tier in tiers]
    if crossing.climb == 0:
        return kinds.index(next(each for each in _INSIDE[crossing.kind] if each in kinds))
    switches = [place for place, each in enumerate(kinds) if each in _SWITCHES] or [len(kinds) - 1]
    return switches[min(crossing.climb, len(switches)) - 1]


def crossing_words(span: AxisSpan) -> list[str]:
    """What is between neighbours of each of the axis' crossings; part of them where it is not all."""
    kinds = [crossing.kind for crossing in span.crossings]
    names = [LINK_WORDS[kind] if kind not in kinds[:place] else "switch to switch" for place, kind in enumerate(kinds)]
    return [
        name + f" ({share_words(crossing.part)})" * (crossing.part < 1.0)
        for name, crossing in zip(names, span.crossings, strict=True)
    ]


def link_bandwidths(fabric: Fabric) -> dict[LinkKind, float]:
    """Bytes/s of the fastest link of each kind that there is."""
    kind, bandwidth = fabric.links.kind, fabric.links.bandwidth
    return {LINK_KINDS[number]: float(bandwidth[kind == number].max()) for number in np.unique(kind).tolist()}


def _way_up(tier: Tier, links: Mapping[LinkKind, float]) -> str:
    """The bandwidth of a way up, and its kind where it is inside a node; from an NVLink domain none leads up."""
    if tier.kind == "nvswitch":
        return ""
    own = {"gpu": (LinkKind.NVLINK, LinkKind.PCIE), "host": (LinkKind.PCIE,)}.get(tier.kind, ())
    name = next((f"{LINK_WORDS[kind]} " for kind in own if kind in links), "")
    return name + format_bandwidth(tier.bandwidth)


def _note(tier: Tier, links: Mapping[LinkKind, float]) -> str:
    """How far a tier is oversubscribed, and what leads past an NVLink domain or from one root complex to the next."""
    if tier.kind == "nvswitch" and LinkKind.PCIE in links:
        return f"from each GPU: PCIe {format_bandwidth(links[LinkKind.PCIE])}"
    if tier.kind == "host" and LinkKind.HOST in links:
        return f"between them {format_bandwidth(links[LinkKind.HOST])}"
    return "" if (tier.oversubscription or 1.0) <= 1.0 else f"1:{tier.oversubscription:.3g} oversubscribed"


def _lane(span: AxisSpan, tiers: Sequence[Tier]) -> drawing.Lane:
    levels = tuple(level_of(crossing, tiers) for crossing in span.crossings)
    return drawing.Lane(span, levels, tuple(crossing_words(span)))
