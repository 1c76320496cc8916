"""Time losses: what keeps a step from the ideal, and which changes help?

Ideal is a step in which every GPU runs the model's FLOP (attention as its causal mask leaves it) at its peak and
nothing else. All other time is lost: matmuls and attention below the peak, memory-bound kernels, recomputation, the
optimizer, launches, exposed communication (by axis), bubbles, waiting. Losses are means over all ranks, so with the
ideal they sum to the step.

Time in which pipeline ranks wait for the pipeline is two losses. The pipeline rank that waits least would wait as
long if all had as much work as it has: that is the bubble of the schedule, which more microbatches or another
schedule shorten. What the others wait longer is imbalance, which another partition of the layers shortens. For
example, two pipeline ranks that compute 6 s and 8 s of a step of 9 s wait 3 s and 1 s: the bubble is 1 s, and the
imbalance the rest of the mean, 1 s.

What helps is simulated, not guessed: with one thing changed (`results.what_if`), the loss decreased.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.model.kernels import TENSOR_CORE_KINDS
from clustersim.program.task import Segment
from clustersim.results.class_blocks import class_blocks
from clustersim.results.time_breakdown import TimeBreakdown
from clustersim.results.time_categories import (
    BUBBLE_CATEGORIES,
    CATEGORY_BY_WORK_TYPE,
    EXPOSED_CATEGORIES,
    TimeCategory,
)
from clustersim.results.trace_table import SegmentTimingLookup, TraceTable, sum_segment_runs, timing_run_counts
from clustersim.scenario.changes.step_losses import StepLoss

if TYPE_CHECKING:
    from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport

MIN_LOSS_SHARE: Final = 0.005  # fraction of the step: smaller losses are not reported
MIN_RELATIVE_CHANGE: Final = 0.05  # fraction of a loss: a smaller change does not count as help

LOSS_CATEGORIES: Final[Mapping[StepLoss, tuple[TimeCategory, ...]]] = {
    StepLoss.MATMULS: (TimeCategory.COMPUTE,),
    StepLoss.MEMORY_BOUND: (TimeCategory.COMPUTE,),
    StepLoss.RECOMPUTE: (TimeCategory.RECOMPUTE,),
    StepLoss.OPTIMIZER: (TimeCategory.OPTIMIZER,),
    StepLoss.LAUNCH: (TimeCategory.LAUNCH,),
    StepLoss.SLOWED: (TimeCategory.SLOWED,),
    **{StepLoss(category.value): (category,) for category in EXPOSED_CATEGORIES.values()},
    StepLoss.BUBBLE: BUBBLE_CATEGORIES,
    StepLoss.IMBALANCE: BUBBLE_CATEGORIES,
    StepLoss.WAIT: (TimeCategory.WAIT,),
}
"""Time categories that each loss is a part of, or all of."""
COMPUTE_LOSSES: Final = (StepLoss.MATMULS, StepLoss.MEMORY_BOUND)
"""Losses that are computation, as is the ideal."""


@dataclass(frozen=True, slots=True)
class TimeLoss:
    """A loss of a step. seconds: mean over ranks; share: of the step."""

    loss: StepLoss
    seconds: Seconds
    share: float

    @property
    def name(self) -> str:
        """Its name in results."""
        return str(self.loss.value)

    @property
    def categories(self) -> tuple[TimeCategory, ...]:
        """Time categories that it is a part of, or all of."""
        return LOSS_CATEGORIES[self.loss]


@dataclass(frozen=True, slots=True)
class StepLosses:
    """The parts of a step: means over ranks, which sum to the step time.

    ideal: seconds that the model's FLOP take at the peak; seconds: by loss.
    """

    ideal: Seconds
    seconds: Mapping[StepLoss, Seconds]

    @property
    def step_time(self) -> Seconds:
        """The sum of all parts."""
        return self.ideal + sum(self.seconds.values())

    @property
    def significant(self) -> tuple[TimeLoss, ...]:
        """Losses of at least `MIN_LOSS_SHARE` of the step, the largest first."""
        step_time = self.step_time
        losses = (TimeLoss(loss, seconds, seconds / step_time) for loss, seconds in self.seconds.items() if seconds > 0)
        return tuple(sorted((loss for loss in losses if loss.share >= MIN_LOSS_SHARE), key=lambda loss: -loss.seconds))


@dataclass(frozen=True, slots=True)
class LossRemedies:
    """Simulated changes, each applied separately, and those that were not simulated.

    helpful: those that reduce a loss, the most effective first; most_sensitive: if there is none, the change
    that increases the loss with the least effect on everything else, if any; tried: descriptions of simulated changes
    that address the loss; not_tried: changes that address it and were not simulated, each with its reason.
    """

    helpful: "tuple[tuple[WhatIf, WhatIfOutcome], ...]"
    most_sensitive: "tuple[WhatIf, WhatIfOutcome] | None" = None
    tried: tuple[str, ...] = ()
    not_tried: "tuple[WhatIf, ...]" = ()


def split_step(
    breakdown: TimeBreakdown, *, ideal: Seconds, matmul_share: float, pipeline_ranks: IntArray
) -> StepLosses:
    """The parts of a step.

    ideal: seconds that the model's FLOP take at the peak; matmul_share: of kernel time in forward and backward;
    pipeline_ranks: [ranks] pipeline rank of every rank.
    """
    mean = breakdown.mean_seconds()
    seconds = {
        loss: sum(mean[category.value] for category in categories) for loss, categories in LOSS_CATEGORIES.items()
    }
    compute = seconds[StepLoss.MATMULS]
    matmuls = matmul_share * compute
    ideal = min(ideal, matmuls)
    bubble = seconds[StepLoss.BUBBLE]
    least_bubble = float(bubble_seconds(breakdown, pipeline_ranks).min())
    return StepLosses(
        ideal,
        seconds
        | {
            StepLoss.MATMULS: matmuls - ideal,
            StepLoss.MEMORY_BOUND: compute - matmuls,
            StepLoss.BUBBLE: min(least_bubble, bubble),
            StepLoss.IMBALANCE: max(bubble - least_bubble, 0.0),
        },
    )


def bubble_seconds(breakdown: TimeBreakdown, pipeline_ranks: IntArray) -> FloatArray:
    """Seconds of bubble by pipeline rank, averaged over its ranks: [pipeline ranks].

    pipeline_ranks: [ranks] pipeline rank of every rank.
    """
    by_class = breakdown.seconds[:, [category.index for category in BUBBLE_CATEGORIES]].sum(axis=1)
    by_rank = by_class[np.searchsorted(breakdown.ranks, breakdown.representative)]
    mean: FloatArray = np.bincount(pipeline_ranks, by_rank) / np.bincount(pipeline_ranks)
    return mean


def matmul_share(table: TraceTable, segment_timing: SegmentTimingLookup) -> float:
    """Share of matmuls and attention in the kernel time of forward and backward, over all ranks; 0 without kernels."""
    matmuls = compute = 0.0
    for block in class_blocks(table):
        totals = sum_segment_runs(block, np.arange(len(block.trace)), block.trace.end - block.trace.start)
        for segment, timing, count in timing_run_counts(block, totals, segment_timing):
            segment_matmuls, segment_compute = _compute_seconds(segment, timing)
            matmuls, compute = matmuls + count * segment_matmuls, compute + count * segment_compute
    return matmuls / compute if compute > 0 else 0.0


def _compute_seconds(segment: Segment, timing: SegmentTiming) -> tuple[Seconds, Seconds]:
    """Kernel seconds of forward and backward in a segment: of matmuls and attention, and in total."""
    matmuls = compute = 0.0
    kernel_seconds = (timing.kernel_seconds - timing.launch_stalls).tolist()
    for operation, seconds in zip(segment.operations, kernel_seconds, strict=True):
        if CATEGORY_BY_WORK_TYPE[operation.work_type] is TimeCategory.COMPUTE:
            compute += seconds
            if operation.kernel is not None and operation.kernel.kind in TENSOR_CORE_KINDS:
                matmuls += seconds
    return matmuls, compute


def find_remedies(loss: TimeLoss, report: "WhatIfReport") -> LossRemedies:
    """Simulated changes that reduce a loss and the step time, and fit in memory where the unchanged step does."""
    changes = [
        (_loss_change(loss.loss, outcome), case, outcome)
        for case, outcome in report.simulated
        if outcome.fits_in_memory or not report.fits_in_memory
    ]
    threshold = MIN_RELATIVE_CHANGE * loss.seconds
    helpful = [change for change in changes if change[0] <= -threshold and change[2].is_faster]
    helpful.sort(key=lambda change: change[0])
    harmful = [change for change in changes if change[0] >= threshold and change[2].is_slower]
    most_sensitive = max(harmful, key=lambda change: change[0] / change[2].slowdown_seconds, default=None)
    addressing = [case for case in report.cases if loss.loss in case.addresses]
    return LossRemedies(
        tuple((case, outcome) for _, case, outcome in helpful),
        None if helpful or most_sensitive is None else most_sensitive[1:],
        tuple(case.description for case in addressing if case.outcome is not None),
        tuple(case for case in addressing if case.outcome is None),
    )


def _loss_change(loss: StepLoss, outcome: "WhatIfOutcome") -> Seconds:
    """Seconds by which the loss grows; for matmuls those of all matmuls, since another format moves the ideal, too."""
    ideal_change = outcome.ideal_change if loss is StepLoss.MATMULS else 0.0
    return outcome.loss_changes[loss] + ideal_change
