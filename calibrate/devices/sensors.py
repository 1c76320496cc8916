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
from calibrate.devices.telemetry import GpuSensor, GpuSettings
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import DeviceTelemetry

_TIMEOUT_SECONDS: Final = 20.0  # seconds that a driver may take; nvidia-smi takes some on a node that was idle
_MAX_AGE_SECONDS: Final = 10.0  # seconds for which an answer holds that itself takes tenths of a second

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class NullSensor:
    """Nothing here can tell."""

    def read_telemetry(self) -> DeviceTelemetry:
        """Not known."""
        return DeviceTelemetry()

    def read_settings(self) -> GpuSettings:
        """Not known."""
        return GpuSettings()


class TimeoutSensor:
    """A sensor that is asked in another thread, and no more once it has not answered in time."""

    def __init__(self, find_sensor: Callable[[], GpuSensor], timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self._timeout_seconds, self._timed_out = timeout_seconds, False
        null_sensor: GpuSensor = NullSensor()
        self._sensor = self._call_with_timeout(find_sensor, null_sensor)

    def read_telemetry(self) -> DeviceTelemetry:
        """Now, as far as it is known."""
        return self._call_with_timeout(lambda: self._sensor.read_telemetry(), DeviceTelemetry())

    def read_settings(self) -> GpuSettings:
        """What it is set to, as far as it is known."""
        return self._call_with_timeout(lambda: self._sensor.read_settings(), GpuSettings())

    def _call_with_timeout(self, read: Callable[[], ResultT], default: ResultT) -> ResultT:
        if self._timed_out:
            return default
        answers: SimpleQueue[ResultT] = SimpleQueue()

        def run_read() -> None:
            try:
                answers.put(read())
            except Exception:  # whatever a driver's library raises, kernels can be measured
                answers.put(default)

        threading.Thread(target=run_read, daemon=True).start()
        try:
            return answers.get(timeout=self._timeout_seconds)
        except Empty:
            self._timed_out = True
            return default


class RateLimitedSensor:
    """A sensor that takes long to answer, asked again only when its last answer is old."""

    def __init__(self, sensor: GpuSensor) -> None:
        self._sensor = sensor
        self._last: tuple[Seconds, DeviceTelemetry] | None = None

    def read_telemetry(self) -> DeviceTelemetry:
        """Now, or a little ago."""
        if self._last is None or monotonic() - self._last[0] > _MAX_AGE_SECONDS:
            self._last = monotonic(), self._sensor.read_telemetry()
        return self._last[1]

    def read_settings(self) -> GpuSettings:
        """What it is set to."""
        return self._sensor.read_settings()


@dataclass(frozen=True, slots=True)
class RocmSensor:
    """An AMD GPU, by its number, as PyTorch asks amdsmi; without the package or its rights there is no answer."""

    gpu_index: int

    def read_telemetry(self) -> DeviceTelemetry:
        """Now."""
        return DeviceTelemetry(
            sm_clock_mhz=self._read_or_zero(torch.cuda.clock_rate),
            power_w=self._read_or_zero(torch.cuda.power_draw),
            temperature_c=self._read_or_zero(torch.cuda.temperature),
        )

    def read_settings(self) -> GpuSettings:
        """PyTorch asks for none of them."""
        return GpuSettings()

    def _read_or_zero(self, read: Callable[[int], float]) -> float:
        try:
            return float(read(self.gpu_index))
        except Exception:  # amdsmi's own errors have no common type with a missing package
            return 0.0


@cache
def gpu_sensor(gpu_index: int) -> GpuSensor:
    """What tells the state of the GPU of that number in PyTorch."""
    if torch.version.hip is not None:
        return TimeoutSensor(lambda: RocmSensor(gpu_index))
    uuid = str(torch.cuda.get_device_properties(gpu_index).uuid)
    return TimeoutSensor(lambda: _nvidia_sensor(uuid))


def _nvidia_sensor(uuid: str) -> GpuSensor:
    smi_sensor = None if (nvml_sensor := nvml.find_sensor(uuid)) else nvidia_smi.find_sensor(uuid)
    return nvml_sensor or (NullSensor() if smi_sensor is None else RateLimitedSensor(smi_sensor))
