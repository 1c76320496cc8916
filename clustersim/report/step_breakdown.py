"""Where does the time of an answer go? Parts of its mean, its critical path and its shown ranks, without rounding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import PARTS, Part

ROUNDING: Final = 1e-9
"""Part of the step time that sums of times are off by."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of parts, which sum to the step time.

    step: [parts] the mean over ranks; path: [parts] of the critical path; stages: [rows, parts]; ideal: seconds that
    the model's FLOP take at the peak, as in `ideal_of`.
    """

    step: FloatArray
    path: FloatArray
    stages: FloatArray
    ideal: Seconds = 0.0

    @property
    def whole(self) -> Seconds:
        """Of all parts together."""
        return float(self.step.sum())

    @property
    def present(self) -> list[Part]:
        """The parts that are more than rounding, in the mean, on a stage or on the critical path."""
        most = np.maximum(np.maximum(self.step, self.path), self.stages.max(axis=0, initial=0.0))
        return [part for part in PARTS if most[part.place] > ROUNDING * self.whole]


def times_of(result: SimulationResult, ranks: Sequence[int] = ()) -> Times:
    """The mean over all ranks, the critical path, and some ranks."""

    def settled(parts: Mapping[str, Seconds]) -> FloatArray:
        seconds = np.array(list(parts.values()))
        return np.where(np.abs(seconds) > ROUNDING * result.step_time, seconds, 0.0)

    stages = np.array([settled(result.breakdown.of(rank)) for rank in ranks]).reshape(len(ranks), len(PARTS))
    return Times(settled(result.breakdown.mean()), settled(result.critical_path_breakdown), stages, ideal_of(result))


def ideal_of(result: SimulationResult) -> Seconds:
    """Seconds that the model's FLOP take at the peak; 0 where kernels are not longer, as they skip what is counted."""
    ideal, compute = result.mfu() * result.step_time, result.breakdown.mean()[Part.COMPUTE.value]
    return ideal if ideal < compute else 0.0
