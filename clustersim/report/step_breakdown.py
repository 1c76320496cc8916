"""Where does the step time go?

Time categories of the mean rank, the critical path and the shown ranks, without rounding noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory
from clustersim.results.time_losses import COMPUTE_LOSSES, StepLosses

ROUNDING_TOLERANCE: Final = 1e-9
"""Rounding error of summed times, relative to the step time."""
IDEAL_LABEL: Final = "ideal: model FLOP at the peak"


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Seconds by time category; each row sums to the step time.

    mean_seconds: [categories] mean over ranks; critical_path_seconds: [categories]; row_seconds: [rows,
    categories] of the shown ranks; compute_parts: parts of the mean computation by name, which sum to it; empty: it is
    shown as one.
    """

    mean_seconds: FloatArray
    critical_path_seconds: FloatArray
    row_seconds: FloatArray
    compute_parts: Mapping[str, Seconds] = field(default_factory=dict)

    @property
    def step_seconds(self) -> Seconds:
        """Step time: the sum over all categories."""
        return float(self.mean_seconds.sum())

    @property
    def nonzero_categories(self) -> list[TimeCategory]:
        """Categories above rounding error in the mean, on a shown rank or on the critical path."""
        max_seconds = np.maximum(
            np.maximum(self.mean_seconds, self.critical_path_seconds), self.row_seconds.max(axis=0, initial=0.0)
        )
        return [
            category
            for category in TIME_CATEGORIES
            if max_seconds[category.index] > ROUNDING_TOLERANCE * self.step_seconds
        ]


def step_breakdown(result: SimulationResult, ranks: Sequence[int] = ()) -> StepBreakdown:
    """Breakdown of the mean over all ranks, of the critical path, and of the given ranks."""

    def clip_rounding(by_category: Mapping[str, Seconds]) -> FloatArray:
        seconds = np.array(list(by_category.values()))
        return np.where(np.abs(seconds) > ROUNDING_TOLERANCE * result.step_time, seconds, 0.0)

    row_seconds = np.array([clip_rounding(result.breakdown.rank_seconds(rank)) for rank in ranks]).reshape(
        len(ranks), len(TIME_CATEGORIES)
    )
    return StepBreakdown(
        clip_rounding(result.breakdown.mean_seconds()),
        clip_rounding(result.critical_path_breakdown),
        row_seconds,
        _compute_parts(result.losses),
    )


def _compute_parts(losses: StepLosses) -> dict[str, Seconds]:
    return {IDEAL_LABEL: losses.ideal} | {loss.value: losses.seconds[loss] for loss in COMPUTE_LOSSES}
