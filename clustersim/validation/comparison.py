"""What was measured, what was predicted, and how far are they apart?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PredictionInterval:
    """90 % prediction interval in the table's unit; strata: the groups of published steps that set its width."""

    low: float
    high: float
    strata: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CaseComparison:
    """Measurement and prediction of one case. measured, predicted: in the unit of its table (seconds, bytes).

    skip_reason: why there is no prediction, None if there is one; is_expressible: whether a scenario can
    express the case, so that it counts in the coverage; groupings: labels by which errors are grouped, such as
    `{"gpu": "a100-sxm-80gb", "recompute": "full"}`; fits_in_memory: whether the run is predicted to fit, None:
    unknown; interval: prediction interval, for steps only.
    """

    case_id: str
    source: str
    measured: float
    predicted: float | None = None
    skip_reason: str | None = None
    is_expressible: bool = True
    groupings: Mapping[str, str] = field(default_factory=dict)
    fits_in_memory: bool | None = None
    interval: PredictionInterval | None = None

    @property
    def error(self) -> float | None:
        """Relative error, predicted / measured - 1; None if the case was skipped."""
        return None if self.predicted is None else self.predicted / self.measured - 1.0

    @property
    def is_inside_interval(self) -> bool | None:
        """Whether the measurement lies in the prediction interval; None without one."""
        return None if self.interval is None else self.interval.low <= self.measured <= self.interval.high

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON data."""
        return {
            "case_id": self.case_id,
            "source": self.source,
            "measured": self.measured,
            "predicted": self.predicted,
            "error": self.error,
            "skipped_reason": self.skip_reason,
            "factors": dict(self.groupings),
            "fits": self.fits_in_memory,
            **({} if self.interval is None else self._interval_json(self.interval)),
        }

    def _interval_json(self, interval: PredictionInterval) -> dict[str, Any]:
        bounds = {"interval_low_s": interval.low, "interval_high_s": interval.high}
        return {**bounds, "inside_interval": self.is_inside_interval, "strata": list(interval.strata)}
