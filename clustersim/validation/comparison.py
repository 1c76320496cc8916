"""What was measured, what was predicted, and how far are they apart?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Band:
    """Between what and what a measurement is expected, in the unit of its table; regimes: what the width rests on."""

    low: float
    high: float
    regimes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
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
    skipped: str | None = None
    expressible: bool = True
    factors: Mapping[str, str] = field(default_factory=dict)
    fits: bool | None = None
    band: Band | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; None where the case was skipped."""
        return None if self.predicted is None else self.predicted / self.measured - 1.0

    @property
    def inside(self) -> bool | None:
        """Whether what was measured lies in the band; None where there is none."""
        return None if self.band is None else self.band.low <= self.measured <= self.band.high

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {
            "case_id": self.case_id,
            "source": self.source,
            "measured": self.measured,
            "predicted": self.predicted,
            "error": self.error,
            "skipped_reason": self.skipped,
            "factors": dict(self.factors),
            "fits": self.fits,
            **({} if self.band is None else self._band(self.band)),
        }

    def _band(self, band: Band) -> dict[str, Any]:
        ends = {"expected_low_s": band.low, "expected_high_s": band.high}
        return {**ends, "inside_band": self.inside, "regimes": list(band.regimes)}
