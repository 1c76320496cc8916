"""What does a GPU say of itself while it works: clocks, power, temperature, and what keeps its clocks down?

Through the driver's library (NVML, by `nvidia-ml-py`); through `nvidia-smi` where that library is missing; on ROCm by
what PyTorch asks of the driver. A GPU is found by its UUID, which containers and CUDA_VISIBLE_DEVICES do not renumber;
a part of a GPU (MIG) has the clocks, power and temperature of the whole. None of these may stop or end measuring: what
is not known is left out, and a driver that does not answer in time is not asked again.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, TypeVar

import torch

from calibrate.devices import nvidia_smi, nvml
from calibrate.devices.telemetry import Facts, Sensor
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import DeviceTelemetry

_PATIENCE: Final = 20.0  # seconds that a driver may take; nvidia-smi takes some on a node that was idle
_SELDOM: Final = 10.0  # seconds for which an answer holds that itself takes tenths of a second

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Mute:
    """Nothing here can tell."""

    def state(self) -> DeviceTelemetry:
        """Not known."""
        return DeviceTelemetry()

    def facts(self) -> Facts:
        """Not known."""
        return Facts()


class Patient:
    """A sensor that is asked in another thread, and no more once it has not answered in time."""

    def __init__(self, find: Callable[[], Sensor], patience: float = _PATIENCE) -> None:
        self._patience, self._gone = patience, False
        nothing: Sensor = Mute()
        self._sensor = self._ask(find, nothing)

    def state(self) -> DeviceTelemetry:
        """Now, as far as it is known."""
        return self._ask(lambda: self._sensor.state(), DeviceTelemetry())

    def facts(self) -> Facts:
        """What it is set to, as far as it is known."""
        return self._ask(lambda: self._sensor.facts(), Facts())

    def _ask(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        if self._gone:
            return otherwise
        answers: SimpleQueue[Answer] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(question())
            except Exception:  # whatever a driver's library raises, kernels can be measured
                answers.put(otherwise)

        threading.Thread(target=ask, daemon=True).start()
        try:
            return answers.get(timeout=self._patience)
        except Empty:
            self._gone = True
            return otherwise


class Seldom:
    """A sensor that takes long to answer, asked again only when its last answer is old."""

    def __init__(self, sensor: Sensor) -> None:
        self._sensor = sensor
        self._last: tuple[Seconds, DeviceTelemetry] | None = None

    def state(self) -> DeviceTelemetry:
        """Now, or a little ago."""
        if self._last is None or monotonic() - self._last[0] > _SELDOM:
            self._last = monotonic(), self._sensor.state()
        return self._last[1]

    def facts(self) -> Facts:
        """What it is set to."""
        return self._sensor.facts()


@dataclass(frozen=True, slots=True)
class Rocm:
    """An AMD GPU, by its number, as PyTorch asks amdsmi; without the package or its rights there is no answer."""

    number: int

    def state(self) -> DeviceTelemetry:
        """Now."""
        return DeviceTelemetry(
            sm_clock_mhz=self._told(torch.cuda.clock_rate),
            power_w=self._told(torch.cuda.power_draw),
            temperature_c=self._told(torch.cuda.temperature),
        )

    def facts(self) -> Facts:
        """PyTorch asks for none of them."""
        return Facts()

    def _told(self, ask: Callable[[int], float]) -> float:
        try:
            return float(ask(self.number))
        except Exception:  # amdsmi's own errors have no common type with a missing package
            return 0.0


@cache
def sensor_of(number: int) -> Sensor:
    """What tells the state of the GPU of that number in PyTorch."""
    if torch.version.hip is not None:
        return Patient(lambda: Rocm(number))
    uuid = str(torch.cuda.get_device_properties(number).uuid)
    return Patient(lambda: _nvidia(uuid))


def _nvidia(uuid: str) -> Sensor:
    slow = None if (fast := nvml.find(uuid)) else nvidia_smi.find(uuid)
    return fast or (Mute() if slow is None else Seldom(slow))
