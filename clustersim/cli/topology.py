"""How is a cluster wired? A row for each tier, from the GPUs up, and a picture on request."""

from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from clustersim.cli.shelves import table_of
from clustersim.hardware.cluster import Cluster, describe, load_cluster
from clustersim.hardware.topology import Tier
from clustersim.units import format_bandwidth

_NAMES: Final = {"gpu": "GPU", "nvswitch": "NVLink domain", "host": "PCIe root", "nic": "NIC"}


def show_topology(name: str, gpus: int | None, html: Path | None) -> None:
    """Print a cluster's tiers; write its picture to `html`."""
    cluster = load_cluster(name, gpus=gpus)
    if html is not None:
        _draw(cluster, html)
    console = Console()
    console.print(f"[bold]{cluster.name}[/bold]  {_size(cluster)}\n{cluster.description}")
    console.print(_table(cluster))
    if html is not None:
        print(f"wrote {html}")


def _draw(cluster: Cluster, html: Path) -> None:
    from clustersim.report import topology as picture

    tiers = describe(cluster)
    ends = {"nvswitch", tiers[-1].kind}  # no way leads up from these
    rows = [
        picture.Tier(
            _name(tier), tier.count, "" if tier.kind in ends else format_bandwidth(tier.bandwidth), _ratio(tier)
        )
        for tier in tiers
    ]
    picture.write_topology_page(f"{cluster.name}: {_size(cluster)}", rows, html)


def _size(cluster: Cluster) -> str:
    return f"{cluster.gpus:,} x {cluster.accelerator.name}, {cluster.gpus_per_node} per node"


def _table(cluster: Cluster) -> Table:
    table = table_of("", "tier", "count", "bandwidth of each", "oversubscribed")
    for tier in describe(cluster):
        table.add_row(_name(tier), f"{tier.count:,}", format_bandwidth(tier.bandwidth), _ratio(tier))
    return table


def _name(tier: Tier) -> str:
    return _NAMES.get(tier.kind, f"{tier.kind} switch")


def _ratio(tier: Tier) -> str:
    return "" if tier.oversubscription in (None, 1) else f"1:{tier.oversubscription:g}"
