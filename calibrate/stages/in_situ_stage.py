"""What does a step do to kernels that take so long by themselves?

A real layer of the scenario's model runs forward and backward, and the profiler times its kernels one after the other
(`calibrate.in_situ`). What each family takes there, relative to its kernels alone, is a factor that `cost.in_step`
applies.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from calibrate.kernels.progress import time_progress
from calibrate.stages.stage import CalibrationContext, no_scenario_reason
from calibrate.stages.stage_telemetry import record_telemetry
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class InSituStage:
    """A layer's kernels, one after the other."""

    name: ClassVar[str] = "chain"
    minutes: ClassVar[float] = 5.0
    min_seconds: ClassVar[Seconds] = 3.0  # a turn of layers, and of their kernels alone

    def unavailable_reason(self, context: CalibrationContext) -> str:
        """A layer is some scenario's."""
        return no_scenario_reason(context, "layer")

    def has_work(self, context: CalibrationContext) -> bool:
        """Whether there are no factors, or kernels come whose families may have none."""
        return bool(context.new_kernels) or not context.current_record.chain

    def describe(self, context: CalibrationContext) -> str:
        """Which layer."""
        return f"a layer of {context.required_scenario.model.name}, forward and backward: kernels in a step, and alone"

    def measure(self, context: CalibrationContext, seconds: Seconds) -> str:
        """Factors by family."""
        from calibrate.in_situ.measure import measure_in_situ

        with time_progress(self.name, seconds), record_telemetry(context, self.name):
            samples = measure_in_situ(context.required_scenario, context.device, seconds)
        context.session.extend(replace(context.empty_record, chain=samples))
        return f"{len(samples)} families of kernels" if samples else "no factor"
