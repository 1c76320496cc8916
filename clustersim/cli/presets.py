"""Which presets are packaged? Every name that a scenario can use, with its main figures."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from rich.table import Table

from clustersim.cli.terminal import new_console
from clustersim.common import data_files
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.units import format_bandwidth, format_bytes, format_flops
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.prices import load_price_list
from clustersim.model.presets import all_presets
from clustersim.model.recipe_files import load_recipe
from clustersim.model.transformer import active_parameter_count, mtp_parameter_count, parameter_count
from clustersim.scenario.config.reliability import load_reliability
from clustersim.schedules.registry import SCHEDULE_NAMES

_KERNEL_NOTE: Final = (
    "kernels: fitted to published ones; derived from the same chip or scaled; assumed as of a similar accelerator "
    "(`like` in its file); PROJECTED: announced figures, nothing was measured\n"
)


def print_presets() -> None:
    """Print models, clusters, accelerators, precision recipes, price lists, reliability presets and schedules."""
    console = new_console()
    console.print(_model_table())
    console.print(_mtp_note(), highlight=False)
    for table in (_cluster_table(), _accelerator_table()):
        console.print(table)
    console.print(_KERNEL_NOTE, highlight=False)
    for table in (_recipe_table(), _price_table(), _reliability_table()):
        console.print(table)
    console.print(f"schedules: {', '.join(SCHEDULE_NAMES)}")


def new_table(title: str, *columns: str) -> Table:
    """An empty table whose first column is left-aligned and never truncated."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="left" if column == "description" else "right")
    return table


def _model_table() -> Table:
    table = new_table(
        "model and its parameters", "name", "total", "active", "layers", "hidden", "heads", "kv heads", "vocab"
    )
    for name, preset in sorted(all_presets().items()):
        model = preset.model
        heads, kv_heads = (
            _format_distinct_sizes(getattr(attention, key) for attention in model.distinct_attentions)
            for key in ("heads", "kv_heads")
        )
        sizes = (f"{model.layer_count:,}", f"{model.hidden:,}", heads, kv_heads, f"{model.vocab:,}")
        table.add_row(
            name, _format_billions(parameter_count(model)), _format_billions(active_parameter_count(model)), *sizes
        )
    return table


def _mtp_note() -> str:
    """The multi-token-prediction layers that models were released with."""
    entries = [
        f"{name} {preset.mtp_layers} "
        f"({_format_billions(mtp_parameter_count(replace(preset.model, mtp_layers=preset.mtp_layers)))})"
        for name, preset in sorted(all_presets().items())
        if preset.mtp_layers
    ]
    return f"released with additional layers for multi-token prediction (model.mtp_layers): {', '.join(entries)}\n"


def _format_billions(count: int) -> str:
    """A count in billions with four significant digits.

    >>> [_format_billions(count) for count in (38_000_000, 12_879_925_248, 140_620_634_112, 1_026_408_209_408)]
    ['0.04 B', '12.88 B', '140.6 B', '1,026 B']
    """
    billions = count / 1e9
    return f"{billions:,.{2 if billions < 100 else 1 if billions < 1000 else 0}f} B"


def _format_distinct_sizes(sizes: Iterable[int]) -> str:
    """One size, or the distinct sizes of layers that differ."""
    return " / ".join(f"{size:,}" for size in dict.fromkeys(sizes))


def _cluster_table() -> Table:
    table = new_table("cluster", "name", "GPUs", "per node", "accelerator", "description")
    for name in data_files.list_names("clusters"):
        cluster = load_cluster(name)
        counts = (f"{cluster.gpu_count:,}", str(cluster.gpus_per_node))
        mark = "PROJECTION: " if cluster.accelerator.is_projection else ""
        table.add_row(name, *counts, cluster.accelerator.name, f"{mark}{cluster.description}")
    return table


def _accelerator_table() -> Table:
    table = new_table("accelerator", "name", "memory", "bandwidth", "dense bf16", "kernels", "formats with scales")
    for name in data_files.list_names("accelerators"):
        gpu = load_accelerator(name)
        dtype, peak = max(gpu.peak.items(), key=lambda format_peak: (format_peak[0].bytes == 2, format_peak[1]))
        memory = format_bytes(gpu.memory_bytes)
        low_precision = ", ".join(
            dtype_with_scales.value for dtype_with_scales in gpu.formats if dtype_with_scales in LOW_PRECISION_DTYPES
        )
        bandwidth = format_bandwidth(gpu.memory_bandwidth)
        peak_text = format_flops(peak) if dtype is DType.BF16 else f"{format_flops(peak)} {dtype.value}"
        table.add_row(name, memory, bandwidth, peak_text, _kernel_provenance(gpu), low_precision)
    return table


def _kernel_provenance(accelerator: Accelerator) -> str:
    """Where the constants of an accelerator's kernels come from; whether it is a projection."""
    if accelerator.is_projection:
        return "PROJECTED"
    return "assumed" if accelerator.like else "fitted" if accelerator.efficiency.published else "derived"


def _recipe_table() -> Table:
    table = new_table("recipe of number formats (training.precision)", "name", "matmuls", "description")
    for name in data_files.list_names("recipes"):
        recipe = load_recipe(name)
        table.add_row(name, recipe.compute.value, recipe.description)
    return table


def _price_table() -> Table:
    table = new_table("price list (economics.price_per_gpu_hour)", "name", "read", "accelerators", "description")
    for name in data_files.list_names("prices"):
        prices = load_price_list(name)
        table.add_row(name, str(prices.read_date), str(len(prices.price_per_gpu_hour)), prices.description)
    return table


def _reliability_table() -> Table:
    table = new_table("failure rates (reliability.preset)", "name", "kinds", "description")
    for name in data_files.list_names("reliability"):
        preset = load_reliability(name)
        table.add_row(name, str(len(preset.failures)), preset.description)
    return table
