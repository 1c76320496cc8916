"""How is a cluster wired? A row for each tier, from the GPUs up, and a picture on request."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clustersim.cli.outputs import Outputs
from clustersim.cli.shelves import table_of
from clustersim.hardware.cluster import Cluster, describe, load_cluster
from clustersim.hardware.topology import Tier
from clustersim.units import format_bandwidth

_NAMES: Final = {"gpu": "GPU", "nvswitch": "NVLink domain", "host": "PCIe root", "nic": "NIC", "switch": "switch"}


def show_topology(name: str, gpus: int | None, html: str | None) -> None:
    """Print a cluster's tiers; write its picture to `html`."""
    cluster = load_cluster(name, gpus=gpus)
    Outputs(html=html).require(cluster.files)
    if html is not None:
        _draw(cluster, Path(html))
    console = Console()
    console.print(Text.assemble((cluster.name, "bold"), f"  {_size(cluster)}\n{cluster.description}"))
    console.print(_table(describe(cluster)))
    if html is not None:
        print(f"wrote {html}")


def _draw(cluster: Cluster, html: Path) -> None:
    from clustersim.report import topology as picture

    tiers = describe(cluster)
    ends = {"nvswitch", tiers[-1].kind}  # no way leads up from these
    rows = [
        picture.Tier(name, tier.count, "" if tier.kind in ends else format_bandwidth(tier.bandwidth), _note(tier))
        for name, tier in zip(_names(tiers), tiers, strict=True)
    ]
    picture.write_topology_page(f"{cluster.name}: {_size(cluster)}", rows, html)


def _size(cluster: Cluster) -> str:
    return f"{cluster.gpus:,} x {cluster.accelerator.name}, {cluster.gpus_per_node} per node"


def _table(tiers: Sequence[Tier]) -> Table:
    rated = any(tier.oversubscription is not None for tier in tiers)
    table = table_of("", "tier", "count", "bandwidth of each", *["oversubscribed"] * rated)
    for name, tier in zip(_names(tiers), tiers, strict=True):
        ratio = "" if tier.oversubscription is None else f"1:{tier.oversubscription:.3g}"
        table.add_row(name, f"{tier.count:,}", format_bandwidth(tier.bandwidth), *[ratio] * rated)
    return table


def _names(tiers: Sequence[Tier]) -> list[str]:
    """What people call the tiers; of several of one kind, with their number from below."""
    kinds = [tier.kind for tier in tiers]
    names = [_NAMES.get(kind, f"{kind} switch") for kind in kinds]
    return [
        f"{name} {kinds[: place + 1].count(kind)}" if kinds.count(kind) > 1 else name
        for place, (kind, name) in enumerate(zip(kinds, names, strict=True))
    ]


def _note(tier: Tier) -> str:
    return "" if tier.oversubscription in (None, 1) else f"1:{tier.oversubscription:.3g} oversubscribed"
