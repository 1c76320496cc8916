"""How much does a step change the time of kernels relative to isolated ones?

A real layer of the scenario's model runs forward and backward, and the profiler times its kernels
(`calibrate.in_situ`). The ratio of each kernel family to its isolated kernels is a correction factor that
`cost.in_situ` applies.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from calibrate.kernels.progress import time_progress
from calibrate.stages.stage import CalibrationContext, no_scenario_reason
from calibrate.stages.stage_telemetry import record_telemetry
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class InSituStage:
    """A layer's kernels measured in a real step."""

    name: ClassVar[str] = "in_situ"
    minutes: ClassVar[float] = 5.0
    min_seconds: ClassVar[Seconds] = 3.0  # one round of layers, and of their isolated kernels

    def unavailable_reason(self, context: CalibrationContext) -> str:
        """A layer needs a scenario."""
        return no_scenario_reason(context, "layer")

    def has_work(self, context: CalibrationContext) -> bool:
        """Whether there are no factors, or new kernels are requested whose families may have none."""
        return bool(context.new_kernels) or not context.current_record.in_situ

    def describe(self, context: CalibrationContext) -> str:
        """Which layer is run."""
        return f"a layer of {context.required_scenario.model.name}, forward and backward: kernels in situ, and isolated"

    def measure(self, context: CalibrationContext, seconds: Seconds) -> str:
        """Measure the in-situ factors by family."""
        from calibrate.in_situ.measure import measure_in_situ

        with time_progress(self.name, seconds), record_telemetry(context, self.name):
            samples = measure_in_situ(context.required_scenario, context.device, seconds)
        context.session.extend(replace(context.empty_record, in_situ=samples))
        return f"{len(samples)} families of kernels" if samples else "no factor"
