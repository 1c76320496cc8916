"""Does the record predict steps for which it was not measured?

A depth and a microbatch that were not used are predicted from the record as it is now, fits and factors included, and
run (`calibrate.holdout`). How far they are apart is the record's band.
"""

from dataclasses import dataclass
from typing import ClassVar

from calibrate.fit.record_fit import fit_record
from calibrate.kernels.progress import time_progress
from calibrate.stages.stage import CalibrationContext, no_scenario_reason
from calibrate.stages.stage_telemetry import record_telemetry
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class HoldoutStage:
    """Real steps beside their prediction."""

    name: ClassVar[str] = "residual"
    minutes: ClassVar[float] = 3.0
    min_seconds: ClassVar[Seconds] = 0.0

    def unavailable_reason(self, context: CalibrationContext) -> str:
        """Steps are some scenario's."""
        return no_scenario_reason(context, "steps")

    def has_work(self, context: CalibrationContext) -> bool:
        """Whether there are none, as when any row came since."""
        return bool(context.new_kernels) or not context.current_record.steps

    def describe(self, context: CalibrationContext) -> str:
        """Which steps."""
        return f"steps of {context.required_scenario.model.name} with other layers and microbatches, beside their prediction"

    def measure(self, context: CalibrationContext, seconds: Seconds) -> str:
        """Predicted and measured steps."""
        from calibrate.holdout.measure import measure_holdout_steps

        with time_progress(self.name, seconds), record_telemetry(context, self.name):
            record = context.session.fit(lambda steps: fit_record(steps, context.accelerator))
            steps = measure_holdout_steps(context.required_scenario, context.device, record, seconds)
        context.session.set_steps(steps)
        return ", ".join(f"{step.what} {step.error:+.1%}" for step in steps) or "no step"
