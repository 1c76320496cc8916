"""What does each stage hold, and when is it most? Peaks of all stages, and one stage over time, with the capacity."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.answer import Answer
from clustersim.arrays import FloatArray, IntArray
from clustersim.assembly import plan_of
from clustersim.fitting import footprint_of
from clustersim.memory.footprint import Category as Use
from clustersim.memory.footprint import Footprint
from clustersim.memory.ledger import Ledger
from clustersim.report.document import Card, card, drawn, prose
from clustersim.report.draw.bars import Drawn, level, note, stacked
from clustersim.report.figure import Figure, axis, layout, legend, packed, time_scale
from clustersim.report.rows import MOST_ROWS, Bars, bars, shown_rows
from clustersim.report.theme import USE_LOOKS
from clustersim.report.wording import row_word, stage_name
from clustersim.units import Bytes, Seconds, format_bytes
from clustersim.workload.operators import EXPERTS

_GIB: Final = 2.0**30
_MOST_MOMENTS: Final = 1500
Weights = tuple[float, Bytes]
"""Parameters, and bytes of them, their gradients and optimizer states."""


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


def memory_cards(result: Answer, several: bool) -> Iterator[Card]:
    """Memory over time and at the peak. several: whether pages show several pipeline ranks."""
    stages, word, capacity = stages_of(result), row_word(result.scenario), result.memory_capacity
    step = ", in the first step" if result.scenario.steps > 1 else ""
    lead = prose("memory", of=f" of the {word}" * several, step=step)
    yield card("Memory over time", memory_figure(stages, capacity, result.step_time), lead=lead)
    peaks = np.array([stage.peak for stage in stages])
    alike = bars([stage.label for stage in stages], [str(stage.number) for stage in stages], peaks, capacity)
    few = len(stages) < len(result.ledgers)
    some = f"{len(stages)} of {len(result.ledgers):,} {word}s are shown, the fullest among them." * few
    experts = weights_of_experts(result, stages) if result.scenario.model.mixtures else []
    yield drawn(
        "peaks.html",
        figure=peak_figure(alike, capacity),
        experts=experts,
        caption=f"{some} {alike.note('the capacity').strip()}".strip(),
    )


def stages_of(result: Answer) -> list[Held]:
    """The ledgers of pipeline ranks: of many some, evenly spaced, and the fullest."""
    shown = sorted({*shown_rows(len(result.ledgers), MOST_ROWS - 1).tolist(), result.fullest})
    return [_held(number, stage_name(result.scenario, number), result.ledgers[number]) for number in shown]


def _held(number: int, label: str, ledger: Ledger) -> Held:
    """A ledger as a matrix; before its first event no activations are held."""
    times = np.concatenate(([0.0], ledger.times))
    activations = np.concatenate(([0.0], ledger.activations))
    peak = ledger.at_peak()
    held = np.array([np.full(len(times), peak.get(use, 0.0)) for use in Use])
    missing = ledger.peak_activations - activations
    uses = list(Use)
    held[uses.index(Use.ACTIVATIONS)] -= missing
    held[uses.index(Use.FRAGMENTATION)] -= missing * (ledger.fragmentation - 1)
    return Held(number, label, times, held)


def peak_figure(alike: Bars, capacity: Bytes) -> Figure:
    """What every pipeline rank holds at its own peak, by use, and the capacity."""
    uses = {place: (use.value, USE_LOOKS[use]) for place, use in enumerate(Use) if alike.values[:, place].any()}
    most = max(capacity, float(alike.values[:, list(uses)].sum(axis=1).max(initial=0.0))) / _GIB
    return stacked(
        "peaks", alike, uses, axis("memory at the peak [GiB]", range=[0, most * 1.04]), size=_GIB, told=format_bytes,
        shapes=[_capacity_line("x", capacity)],
    )  # fmt: skip


def weights_of_experts(result: Answer, stages: list[Held]) -> list[tuple[str, Weights, Weights]]:
    """What experts take and all other weights, of every pipeline rank."""
    footprint = footprint_of(result.scenario, plan_of(result.scenario))
    return [(stage.label, *experts_and_others(footprint, stage.number)) for stage in stages]


def experts_and_others(footprint: Footprint, number: int) -> tuple[Weights, Weights]:
    """What experts take on a pipeline rank, and all other weights."""
    weights = footprint.weights(number)
    others = [each for name, each in weights.items() if name != EXPERTS]
    return weights.get(EXPERTS, (0.0, 0.0)), (sum(count for count, _ in others), sum(size for _, size in others))


def memory_figure(every: list[Held], capacity: Bytes, step_time: Seconds) -> Figure:
    """One stage over time, stacked by use; the reader chooses the stage, the fullest comes first."""
    scale, stages = time_scale(step_time), by_peak(every)
    most = max([capacity, *(float(stage.peak.sum()) for stage in stages)]) / _GIB
    times, held, facts = _columns(stages)
    looks = [
        {"label": escape(use.value), "colour": USE_LOOKS[use].colour, "pattern": USE_LOOKS[use].pattern} for use in Use
    ]
    words = note(
        f"capacity {format_bytes(capacity)}", 1, capacity / _GIB, "@alarm",
        xref="paper", xanchor="right", yanchor="bottom",
    )  # fmt: skip
    return Figure(
        name="memory",
        traces=[],
        choices=tuple((stage.label, []) for stage in stages),
        layout=layout(
            showlegend=True,
            legend=legend(traceorder="normal"),
            hovermode="x unified",
            xaxis=axis(f"time [{scale.unit}]", range=[0, step_time / scale.size or 1], minallowed=0),
            yaxis=axis("memory held [GiB]", range=[0, most * 1.08], fixedrange=True),
            shapes=[_capacity_line("y", capacity)],
            annotations=[words],
        ),
        height=400,
        narrow={"legend": {"font": {"size": 9}}},
        behaviour="memory",
        arrays={"time": packed(times), "held": packed(held)},
        facts={"stages": facts, "looks": looks, "end": step_time, "size": scale.size, "gib": _GIB},
    )


def by_peak(stages: list[Held]) -> list[Held]:
    """The shown stages in order, but the fullest first."""
    peaks = [float(stage.peak.sum()) for stage in stages]
    fullest = int(np.argmax(peaks))
    return [stages[fullest], *(stages[row] for row in shown_rows(len(stages)).tolist() if row != fullest)]


def _columns(stages: list[Held]) -> tuple[NDArray[np.float32], NDArray[np.float32], list[dict[str, Any]]]:
    """Moments and bytes of all stages, one after the other, and for each stage where they are.

    Of a use that holds the same at all times only the amount is kept.
    """
    times: list[FloatArray] = [np.zeros(0)]
    held: list[FloatArray] = [np.zeros(0)]
    facts, first, at = [], 0, 0
    for stage in stages:
        moments = _moments(stage)
        amounts: list[float | dict[str, int]] = []
        for row in stage.held[:, moments]:
            if np.ptp(row) == 0:
                amounts.append(float(row[0]))
                continue
            amounts.append({"first": at})
            held.append(row)
            at += len(row)
        facts.append({"first": first, "moments": len(moments), "held": amounts})
        times.append(stage.times[moments])
        first += len(moments)
    return np.concatenate(times).astype(np.float32), np.concatenate(held).astype(np.float32), facts


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
