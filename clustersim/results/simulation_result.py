"""What does a simulation return? The simulated steps, their metrics, and both as plain data."""

from typing import Any

from clustersim.common.units import format_step_time
from clustersim.results.step_metrics import StepMetrics


class SimulationResult(StepMetrics):
    """Result of simulated training steps: data (`SimulatedStep`), metrics (`StepMetrics`), and JSON."""

    def __repr__(self) -> str:
        """A one-line summary: step time, MFU, whether it fits."""
        kind, fits = type(self).__name__, "fits" if self.fits_in_memory else "does not fit"
        utilization = f"{self.leading_mfu.name} {self.leading_mfu.value:.1%}"
        return f"<{kind} {self.scenario.name}: step {format_step_time(self.step_time)}, {utilization}, {fits}>"

    def to_json(self) -> dict[str, Any]:
        """The result as plain data: seconds, bytes, fractions."""
        from clustersim.results.result_json import result_to_json

        return result_to_json(self)
