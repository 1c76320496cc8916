"""How long does this host need to launch a step's kernels?

Python, autograd and the hooks of data-parallel strategies, per launch of the scenario's forward and backward
(`calibrate.host`): eager, compiled, and captured in a CUDA graph.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from calibrate.kernels.progress import time_progress
from calibrate.stages.stage import CalibrationContext, no_scenario_reason
from calibrate.stages.stage_telemetry import record_telemetry
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class HostStage:
    """Host time per launch."""

    name: ClassVar[str] = "host"
    minutes: ClassVar[float] = 2.0
    min_seconds: ClassVar[Seconds] = 0.0

    def unavailable_reason(self, context: CalibrationContext) -> str:
        """Launches need the layers of a scenario."""
        return no_scenario_reason(context, "layers")

    def has_work(self, context: CalibrationContext) -> bool:
        """Whether no state was measured, or kernels of another scenario are requested."""
        return bool(context.new_kernels) or not context.current_record.host_launches

    def describe(self, context: CalibrationContext) -> str:
        """What is launched."""
        return f"launches of layers of {context.required_scenario.model.name} by this host, forward and backward"

    def measure(self, context: CalibrationContext, seconds: Seconds) -> str:
        """Measure one sample per state."""
        from calibrate.host.measure import measure_host_launches

        with time_progress(self.name, seconds), record_telemetry(context, self.name):
            samples = measure_host_launches(context.required_scenario, context.device, seconds)
        context.session.extend(replace(context.empty_record, host_launches=samples))
        return ", ".join(sample.mode.value for sample in samples) or "nothing"
