"""Which published run is most like a scenario? The answer, to be filled in by who knows them (`validation_page`)."""

from dataclasses import dataclass

from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class NearestRun:
    """A published run beside its prediction.

    source: who published it, locator: where; words: what was run; differs: in what it is unlike the scenario, what
    matters most first; measured, predicted: seconds of a step; predicted is None where simulating it takes too long.
    """

    source: str
    locator: str
    description: str
    differences: tuple[str, ...]
    measured_step_time: Seconds
    predicted_step_time: Seconds | None

    @property
    def relative_error(self) -> float | None:
        """Predicted over measured, less one; None where it was not predicted."""
        return None if self.predicted_step_time is None else self.predicted_step_time / self.measured_step_time - 1.0
