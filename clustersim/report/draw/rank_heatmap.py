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
from clustersim.report.draw.charts import plot
from clustersim.report.figure import Figure, axis, packed, time_scale
from clustersim.report.html_document import Card, drawn
from clustersim.report.legend_markup import key, part_keys
from clustersim.report.theme import PART_LOOKS
from clustersim.results.dominant_categories import DominantParts, dominant_parts
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import BUBBLES, EXPOSED, PARTS, Part

_WITHIN: Final = tuple(axis.name for axis in reversed(MESHES[DENSE_MESH]) if axis not in (DATA, PIPELINE))
_ORDERS: Final = {
    "by stage": (PIPELINE.name, DATA.name, *_WITHIN),
    "by replica": (DATA.name, PIPELINE.name, *_WITHIN),
    "by experts": tuple(axis.name for axis in (PIPELINE, EXPERT, EXPERT_DATA, EXPERT_TENSOR)),
}
"""In which order rows stand: the axes from the one that changes last; ranks with the same experts beside each other."""
_BINS: Final = 720  # about two pixels each on a large screen
_HEIGHT: Final = 420
_DRAWN: Final = 512  # rows that the page's script draws at most
_ROW: Final = 40  # pixels of a row where there are few


@dataclass(frozen=True, slots=True, eq=False)
class Heatmap:
    """What all ranks do, and where they are. layout: gives their coordinates; nodes: [ranks] their nodes."""

    dominant: DominantParts
    layout: Layout
    nodes: IntArray

    @property
    def ranks(self) -> int:
        """World size."""
        return len(self.dominant.representative)


def dominant_of(result: SimulationResult) -> Heatmap | None:
    """What all ranks do over time; None where there is one rank, which the timeline shows, or nothing happens."""
    if result.rank_count == 1 or result.trace.makespan <= 0:
        return None
    scenario = result.scenario
    found = dominant_parts(result.trace_table, result.cost.time_segment, bins=_BINS)
    return Heatmap(found, scenario.layout, scenario.cluster.machine.node_ids(scenario.cluster.machine_gpu_ids))


def heatmap_card(heatmap: Heatmap) -> Card:
    """All ranks over time, and a panel about the one that is clicked."""
    return drawn(
        "heatmap.html",
        figure=heatmap_figure(heatmap),
        heatmap=heatmap,
        classes=len(np.unique(heatmap.dominant.representative)),
        parts=part_keys(heatmap.dominant.category),
        most=_DRAWN,
    )


def heatmap_figure(heatmap: Heatmap) -> Figure:
    """The figure, which its behaviour draws."""
    dominant = heatmap.dominant
    scale = time_scale(dominant.makespan)
    shown = int((dominant.class_of >= 0).sum())
    end = dominant.makespan / scale.size
    x = axis(f"time [{scale.unit}]", range=[0, end], minallowed=0, maxallowed=end, showgrid=False)
    y = axis("", range=[shown - 0.5, -0.5], minallowed=-0.5, maxallowed=shown - 0.5, showgrid=False)
    height, narrow = min(_HEIGHT, 60 + _ROW * shown), {"yaxis": {"tickfont": {"size": 9}}}
    return replace(
        plot("heatmap", [], x, y, height=height, narrow=narrow, showlegend=False),
        choices=tuple((words, []) for words in _orders(heatmap.layout)),
        behaviour="heatmap",
        arrays={
            "category": packed(dominant.category.ravel()),
            "seconds": packed(dominant.seconds.astype(np.float32).ravel()),
            "simulated": packed(dominant.ranks.astype(np.uint32)),
            "classOf": packed(dominant.class_of.astype(np.uint16)),  # the greatest number for none
            "nodeOf": packed(heatmap.nodes.astype(np.uint32)),
        },
        facts=_facts(heatmap, scale.size),
    )


def _facts(heatmap: Heatmap, size: float) -> dict[str, Any]:
    orders = list(_orders(heatmap.layout).values())
    meshes = (mesh for name, mesh in heatmap.layout.as_configured.meshes.items() if name in (DENSE_MESH, EXPERT_MESH))
    return {
        "parts": [
            {"name": part.value, "colour": PART_LOOKS[part].colour, "key": key(PART_LOOKS[part]), "sign": _sign(part)}
            for part in PARTS
        ],
        "axes": {name: place for mesh in meshes for name, place in mesh.axis_strides.items()},
        "orders": orders,
        "told": [_told(axes, heatmap.layout) for axes in orders],
        "bins": heatmap.dominant.category.shape[1],
        "makespan": heatmap.dominant.makespan,
        "size": size,
        "most": _DRAWN,
    }


def _told(axes: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    """The coordinates that are told of a rank: the order's, and which experts it has."""
    return axes if EXPERT.name in axes or not layout.has_expert_mesh else (*axes, EXPERT.name)


def _sign(part: Part) -> str:
    """What stands on the cells of a part, beside its colour; nothing on work."""
    return "dot" if part in EXPOSED.values() else "dash" if part in (*BUBBLES, Part.WAIT) else ""


def _orders(layout: Layout) -> dict[str, tuple[str, ...]]:
    """The orders that differ."""
    differ = {"by stage": layout.pp > 1 and layout.dp > 1, "by replica": True, "by experts": layout.ep > 1}
    return {words: axes for words, axes in _ORDERS.items() if differ[words]}
