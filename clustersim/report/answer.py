"""Which parts of a result does the page show, and under which names and colours?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from clustersim.analysis.losses import Help, Loss, losses, what_helps
from clustersim.analysis.nearest import NearestRun
from clustersim.analysis.what_if import WhatIfs
from clustersim.answer import Answer
from clustersim.assembly import plan_of
from clustersim.fitting import footprint_of
from clustersim.memory.footprint import Category as Use
from clustersim.memory.ledger import Ledger
from clustersim.report.answer_critical_path import critical_path_of
from clustersim.report.answer_dominant import dominant_of
from clustersim.report.answer_kernels import kernels_of
from clustersim.report.answer_network import network_of, topology_of
from clustersim.report.answer_overlap import overlap_of
from clustersim.report.answer_table import PART_LOOKS, ideal_of, table_view
from clustersim.report.answer_timeline import shown_rows_of, timeline_of
from clustersim.report.rows import MOST_ROWS, shown_ranks, shown_rows
from clustersim.report.theme import Category
from clustersim.report.view import (
    Memory,
    PageView,
    ShownLoss,
    StageMemory,
    Timeline,
)
from clustersim.report.wording import stage_name
from clustersim.units import format_seconds
from clustersim.workload.operators import EXPERTS

_LOSSES: Final = 3  # that are shown
USE_LOOKS: Final[Mapping[Use, Category]] = MappingProxyType(
    {
        Use.PARAMETERS: Category.PARAMETERS,
        Use.COPIES: Category.COPIES,
        Use.GRADIENTS: Category.GRADIENTS,
        Use.OPTIMIZER: Category.OPTIMIZER_STATE,
        Use.GATHERED: Category.GATHERED,
        Use.ACTIVATIONS: Category.ACTIVATIONS,
        Use.OFFLOAD: Category.OFFLOAD,
        Use.MESSAGES: Category.MESSAGES,
        Use.WORKSPACE: Category.WORKSPACE,
        Use.COMMUNICATION: Category.BUFFERS,
        Use.CONTEXT: Category.CUDA_CONTEXT,
        Use.FRAGMENTATION: Category.FRAGMENTATION,
    }
)


def page_view(result: Answer, what_ifs: WhatIfs | None = None, nearest: NearestRun | None = None) -> PageView:
    """What the page shows of a result, too: changes that were simulated, and the published run most like it."""
    return replace(
        notebook_view(result),
        losses=losses_of(result, what_ifs),
        dominant=dominant_of(result),
        overlap=overlap_of(result),
        network=network_of(result),
        topology=topology_of(result),
        critical_path=critical_path_of(result),
        what_ifs=what_ifs,
        nearest=nearest,
    )


def notebook_view(result: Answer) -> PageView:
    """What a notebook shows, with the kernels inside passes."""
    view = plain_view(result)
    return replace(view, timeline=with_kernels(result, view.timeline))


def plain_view(result: Answer) -> PageView:
    """What pages show of every answer: all but what takes long."""
    table = table_view(result)
    return PageView(
        subject=table.subject,
        verdict=table.verdict,
        trust=table.trust,
        breakdown=table.breakdown,
        waiting=table.waiting,
        timeline=timeline_of(result, shown_ranks(result)),
        memory=memory_of(result),
        losses=losses_of(result),
        notes=(f"Simulated in {format_seconds(result.wall)}.",),
    )


def with_kernels(result: Answer, timeline: Timeline) -> Timeline:
    """A timeline of `timeline_of` with the kernels inside its passes."""
    rows = shown_rows_of(result, [row.rank for row in timeline.rows])
    return replace(timeline, kernels=kernels_of(result, rows))


def losses_of(result: Answer, what_ifs: WhatIfs | None = None) -> tuple[ShownLoss, ...]:
    """The largest losses, and what of the changes that were simulated makes them smaller."""

    def help_of(loss: Loss) -> Help | None:
        return what_helps(loss, what_ifs) if what_ifs and what_ifs.tried else None

    largest = losses(result.breakdown.mean(), ideal_of(result))[:_LOSSES]
    return tuple(ShownLoss(loss, PART_LOOKS[loss.parts[0]], help_of(loss)) for loss in largest)


def memory_of(result: Answer) -> Memory:
    """The ledgers of pipeline ranks: of many some, evenly spaced, and the fullest."""
    shown = sorted({*shown_rows(len(result.ledgers), MOST_ROWS - 1).tolist(), result.fullest})
    held = [_held(stage_name(result.scenario, number), str(number), result.ledgers[number]) for number in shown]
    return Memory(
        labels=tuple(use.value for use in Use),
        categories=tuple(USE_LOOKS[use] for use in Use),
        stages=tuple(_apart(result, shown, held) if result.scenario.model.mixtures else held),
        capacity=result.memory_capacity,
        of_stages=len(result.ledgers),
    )


def _apart(result: Answer, shown: Sequence[int], held: Sequence[StageMemory]) -> Iterator[StageMemory]:
    """What pipeline ranks hold, with what experts take apart from all else."""
    footprint = footprint_of(result.scenario, plan_of(result.scenario))
    for number, stage in zip(shown, held, strict=True):
        weights = footprint.weights(number)
        others = [each for name, each in weights.items() if name != EXPERTS]
        rest = sum(count for count, _ in others), sum(size for _, size in others)
        yield replace(stage, experts=weights.get(EXPERTS, (0.0, 0.0)), others=rest)


def _held(label: str, short: str, ledger: Ledger) -> StageMemory:
    """A ledger as a matrix; before its first event no activations are held."""
    times = np.concatenate(([0.0], ledger.times))
    activations = np.concatenate(([0.0], ledger.activations))
    peak = ledger.at_peak()
    held = np.array([np.full(len(times), peak.get(use, 0.0)) for use in Use])
    missing = ledger.peak_activations - activations
    uses = list(Use)
    held[uses.index(Use.ACTIVATIONS)] -= missing
    held[uses.index(Use.FRAGMENTATION)] -= missing * (ledger.fragmentation - 1)
    return StageMemory(label, short, times, held)
