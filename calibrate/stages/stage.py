"""What is a stage of a calibration session?

One group of measurements (burn-in, single kernels, in-situ kernels, host launches, holdout steps), with its
share of the budget in minutes of a twenty-minute session. A stage adds its samples to the session's record,
which is written when the stage has finished; it derives from the record whether anything is left to measure,
so that a restarted session does only that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import ClassVar, Protocol

from calibrate.devices.device import TorchDevice
from calibrate.kernels.session import KernelSession
from calibrate.kernels.timing import MeasurementMethod
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CalibrationRecord, signature_of
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import Kernel
from clustersim.scenario import Scenario


@dataclass(frozen=True)
class CalibrationContext:
    """What is measured, on which device, and into which record.

    accelerator: its constants are the initial values of fits; requested_kernels: each signature once; scenario:
    its layers and steps are run, None: only kernels were requested; request_label: the request as text;
    start_time: origin of telemetry times.
    """

    device: TorchDevice
    accelerator: Accelerator
    session: KernelSession
    method: MeasurementMethod
    requested_kernels: Sequence[Kernel]
    request_label: str
    scenario: Scenario | None = None
    start_time: Seconds = field(default_factory=lambda: monotonic())

    @property
    def is_cpu(self) -> bool:
        """Whether the device is the host's CPU."""
        return self.device.torch.type == "cpu"

    @property
    def current_record(self) -> CalibrationRecord:
        """The record with all samples so far."""
        return self.session.merged_record()

    @property
    def empty_record(self) -> CalibrationRecord:
        """A record of this device without samples."""
        return CalibrationRecord(self.current_record.device, self.current_record.conditions)

    @property
    def required_scenario(self) -> Scenario:
        """The scenario, for stages that need one; raises ValueError without."""
        if self.scenario is None:
            raise ValueError("a part that has an obstacle is not measured")
        return self.scenario

    @cached_property
    def new_kernels(self) -> Sequence[Kernel]:
        """Kernels without a sample when the session began. Kernels that failed before are retried, but are not new."""
        measured = {sample.signature for sample in self.current_record.kernels}
        return [kernel for kernel in self.requested_kernels if signature_of(kernel) not in measured]


class CalibrationStage(Protocol):
    """A stage; it adds its samples to the context's session."""

    name: ClassVar[str]
    minutes: ClassVar[float]
    """Budget share, in minutes of a twenty-minute session in which all stages run."""
    min_seconds: ClassVar[Seconds]
    """The shortest time that gives any result."""

    def unavailable_reason(self, context: CalibrationContext) -> str:
        """Why the stage cannot run here; empty where it can."""

    def has_work(self, context: CalibrationContext) -> bool:
        """Whether anything is left to measure."""

    def describe(self, context: CalibrationContext) -> str:
        """What the stage will do, as text."""

    def measure(self, context: CalibrationContext, seconds: Seconds) -> str:
        """Measure for at most `seconds`; returns a summary of the results."""


def no_scenario_reason(context: CalibrationContext, subject: str) -> str:
    """The reason why a stage that runs a scenario's model is unavailable; empty with a scenario."""
    return "" if context.scenario else f"{subject} of which model? name a scenario with --for"
