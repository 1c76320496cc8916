"""What was measured, what was predicted, and how far are they apart?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PredictionInterval:
    """Between what and what a measurement is expected, in the unit of its table; regimes: what the width rests on."""

    low: float
    high: float
    strata: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CaseComparison:
    """One case. measured, predicted: in the unit of its table (seconds, bytes).

    skipped: why there is no prediction (None: there is one); expressible: whether a prediction was owed, since the case
    is of a kind that scenarios can say (a dense model in a number format that is modelled, all inputs stated);
    factors: by what errors are grouped, as in `{"gpu": "a100-sxm-80gb", "recompute": "full"}`; fits: whether the run is
    predicted to fit in memory, None: not known; band: of a step.
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
        """Predicted over measured, less one; None where the case was skipped."""
        return None if self.predicted is None else self.predicted / self.measured - 1.0

    @property
    def is_inside_interval(self) -> bool | None:
        """Whether what was measured lies in the band; None where there is none."""
        return None if self.interval is None else self.interval.low <= self.measured <= self.interval.high

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
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
        bounds = {"expected_low_s": interval.low, "expected_high_s": interval.high}
        return {**bounds, "inside_band": self.is_inside_interval, "regimes": list(interval.strata)}
