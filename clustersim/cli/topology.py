"""How is a cluster wired, and which tier does each axis of a layout cross? Tables, and a picture on request."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clustersim.cli.outputs import Outputs, announce
from clustersim.cli.presets import table_of
from clustersim.common import data_files
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.units import format_bandwidth
from clustersim.hardware.cluster import Cluster, describe_tiers, load_cluster
from clustersim.hardware.graph_io import is_graph
from clustersim.hardware.topology import FabricTier
from clustersim.report.panels.topology import crossing_words, picture, size_words, tier_names
from clustersim.results.axis_tiers import AxisSpan, axis_spans

_SCENARIO: Final = ("model", "training")
_CLUSTER: Final = ("node", "accelerator", "fabric")


def show_topology(name: str, overrides: Sequence[str], gpus: int | None, html: str | None) -> None:
    """Print a cluster's tiers and, of a scenario, which axis crosses which; write a picture to `html`.

    overrides: of keys of a scenario; gpus: of a cluster.
    """
    cluster, spans, files = _read(name, overrides, gpus)
    Outputs(html=html).require(files)
    if html is not None:
        from clustersim.common.files import write_text_atomically
        from clustersim.report.panels.topology import topology_page

        write_text_atomically(html, topology_page(picture(cluster, spans)))
    tiers, console = describe_tiers(cluster), Console()
    console.print(Text.assemble((cluster.name, "bold"), f"  {size_words(cluster)}\n{cluster.description}"))
    console.print(_tier_table(tiers))
    if spans:
        console.print(_axis_table(spans, tier_names(tiers), tiers))
    if html is not None:
        announce(html)


def _read(name: str, overrides: Sequence[str], gpus: int | None) -> tuple[Cluster, tuple[AxisSpan, ...], list[Path]]:
    """A cluster, the axes of a scenario's layout, and the files that were read."""
    if data_files.is_path(name):
        content = data_files.read_mapping(Path(name))
        if any(key in content for key in _SCENARIO):
            return _scenario(Path(name), overrides, gpus)
        if not is_graph(content) and not any(key in content for key in _CLUSTER):
            raise InputError(f"{name}: {_neither(content)}")
    else:
        _require_shipped(name)
    if overrides:
        raise InputError(
            f"--set {overrides[0]}: {name} is a cluster, and --set changes keys of a scenario; name a scenario file, "
            "or leave --set out (--gpus changes the size of a cluster)"
        )
    cluster = load_cluster(name, gpu_count=gpus)
    return cluster, (), list(cluster.files)


def _require_shipped(name: str) -> None:
    known = data_files.list_names("clusters")
    if name not in known:
        raise InputError(
            f"there is no cluster {name!r}, and that is not the path of a scenario or topology file (.yaml, .yml, "
            f".json); {suggest_nearest(name, known)}"
        )


def _neither(content: dict[str, Any]) -> str:
    keys = ", ".join(map(str, list(content)[:8])) or "no keys"
    return (
        f"is neither a scenario (which has {' and '.join(_SCENARIO)}) nor a cluster (which has {', '.join(_CLUSTER)}, "
        f"or the nodes and edges of a graph); it has {keys}"
    )


def _scenario(
    path: Path, overrides: Sequence[str], gpus: int | None
) -> tuple[Cluster, tuple[AxisSpan, ...], list[Path]]:
    from clustersim.scenario import Scenario

    scenario = Scenario.load(path, overrides)
    cluster, layout = scenario.cluster, scenario.layout
    if gpus not in (None, cluster.gpu_count):
        raise InputError(
            f"--gpus {gpus:,}: {path} is a scenario, whose layout needs {cluster.gpu_count:,} GPUs; leave --gpus out, or "
            "change the layout (--set layout.dp=2)"
        )
    spans = axis_spans(layout, cluster.fabric, scenario.placement)
    return cluster, spans, [path, *cluster.files]


def _tier_table(tiers: Sequence[FabricTier]) -> Table:
    rated = any(tier.oversubscription is not None for tier in tiers)
    table = table_of("", "tier", "count", "bandwidth of each", *["oversubscribed"] * rated)
    for name, tier in zip(tier_names(tiers), tiers, strict=True):
        ratio = "" if tier.oversubscription is None else f"1:{tier.oversubscription:.3g}"
        table.add_row(name, f"{tier.count:,}", format_bandwidth(tier.bandwidth), *[ratio] * rated)
    return table


def _axis_table(spans: Sequence[AxisSpan], names: Sequence[str], tiers: Sequence[FabricTier]) -> Table:
    """Which axis crosses which tier, between neighbours of its groups."""
    table = table_of("", "axis", "GPUs", "groups", "stride", "nodes", "up to")
    table.add_column("links between neighbours")
    for span in spans:
        counts = (span.size, span.groups, span.stride, span.nodes)
        top = max(crossing.level(tiers) for crossing in span.crossings)
        table.add_row(span.axis, *(f"{count:,}" for count in counts), names[top], ", ".join(crossing_words(span)))
    return table
