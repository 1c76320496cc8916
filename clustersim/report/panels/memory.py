"""What does each stage hold, and when is it most? Peaks of all stages, and one stage over time, with the capacity."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Final

import numpy as np

from clustersim.build import build_plan
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes, Seconds, format_bytes
from clustersim.memory.footprint import MemoryCategory as Use
from clustersim.report.draw.charts import Drawn, level, note, plot, stacked
from clustersim.report.figure import Figure, axis, legend, packed, time_scale
from clustersim.report.html_document import Card, card, drawn, prose
from clustersim.report.labels import row_word, stage_name
from clustersim.report.row_selection import MOST_ROWS, Bars, bars, shown_rows
from clustersim.report.theme import USE_LOOKS
from clustersim.results.memory_check import build_footprint
from clustersim.results.simulation_result import SimulationResult

_GIB: Final = 2.0**30
_MOST_MOMENTS: Final = 1500


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a pipeline rank holds. times: [t] seconds, ascending; held: [uses, t] bytes, from times[i] on."""

    number: int
    label: str
    times: FloatArray
    held: FloatArray

    @property
    def peak(self) -> FloatArray:
        """[uses] bytes at the moment at which most is held."""
        return np.asarray(self.held[:, int(self.held.sum(axis=0).argmax())])


def memory_cards(result: SimulationResult, several: bool) -> Iterator[Card]:
    """Memory over time and at the peak. several: whether pages show several pipeline ranks."""
    stages, word, capacity = stages_of(result), row_word(result.scenario), result.memory_capacity
    step = ", in the first step" if result.scenario.steps > 1 else ""
    lead = prose("memory", of=f" of the {word}" * several, step=step)
    yield card("Memory over time", memory_figure(stages, capacity, result.step_time), lead=lead)
    peaks = np.array([stage.peak for stage in stages])
    alike = bars([stage.label for stage in stages], [str(stage.number) for stage in stages], peaks, capacity)
    few = len(stages) < len(result.ledgers)
    some = f"{len(stages)} of {len(result.ledgers):,} {word}s are shown, the fullest among them." * few
    footprint = build_footprint(result.scenario, build_plan(result.scenario))
    yield drawn(
        "peaks.html",
        figure=peak_figure(alike, capacity),
        experts=[(stage.label, *footprint.split_experts(stage.number)) for stage in stages],
        mixtures=result.scenario.model.distinct_moes,
        caption=f"{some} {alike.note('the capacity').strip()}".strip(),
    )


def stages_of(result: SimulationResult) -> list[Held]:
    """The ledgers of pipeline ranks: of many some, evenly spaced, and the fullest."""
    shown = sorted({*shown_rows(len(result.ledgers), MOST_ROWS - 1).tolist(), result.peak_memory_pipeline_rank})
    return [Held(item, stage_name(result.scenario, item), *result.ledgers[item].over_time()) for item in shown]


def peak_figure(alike: Bars, capacity: Bytes) -> Figure:
    """What every pipeline rank holds at its own peak, by use, and the capacity."""
    uses = {place: (use.value, USE_LOOKS[use]) for place, use in enumerate(Use) if alike.values[:, place].any()}
    most = max(capacity, float(alike.values[:, list(uses)].sum(axis=1).max(initial=0.0))) / _GIB
    return stacked(
        "peaks", alike, uses, axis("memory at the peak [GiB]", range=[0, most * 1.04]), size=_GIB, told=format_bytes,
        shapes=[_capacity_line("x", capacity)],
    )  # fmt: skip


def memory_figure(every: list[Held], capacity: Bytes, step_time: Seconds) -> Figure:
    """One stage over time, stacked by use; the reader chooses the stage, the fullest comes first."""
    scale, stages = time_scale(step_time), by_peak(every)
    most = max([capacity, *(float(stage.peak.sum()) for stage in stages)]) / _GIB
    moments = [_moments(stage) for stage in stages]
    times = [stage.times[shown] for stage, shown in zip(stages, moments, strict=True)]
    held = [stage.held[:, shown].ravel() for stage, shown in zip(stages, moments, strict=True)]
    looks = [
        {"label": escape(use.value), "colour": look.colour, "pattern": look.pattern}
        for use, look in ((use, USE_LOOKS[use]) for use in Use)
    ]
    right = {"xref": "paper", "xanchor": "right", "yanchor": "bottom"}
    words = note(f"capacity {format_bytes(capacity)}", 1, capacity / _GIB, "@alarm", **right)
    x = axis(f"time [{scale.unit}]", range=[0, step_time / scale.size or 1], minallowed=0)
    y = axis("memory held [GiB]", range=[0, most * 1.08], fixedrange=True)
    drawn = {"legend": legend(traceorder="normal"), "shapes": [_capacity_line("y", capacity)], "annotations": [words]}
    narrow = {"legend": {"font": {"size": 9}}}
    return replace(
        plot("memory", [], x, y, height=400, narrow=narrow, hovermode="x unified", **drawn),
        choices=tuple((stage.label, []) for stage in stages),
        behaviour="memory",
        arrays={
            name: packed(np.concatenate(array).astype(np.float32)) for name, array in (("time", times), ("held", held))
        },
        facts={"moments": list(map(len, times)), "looks": looks, "end": step_time, "size": scale.size, "gib": _GIB},
    )


def by_peak(stages: list[Held]) -> list[Held]:
    """The shown stages in order, but the fullest first."""
    fullest = max(stages, key=lambda stage: float(stage.peak.sum()))
    return [fullest, *(stages[row] for row in shown_rows(len(stages)) if stages[row] is not fullest)]


def _moments(stage: Held) -> IntArray:
    """Moments to draw: all, or in each of many bins the fullest, so that no peak is lost."""
    if len(stage.times) <= _MOST_MOMENTS:
        return np.arange(len(stage.times))
    first = np.linspace(0, len(stage.times), _MOST_MOMENTS, endpoint=False).astype(np.int64)
    total = stage.held.sum(axis=0)
    ends = np.append(first[1:], len(total))
    return np.array([low + int(total[low:high].argmax()) for low, high in zip(first, ends, strict=True)])


def _capacity_line(along: str, capacity: Bytes) -> Drawn:
    look = {"color": "@alarm", "width": 2, "dash": "dash"}
    return level(along, capacity / _GIB, look, **{f"{along}ref": along})
