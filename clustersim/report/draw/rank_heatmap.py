"""What does every rank of the job do, when? One row for each rank, coloured by what takes most of each moment.

Ranks of one class have equal rows, so the file holds a row for each class and the page's script (`assets/heatmap.js`)
puts them where their ranks are. It draws at most some hundred rows at a time: zoomed in, every rank has its own.
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
"""In which order rows stand: the axes from the one that changes last; ranks with the same experts beside each other."""
_BIN_COUNT: Final = 720  # about two pixels each on a large screen
_MAX_HEIGHT: Final = 420
_MAX_DRAWN_ROWS: Final = 512  # rows that the page's script draws at most
_MAX_ROW_PIXELS: Final = 40  # pixels of a row where there are few


@dataclass(frozen=True, slots=True, eq=False)
class RankHeatmap:
    """What all ranks do, and where they are. layout: gives their coordinates; nodes: [ranks] their nodes."""

    dominant: DominantCategories
    layout: Layout
    node_ids: IntArray

    @property
    def rank_count(self) -> int:
        """World size."""
        return len(self.dominant.representative)


def build_heatmap(result: SimulationResult) -> RankHeatmap | None:
    """What all ranks do over time; None where there is one rank, which the timeline shows, or nothing happens."""
    if result.rank_count == 1 or result.trace.makespan <= 0:
        return None
    scenario = result.scenario
    dominant = dominant_categories(result.trace_table, result.cost.time_segment, bin_count=_BIN_COUNT)
    return RankHeatmap(dominant, scenario.layout, scenario.cluster.machine.node_ids(scenario.cluster.machine_gpu_ids))


def heatmap_panel(heatmap: RankHeatmap) -> Panel:
    """All ranks over time, and a panel about the one that is clicked."""
    return render_panel(
        "heatmap.html",
        figure=heatmap_figure(heatmap),
        heatmap=heatmap,
        classes=len(np.unique(heatmap.dominant.representative)),
        parts=category_legend(heatmap.dominant.category),
        most=_MAX_DRAWN_ROWS,
    )


def heatmap_figure(heatmap: RankHeatmap) -> Figure:
    """The figure, which its behaviour draws."""
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
            "classOf": compress_array(dominant.class_of_rank.astype(np.uint16)),  # the greatest number for none
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
        "orders": orders,
        "told": [_labelled_axes(axes, heatmap.layout) for axes in orders],
        "bins": heatmap.dominant.category.shape[1],
        "makespan": heatmap.dominant.makespan,
        "size": unit_size,
        "most": _MAX_DRAWN_ROWS,
    }


def _labelled_axes(axes: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    """The coordinates that are told of a rank: the order's, and which experts it has."""
    return axes if EXPERT.name in axes or not layout.has_expert_mesh else (*axes, EXPERT.name)


def _cell_symbol(category: TimeCategory) -> str:
    """What stands on the cells of a part, beside its colour; nothing on work."""
    return (
        "dot"
        if category in EXPOSED_CATEGORIES.values()
        else "dash"
        if category in (*BUBBLE_CATEGORIES, TimeCategory.WAIT)
        else ""
    )


def _available_orders(layout: Layout) -> dict[str, tuple[str, ...]]:
    """The orders that differ."""
    is_distinct = {"by stage": layout.pp > 1 and layout.dp > 1, "by replica": True, "by experts": layout.ep > 1}
    return {label: axes for label, axes in _ROW_ORDERS.items() if is_distinct[label]}
