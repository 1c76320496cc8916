"""Where does the time of an answer go? Parts of its mean, its critical path and its shown ranks, without rounding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory

ROUNDING_TOLERANCE: Final = 1e-9
"""Part of the step time that sums of times are off by."""


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Seconds of parts, which sum to the step time.

    step: [parts] the mean over ranks; path: [parts] of the critical path; stages: [rows, parts]; ideal: seconds that
    the model's FLOP take at the peak, as in `ideal_seconds_of`.
    """

    mean_seconds: FloatArray
    critical_path_seconds: FloatArray
    row_seconds: FloatArray
    ideal_seconds: Seconds = 0.0

    @property
    def step_seconds(self) -> Seconds:
        """Of all parts together."""
        return float(self.mean_seconds.sum())

    @property
    def nonzero_categories(self) -> list[TimeCategory]:
        """The parts that are more than rounding, in the mean, on a stage or on the critical path."""
        max_seconds = np.maximum(
            np.maximum(self.mean_seconds, self.critical_path_seconds), self.row_seconds.max(axis=0, initial=0.0)
        )
        return [
            category
            for category in TIME_CATEGORIES
            if max_seconds[category.index] > ROUNDING_TOLERANCE * self.step_seconds
        ]


def step_breakdown(result: SimulationResult, ranks: Sequence[int] = ()) -> StepBreakdown:
    """The mean over all ranks, the critical path, and some ranks."""

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
        ideal_seconds_of(result),
    )


def ideal_seconds_of(result: SimulationResult) -> Seconds:
    """Seconds that the model's FLOP take at the peak; 0 where kernels are not longer, as they skip what is counted."""
    ideal_seconds, compute_seconds = (
        result.mfu() * result.step_time,
        result.breakdown.mean_seconds()[TimeCategory.COMPUTE.value],
    )
    return ideal_seconds if ideal_seconds < compute_seconds else 0.0
