"""At which clock does the device work for hours, not only for the first seconds?

A GPU starts at its boost clock and slows down to what its power limit and cooling allow. So it is loaded
until clock and power are steady (`devices.burn_in`) before anything else is measured: it cools between
sessions.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from calibrate.devices.burn_in import burn_in
from calibrate.kernels.progress import time_progress
from calibrate.report.format import describe_telemetry
from calibrate.stages.stage import CalibrationContext, CalibrationStage
from clustersim.common.units import Seconds

MIN_BURN_IN_SECONDS: Final = 20.0  # seconds: two windows of 10 s, between which drift is measured


@dataclass(frozen=True, slots=True)
class BurnInStage:
    """Loads the device until it is steady, before other stages."""

    dependent_stages: tuple[CalibrationStage, ...]

    name: ClassVar[str] = "burn_in"
    minutes: ClassVar[float] = 2.0
    min_seconds: ClassVar[Seconds] = MIN_BURN_IN_SECONDS

    def unavailable_reason(self, context: CalibrationContext) -> str:
        """A CPU's clock does not drift over minutes."""
        return "a CPU needs none" if context.is_cpu else ""

    def has_work(self, context: CalibrationContext) -> bool:
        """Whether any later stage has work: the device has cooled since it was last busy."""
        return any(stage.has_work(context) and not stage.unavailable_reason(context) for stage in self.dependent_stages)

    def describe(self, context: CalibrationContext) -> str:  # noqa: ARG002 - the same on every GPU
        """What the stage does; the same on every GPU."""
        return "keeps the GPU busy until its clock no longer falls"

    def measure(self, context: CalibrationContext, seconds: Seconds) -> str:
        """Keep the device busy; returns the clock that it reached."""
        with time_progress(self.name, seconds) as notify:
            samples = burn_in(context.device, seconds, notify)
        context.session.add_telemetry(samples)
        return describe_telemetry(samples[-1].state) if samples else "the device does not say its clocks"
