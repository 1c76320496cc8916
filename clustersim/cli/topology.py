"""How is a cluster wired? A row for each tier, from the GPUs up, and a picture on request."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from clustersim.cli.shelves import table_of
from clustersim.hardware.cluster import Cluster, describe, load_cluster
from clustersim.units import format_bandwidth


def show_topology(name: str, gpus: int | None, html: Path | None) -> None:
    """Print a cluster's tiers; write its picture to `html`."""
    cluster = load_cluster(name, gpus=gpus)
    if html is not None:
        from clustersim.report.topology import write_topology_page

        write_topology_page(cluster, html)
    console = Console()
    console.print(_title(cluster))
    console.print(_tiers(cluster))
    if html is not None:
        print(f"wrote {html}")


def _title(cluster: Cluster) -> str:
    size = f"{cluster.gpus:,} x {cluster.accelerator.name}, {cluster.gpus_per_node} per node"
    return f"[bold]{cluster.name}[/bold]  {size}\n{cluster.description}"


def _tiers(cluster: Cluster) -> Table:
    table = table_of("", "tier", "count", "bandwidth of each", "oversubscribed")
    for tier in describe(cluster):
        ratio = "" if tier.oversubscription is None else f"1:{tier.oversubscription:g}"
        table.add_row(tier.kind, f"{tier.count:,}", format_bandwidth(tier.bandwidth), ratio)
    return table
