"""Does the record predict steps that were not used to build it?

Steps with a depth and a microbatch size that were not measured are predicted from the current record, fits
and factors included, and run (`calibrate.holdout`). Their errors are the record's holdout errors.
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
    """Real steps and their predictions."""

    name: ClassVar[str] = "holdout"
    minutes: ClassVar[float] = 3.0
    min_seconds: ClassVar[Seconds] = 0.0

    def unavailable_reason(self, context: CalibrationContext) -> str:
        """Steps need a scenario."""
        return no_scenario_reason(context, "steps")

    def has_work(self, context: CalibrationContext) -> bool:
        """Whether there are none; also after any new samples."""
        return bool(context.new_kernels) or not context.current_record.holdout_steps

    def describe(self, context: CalibrationContext) -> str:
        """Which steps are run."""
        return (
            f"steps of {context.required_scenario.model.name} with other layers and microbatches, compared with their "
            "prediction"
        )

    def measure(self, context: CalibrationContext, seconds: Seconds) -> str:
        """Measure steps and predict them."""
        from calibrate.holdout.measure import measure_holdout_steps

        with time_progress(self.name, seconds), record_telemetry(context, self.name):
            record = context.session.fit(lambda steps: fit_record(steps, context.accelerator))
            steps = measure_holdout_steps(context.required_scenario, context.device, record, seconds)
        context.session.set_steps(steps)
        return ", ".join(f"{step.description} {step.error:+.1%}" for step in steps) or "no step"
