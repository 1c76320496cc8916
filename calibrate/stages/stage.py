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
from calibrate.kernels.session import Session
from calibrate.kernels.timing import Method
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CalibrationRecord, signature_of
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import Kernel
from clustersim.scenario import Scenario


@dataclass(frozen=True)
class Bench:
    """What is measured, on what, and into which record.

    accelerator: from whose constants fits start; asked: kernels, each signature once; scenario: whose layer and steps
    are run, None: kernels alone were asked for; wished: what was asked for, in words; began: from when moments count.
    """

    device: TorchDevice
    accelerator: Accelerator
    session: Session
    method: Method
    asked: Sequence[Kernel]
    wished: str
    scenario: Scenario | None = None
    began: Seconds = field(default_factory=lambda: monotonic())

    @property
    def is_cpu(self) -> bool:
        """Whether the device is the host's own processor."""
        return self.device.torch.type == "cpu"

    @property
    def record(self) -> CalibrationRecord:
        """All rows so far."""
        return self.session.gathered()

    @property
    def empty(self) -> CalibrationRecord:
        """A record of this device, to be filled with new rows."""
        return CalibrationRecord(self.record.device, self.record.conditions)

    @property
    def plan(self) -> Scenario:
        """The scenario of parts that need one."""
        if self.scenario is None:
            raise ValueError("a part that has an obstacle is not measured")
        return self.scenario

    @cached_property
    def new(self) -> Sequence[Kernel]:
        """Kernels of which there was no row when the session began; those that failed are tried again, and no news."""
        known = {row.signature for row in self.record.kernels}
        return [kernel for kernel in self.asked if signature_of(kernel) not in known]


class Part(Protocol):
    """A part; it adds its rows to the bench's session."""

    name: ClassVar[str]
    minutes: ClassVar[float]
    """Of a session of twenty in which all parts are measured."""
    least: ClassVar[Seconds]
    """The shortest time in which it says anything."""

    def obstacle(self, bench: Bench) -> str:
        """Why it cannot be measured here; empty where it can."""

    def due(self, bench: Bench) -> bool:
        """Whether there is anything left to measure."""

    def words(self, bench: Bench) -> str:
        """What it will do."""

    def measure(self, bench: Bench, seconds: Seconds) -> str:
        """Measure for so long at most; what was found."""


def no_scenario(bench: Bench, what: str) -> str:
    """The obstacle of a part that runs a scenario's model."""
    return "" if bench.scenario else f"{what} of which model? name a scenario with --for"
