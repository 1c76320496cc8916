"""How is a cluster wired, and which tier does each axis of a layout cross? Tables, and a diagram on request."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from clustersim.cli.outputs import Outputs, announce_file
from clustersim.cli.presets import new_table
from clustersim.cli.terminal import new_console
from clustersim.common import data_files
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.units import format_bandwidth
from clustersim.hardware.cluster import Cluster, describe_tiers, load_cluster
from clustersim.hardware.graph_io import is_graph
from clustersim.hardware.topology import FabricTier
from clustersim.report.panels.site_map import (
    SITE_COLUMNS,
    SITE_LINK_COLUMNS,
    site_link_rows,
    site_panels,
    site_rows,
)
from clustersim.report.panels.topology import build_topology, crossing_labels, describe_size, tier_labels
from clustersim.results.axis_tiers import AxisLocality, axis_localities

_SCENARIO_KEYS: Final = ("model", "training")
_CLUSTER_KEYS: Final = ("node", "accelerator", "fabric", "sites")


def show_topology(name: str, overrides: Sequence[str], gpus: int | None, html: str | None) -> None:
    """Print a cluster's tiers and, for a scenario, which axis crosses which tier; write a diagram to `html`.

    overrides: of scenario keys; gpus: GPU count of a cluster.
    """
    cluster, spans, files = _load_cluster_and_axes(name, overrides, gpus)
    Outputs(html=html).check_writable(files)
    if html is not None:
        from clustersim.common.files import write_text_atomically
        from clustersim.report.panels.topology import topology_page

        write_text_atomically(html, topology_page(build_topology(cluster, spans), site_panels(cluster)))
    tiers, console = describe_tiers(cluster), new_console()
    console.print(Text.assemble((cluster.name, "bold"), f"  {describe_size(cluster)}\n{cluster.description}"))
    console.print(_tier_table(tiers))
    for heads, rows in ((SITE_COLUMNS, site_rows(cluster)), (SITE_LINK_COLUMNS, site_link_rows(cluster))):
        if rows:
            console.print(_rows_table(heads, rows))
    if spans:
        console.print(_axis_table(spans, tier_labels(tiers), tiers))
    if html is not None:
        announce_file(html)


def _load_cluster_and_axes(
    name: str, overrides: Sequence[str], gpus: int | None
) -> tuple[Cluster, tuple[AxisLocality, ...], list[Path]]:
    """The cluster, the axis spans of a scenario's layout (empty for a cluster), and the files that were read."""
    if data_files.is_path(name):
        content = data_files.read_mapping(Path(name))
        if any(key in content for key in _SCENARIO_KEYS):
            return _load_scenario(Path(name), overrides, gpus)
        if not is_graph(content) and not any(key in content for key in _CLUSTER_KEYS):
            raise InputError(f"{name}: {_unrecognized_message(content)}")
    else:
        _require_packaged_cluster(name)
    if overrides:
        raise InputError(
            f"--set {overrides[0]}: {name} is a cluster, and --set changes keys of a scenario; name a scenario file, "
            "or leave --set out (--gpus changes the size of a cluster)"
        )
    cluster = load_cluster(name, gpu_count=gpus)
    return cluster, (), list(cluster.files)


def _require_packaged_cluster(name: str) -> None:
    cluster_names = data_files.list_names("clusters")
    if name not in cluster_names:
        raise InputError(
            f"there is no cluster {name!r}, and that is not the path of a scenario or topology file (.yaml, .yml, "
            f".json); {suggest_nearest(name, cluster_names)}"
        )


def _unrecognized_message(content: dict[str, Any]) -> str:
    keys = ", ".join(map(str, list(content)[:8])) or "no keys"
    return (
        f"is neither a scenario (which has {' and '.join(_SCENARIO_KEYS)}) nor a cluster (which has "
        f"{', '.join(_CLUSTER_KEYS)}, "
        f"or the nodes and edges of a graph); it has {keys}"
    )


def _load_scenario(
    path: Path, overrides: Sequence[str], gpus: int | None
) -> tuple[Cluster, tuple[AxisLocality, ...], list[Path]]:
    from clustersim.scenario import Scenario

    scenario = Scenario.load(path, overrides)
    cluster, layout = scenario.cluster, scenario.layout
    if gpus not in (None, cluster.gpu_count):
        raise InputError(
            f"--gpus {gpus:,}: {path} is a scenario, whose layout needs {cluster.gpu_count:,} GPUs; leave --gpus "
            "out, or "
            "change the layout (--set layout.dp=2)"
        )
    spans = axis_localities(layout, cluster.fabric, scenario.placement)
    return cluster, spans, [path, *cluster.files]


def _tier_table(tiers: Sequence[FabricTier]) -> Table:
    has_oversubscription = any(tier.oversubscription is not None for tier in tiers)
    table = new_table("", "tier", "count", "bandwidth of each", *["oversubscribed"] * has_oversubscription)
    for name, tier in zip(tier_labels(tiers), tiers, strict=True):
        ratio = "" if tier.oversubscription is None else f"1:{tier.oversubscription:.3g}"
        table.add_row(name, f"{tier.count:,}", format_bandwidth(tier.bandwidth), *[ratio] * has_oversubscription)
    return table


def _rows_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = new_table("", *heads)
    for row in rows:
        table.add_row(*row)
    return table


def _axis_table(spans: Sequence[AxisLocality], names: Sequence[str], tiers: Sequence[FabricTier]) -> Table:
    """Which tiers each axis crosses, between neighbours of its groups."""
    table = new_table("", "axis", "GPUs", "groups", "stride", "nodes", "up to")
    table.add_column("links between neighbours")
    for span in spans:
        counts = (span.group_size, span.group_count, span.stride, span.max_nodes)
        top = max(crossing.tier_index(tiers) for crossing in span.crossings)
        table.add_row(span.axis, *(f"{count:,}" for count in counts), names[top], ", ".join(crossing_labels(span)))
    return table
