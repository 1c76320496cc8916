"""What does every rank of the job do over time?

One row for each rank, coloured by the dominant time category of each bin.

Ranks of one equivalence class have equal rows, so the file holds one row for each class and the page's
script (`assets/heatmap.js`) maps ranks to classes. It draws at most some hundred rows at a time: zoomed in,
every rank has its own row.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DATA, DENSE_MESH, EXPERT, EXPERT_DATA, EXPERT_MESH, EXPERT_TENSOR, MESHES, PIPELINE
from clustersim.report.draw.charts import xy_figure
from clustersim.report.figure import Figure, axis_layout, compress_array, time_scale
from clustersim.report.html_document import Panel, render_panel
from clustersim.report.legend_markup import category_legend, colour_swatch
from clustersim.report.theme import TIME_CATEGORY_STYLES
from clustersim.results.dominant_categories import DominantCategories, dominant_categories
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import BUBBLE_CATEGORIES, EXPOSED_CATEGORIES, TIME_CATEGORIES, TimeCategory

_INNER_AXES: Final = tuple(axis.name for axis in reversed(MESHES[DENSE_MESH]) if axis not in (DATA, PIPELINE))
_ROW_ORDERS: Final = {
    "by stage": (PIPELINE.name, DATA.name, *_INNER_AXES),
    "by replica": (DATA.name, PIPELINE.name, *_INNER_AXES),
    "by experts": tuple(axis.name for axis in (PIPELINE, EXPERT, EXPERT_DATA, EXPERT_TENSOR)),
}
"""Row orders by label: mesh axes, slowest first; `by experts` puts ranks with equal experts together."""
_BIN_COUNT: Final = 720  # about two pixels per bin on a large screen
_MAX_HEIGHT: Final = 420
_MAX_DRAWN_ROWS: Final = 512  # maximum number of rows that the page's script draws at once
_MAX_ROW_PIXELS: Final = 40  # pixels of a row if there are few rows


@dataclass(frozen=True, slots=True, eq=False)
class RankHeatmap:
    """Dominant time categories of all ranks. layout: gives their coordinates; node_ids: [ranks] node of each rank."""

    dominant: DominantCategories
    layout: Layout
    node_ids: IntArray

    @property
    def rank_count(self) -> int:
        """World size."""
        return len(self.dominant.representative)


def build_heatmap(result: SimulationResult) -> RankHeatmap | None:
    """Build the heatmap; None for a single rank, which the timeline shows, or if nothing takes time."""
    if result.rank_count == 1 or result.trace.makespan <= 0:
        return None
    scenario = result.scenario
    dominant = dominant_categories(result.trace_table, result.cost.time_segment, bin_count=_BIN_COUNT)
    return RankHeatmap(dominant, scenario.layout, scenario.cluster.machine.node_ids(scenario.cluster.machine_gpu_ids))


def heatmap_panel(heatmap: RankHeatmap) -> Panel:
    """Panel of all ranks over time, with details of the clicked rank."""
    return render_panel(
        "heatmap.html",
        figure=heatmap_figure(heatmap),
        heatmap=heatmap,
        classes=len(np.unique(heatmap.dominant.representative)),
        legend=category_legend(heatmap.dominant.category),
        most=_MAX_DRAWN_ROWS,
    )


def heatmap_figure(heatmap: RankHeatmap) -> Figure:
    """Empty figure with packed arrays, which the page's script draws."""
    dominant = heatmap.dominant
    scale = time_scale(dominant.makespan)
    class_count = int((dominant.class_of_rank >= 0).sum())
    end = dominant.makespan / scale.unit_size
    x = axis_layout(f"time [{scale.unit}]", range=[0, end], minallowed=0, maxallowed=end, showgrid=False)
    y = axis_layout("", range=[class_count - 0.5, -0.5], minallowed=-0.5, maxallowed=class_count - 0.5, showgrid=False)
    height, narrow = min(_MAX_HEIGHT, 60 + _MAX_ROW_PIXELS * class_count), {"yaxis": {"tickfont": {"size": 9}}}
    return replace(
        xy_figure("heatmap", [], x, y, height=height, narrow=narrow, showlegend=False),
        choices=tuple((label, []) for label in _available_orders(heatmap.layout)),
        client_script="heatmap",
        arrays={
            "category": compress_array(dominant.category.ravel()),
            "seconds": compress_array(dominant.seconds.astype(np.float32).ravel()),
            "simulated": compress_array(dominant.ranks.astype(np.uint32)),
            "classOf": compress_array(
                dominant.class_of_rank.astype(np.uint16)
            ),  # -1 wraps to the maximum value: not in the file
            "nodeOf": compress_array(heatmap.node_ids.astype(np.uint32)),
        },
        script_data=_script_data(heatmap, scale.unit_size),
    )


def _script_data(heatmap: RankHeatmap, unit_size: float) -> dict[str, Any]:
    orders = list(_available_orders(heatmap.layout).values())
    meshes = (mesh for name, mesh in heatmap.layout.as_configured.meshes.items() if name in (DENSE_MESH, EXPERT_MESH))
    return {
        "parts": [
            {
                "name": category.value,
                "colour": TIME_CATEGORY_STYLES[category].colour,
                "key": colour_swatch(TIME_CATEGORY_STYLES[category]),
                "sign": _cell_symbol(category),
            }
            for category in TIME_CATEGORIES
        ],
        "axes": {name: stride for mesh in meshes for name, stride in mesh.axis_strides.items()},
        "first": heatmap.layout.encoder_ranks,
        "orders": orders,
        "axisLabels": [_labelled_axes(axes, heatmap.layout) for axes in orders],
        "bins": heatmap.dominant.category.shape[1],
        "makespan": heatmap.dominant.makespan,
        "size": unit_size,
        "most": _MAX_DRAWN_ROWS,
    }


def _labelled_axes(axes: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    """Axes whose coordinates label a rank: those of the order, and the expert axis."""
    return axes if EXPERT.name in axes or not layout.has_expert_mesh else (*axes, EXPERT.name)


def _cell_symbol(category: TimeCategory) -> str:
    """Symbol drawn on the cells of a category in addition to its colour; empty for work."""
    return (
        "dot"
        if category in EXPOSED_CATEGORIES.values()
        else "dash"
        if category in (*BUBBLE_CATEGORIES, TimeCategory.WAIT)
        else ""
    )


def _available_orders(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Row orders that differ in this layout."""
    is_distinct = {"by stage": layout.pp > 1 and layout.dp > 1, "by replica": True, "by experts": layout.ep > 1}
    return {label: axes for label, axes in _ROW_ORDERS.items() if is_distinct[label]}
