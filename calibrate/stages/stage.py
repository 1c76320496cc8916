"""What is a part of a session of measuring?

One question to the machine (how fast under load, each kernel, kernels in a chain, the host, is it true), with the
minutes of a session of twenty that it has. A part adds its rows to the session's record, which is written when the
part is done; it knows from the record whether anything is left to do, so that a session that is started again does
only that.
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
    """What is measured, on what, and into which record.

    accelerator: from whose constants fits start; asked: kernels, each signature once; scenario: whose layer and steps
    are run, None: kernels alone were asked for; wished: what was asked for, in words; began: from when moments count.
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
        """Whether the device is the host's own processor."""
        return self.device.torch.type == "cpu"

    @property
    def current_record(self) -> CalibrationRecord:
        """All rows so far."""
        return self.session.merged_record()

    @property
    def empty_record(self) -> CalibrationRecord:
        """A record of this device, to be filled with new rows."""
        return CalibrationRecord(self.current_record.device, self.current_record.conditions)

    @property
    def required_scenario(self) -> Scenario:
        """The scenario of parts that need one."""
        if self.scenario is None:
            raise ValueError("a part that has an obstacle is not measured")
        return self.scenario

    @cached_property
    def new_kernels(self) -> Sequence[Kernel]:
        """Kernels of which there was no row when the session began; those that failed are tried again, and no news."""
        measured = {sample.signature for sample in self.current_record.kernels}
        return [kernel for kernel in self.requested_kernels if signature_of(kernel) not in measured]


class CalibrationStage(Protocol):
    """A part; it adds its rows to the bench's session."""

    name: ClassVar[str]
    minutes: ClassVar[float]
    """Of a session of twenty in which all parts are measured."""
    min_seconds: ClassVar[Seconds]
    """The shortest time in which it says anything."""

    def unavailable_reason(self, context: CalibrationContext) -> str:
        """Why it cannot be measured here; empty where it can."""

    def has_work(self, context: CalibrationContext) -> bool:
        """Whether there is anything left to measure."""

    def describe(self, context: CalibrationContext) -> str:
        """What it will do."""

    def measure(self, context: CalibrationContext, seconds: Seconds) -> str:
        """Measure for so long at most; what was found."""


def no_scenario_reason(context: CalibrationContext, subject: str) -> str:
    """The obstacle of a part that runs a scenario's model."""
    return "" if context.scenario else f"{subject} of which model? name a scenario with --for"
