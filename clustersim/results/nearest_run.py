"""The published run most similar to a scenario; filled in by `validation_page`."""

from dataclasses import dataclass

from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class NearestRun:
    """A published run and its prediction.

    source: who published it, locator: where; description: what was run; differences: from the scenario, most
    important first; measured_step_time, predicted_step_time: seconds; predicted is None where simulating it
    takes too long.
    """

    source: str
    locator: str
    description: str
    differences: tuple[str, ...]
    measured_step_time: Seconds
    predicted_step_time: Seconds | None

    @property
    def relative_error(self) -> float | None:
        """Predicted over measured, minus one; None where it was not predicted."""
        return None if self.predicted_step_time is None else self.predicted_step_time / self.measured_step_time - 1.0
