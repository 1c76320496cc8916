"""How much memory does each stage hold, and when?

Peaks of all stages, and one stage over time, with the capacity.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Final

import numpy as np

from clustersim.build import build_plan
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes, Seconds, format_bytes
from clustersim.memory.footprint import MemoryCategory as Use
from clustersim.report.draw.charts import PlotlyDict, annotation, reference_line, stacked_bar_figure, xy_figure
from clustersim.report.figure import Figure, axis_layout, compress_array, legend_layout, time_scale
from clustersim.report.html_document import Panel, figure_panel, render_panel, render_text
from clustersim.report.labels import pipeline_row_type, stage_name
from clustersim.report.row_selection import MAX_ROWS, MergedBars, merge_bars, sample_rows
from clustersim.report.theme import MEMORY_CATEGORY_STYLES
from clustersim.results.memory_check import build_footprint
from clustersim.results.simulation_result import SimulationResult

_GIB: Final = 2.0**30
_MAX_SAMPLES: Final = 1500


@dataclass(frozen=True, slots=True, eq=False)
class StageMemory:
    """Memory of a pipeline rank. times: [t] seconds, ascending; held_bytes: [categories, t] bytes from times[i] on."""

    pipeline_rank: int
    label: str
    times: FloatArray
    held_bytes: FloatArray

    @property
    def peak_by_category(self) -> FloatArray:
        """[categories] bytes at the time of peak total memory."""
        return np.asarray(self.held_bytes[:, int(self.held_bytes.sum(axis=0).argmax())])


def memory_panels(result: SimulationResult, has_several_rows: bool) -> Iterator[Panel]:
    """Panels of memory over time and at the peak. has_several_rows: whether the page shows several pipeline ranks."""
    stages, row_type, capacity = stage_memories(result), pipeline_row_type(result.scenario), result.memory_capacity
    step = ", in the first step" if result.scenario.steps > 1 else ""
    lead = render_text("memory", rank_type=f" of the {row_type}" * has_several_rows, step=step)
    yield figure_panel("Memory over time", memory_figure(stages, capacity, result.step_time), lead=lead)
    peaks = np.array([stage.peak_by_category for stage in stages])
    merged_bars = merge_bars(
        [stage.label for stage in stages], [str(stage.pipeline_rank) for stage in stages], peaks, capacity
    )
    is_sampled = len(stages) < len(result.ledgers)
    sample_note = (
        f"{len(stages)} of {len(result.ledgers):,} {row_type}s are shown, including the one with the peak memory."
        * is_sampled
    )
    footprint = build_footprint(result.scenario, build_plan(result.scenario))
    yield render_panel(
        "peaks.html",
        figure=peak_figure(merged_bars, capacity),
        experts=[(stage.label, *footprint.split_experts(stage.pipeline_rank)) for stage in stages],
        has_experts=result.scenario.model.distinct_moes,
        caption=f"{sample_note} {merged_bars.merge_note('the capacity').strip()}".strip(),
    )


def stage_memories(result: SimulationResult) -> list[StageMemory]:
    """Memory of the pipeline ranks: of many an evenly spaced sample, and the peak-memory rank."""
    pipeline_ranks = sorted(
        {*sample_rows(len(result.ledgers), MAX_ROWS - 1).tolist(), result.memory.most_loaded_pipeline_rank}
    )
    return [
        StageMemory(
            pipeline_rank, stage_name(result.scenario, pipeline_rank), *result.ledgers[pipeline_rank].over_time()
        )
        for pipeline_rank in pipeline_ranks
    ]


def peak_figure(bars: MergedBars, capacity: Bytes) -> Figure:
    """Memory of every pipeline rank at its own peak, by category, and the capacity."""
    columns = {
        index: (category.value, MEMORY_CATEGORY_STYLES[category])
        for index, category in enumerate(Use)
        if bars.values[:, index].any()
    }
    axis_max = max(capacity, float(bars.values[:, list(columns)].sum(axis=1).max(initial=0.0))) / _GIB
    return stacked_bar_figure(
        "peaks",
        bars,
        columns,
        axis_layout("memory at the peak [GiB]", range=[0, axis_max * 1.04]),
        unit_size=_GIB,
        format_value=format_bytes,
        shapes=[_capacity_line("x", capacity)],
    )


def memory_figure(stages: list[StageMemory], capacity: Bytes, step_time: Seconds) -> Figure:
    """Memory of one selectable stage over time, stacked by category; the peak-memory rank is first."""
    scale, ordered = time_scale(step_time), peak_memory_first(stages)
    axis_max = max([capacity, *(float(stage.peak_by_category.sum()) for stage in ordered)]) / _GIB
    sample_indices = [_sample_indices(stage) for stage in ordered]
    times = [stage.times[samples] for stage, samples in zip(ordered, sample_indices, strict=True)]
    held = [stage.held_bytes[:, samples].ravel() for stage, samples in zip(ordered, sample_indices, strict=True)]
    styles = [
        {"label": escape(category.value), "colour": style.colour, "pattern": style.pattern}
        for category, style in ((category, MEMORY_CATEGORY_STYLES[category]) for category in Use)
    ]
    label_position = {"xref": "paper", "xanchor": "right", "yanchor": "bottom"}
    capacity_label = annotation(f"capacity {format_bytes(capacity)}", 1, capacity / _GIB, "@alarm", **label_position)
    x = axis_layout(f"time [{scale.unit}]", range=[0, step_time / scale.unit_size or 1], minallowed=0)
    y = axis_layout("memory held [GiB]", range=[0, axis_max * 1.08], fixedrange=True)
    layout_options = {
        "legend": legend_layout(traceorder="normal"),
        "shapes": [_capacity_line("y", capacity)],
        "annotations": [capacity_label],
    }
    narrow = {"legend": {"font": {"size": 9}}}
    return replace(
        xy_figure("memory", [], x, y, height=400, narrow=narrow, hovermode="x unified", **layout_options),
        choices=tuple((stage.label, []) for stage in ordered),
        client_script="memory",
        arrays={
            name: compress_array(np.concatenate(array).astype(np.float32))
            for name, array in (("time", times), ("held", held))
        },
        script_data={
            "moments": list(map(len, times)),
            "styles": styles,
            "end": step_time,
            "size": scale.unit_size,
            "gib": _GIB,
        },
    )


def peak_memory_first(stages: list[StageMemory]) -> list[StageMemory]:
    """The shown stages in order, but the one with the highest peak first."""
    max_stage = max(stages, key=lambda stage: float(stage.peak_by_category.sum()))
    return [max_stage, *(stages[index] for index in sample_rows(len(stages)) if stages[index] is not max_stage)]


def _sample_indices(stage: StageMemory) -> IntArray:
    """Indices of the times to draw: all, or the stage of each of many bins, so that no peak is lost."""
    if len(stage.times) <= _MAX_SAMPLES:
        return np.arange(len(stage.times))
    first = np.linspace(0, len(stage.times), _MAX_SAMPLES, endpoint=False).astype(np.int64)
    total = stage.held_bytes.sum(axis=0)
    ends = np.append(first[1:], len(total))
    return np.array([begin + int(total[begin:end].argmax()) for begin, end in zip(first, ends, strict=True)])


def _capacity_line(axis_letter: str, capacity: Bytes) -> PlotlyDict:
    line = {"color": "@alarm", "width": 2, "dash": "dash"}
    return reference_line(axis_letter, capacity / _GIB, line, **{f"{axis_letter}ref": axis_letter})
