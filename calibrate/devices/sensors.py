"""What does a GPU report while it works: clocks, power, temperature, throttle reasons?

Through NVML (`nvidia-ml-py`); through `nvidia-smi` where that library is missing; on ROCm by what PyTorch
reads from the driver. A GPU is identified by its UUID, which containers and CUDA_VISIBLE_DEVICES do not
change; a MIG instance has the clocks, power and temperature of its parent GPU. No sensor may stop or fail a
measurement: unknown values are left out, and a driver that times out is not queried again.
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

_TIMEOUT_SECONDS: Final = 20.0  # timeout of a driver call; nvidia-smi takes some seconds on an idle node
_MAX_AGE_SECONDS: Final = 10.0  # seconds for which a reading is reused, where reading takes tenths of a second

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class NullSensor:
    """A sensor that reports nothing."""

    def read_telemetry(self) -> DeviceTelemetry:
        """Empty telemetry."""
        return DeviceTelemetry()

    def read_settings(self) -> GpuSettings:
        """Empty settings."""
        return GpuSettings()


class TimeoutSensor:
    """A sensor that is read in another thread, and never again after a timeout."""

    def __init__(self, find_sensor: Callable[[], GpuSensor], timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self._timeout_seconds, self._timed_out = timeout_seconds, False
        null_sensor: GpuSensor = NullSensor()
        self._sensor = self._call_with_timeout(find_sensor, null_sensor)

    def read_telemetry(self) -> DeviceTelemetry:
        """Current telemetry, as far as known."""
        return self._call_with_timeout(lambda: self._sensor.read_telemetry(), DeviceTelemetry())

    def read_settings(self) -> GpuSettings:
        """Settings, as far as known."""
        return self._call_with_timeout(lambda: self._sensor.read_settings(), GpuSettings())

    def _call_with_timeout(self, read: Callable[[], ResultT], default: ResultT) -> ResultT:
        if self._timed_out:
            return default
        answers: SimpleQueue[ResultT] = SimpleQueue()

        def run_read() -> None:
            try:
                answers.put(read())
            except Exception:  # kernels can be measured whatever the driver's library raises
                answers.put(default)

        threading.Thread(target=run_read, daemon=True).start()
        try:
            return answers.get(timeout=self._timeout_seconds)
        except Empty:
            self._timed_out = True
            return default


class RateLimitedSensor:
    """A slow sensor, read again only when its last telemetry is too old."""

    def __init__(self, sensor: GpuSensor) -> None:
        self._sensor = sensor
        self._last: tuple[Seconds, DeviceTelemetry] | None = None

    def read_telemetry(self) -> DeviceTelemetry:
        """Current telemetry, or up to _MAX_AGE_SECONDS old."""
        if self._last is None or monotonic() - self._last[0] > _MAX_AGE_SECONDS:
            self._last = monotonic(), self._sensor.read_telemetry()
        return self._last[1]

    def read_settings(self) -> GpuSettings:
        """Settings of the GPU."""
        return self._sensor.read_settings()


@dataclass(frozen=True, slots=True)
class RocmSensor:
    """An AMD GPU, by its PyTorch index, read through amdsmi; all zero without the package or its permissions."""

    gpu_index: int

    def read_telemetry(self) -> DeviceTelemetry:
        """Current telemetry."""
        return DeviceTelemetry(
            sm_clock_mhz=self._read_or_zero(torch.cuda.clock_rate),
            power_w=self._read_or_zero(torch.cuda.power_draw),
            temperature_c=self._read_or_zero(torch.cuda.temperature),
        )

    def read_settings(self) -> GpuSettings:
        """Empty: PyTorch reads none of them."""
        return GpuSettings()

    def _read_or_zero(self, read: Callable[[int], float]) -> float:
        try:
            return float(read(self.gpu_index))
        except Exception:  # amdsmi's errors and a missing package have no common type
            return 0.0


@cache
def gpu_sensor(gpu_index: int) -> GpuSensor:
    """The sensor of the GPU with that PyTorch index."""
    if torch.version.hip is not None:
        return TimeoutSensor(lambda: RocmSensor(gpu_index))
    uuid = str(torch.cuda.get_device_properties(gpu_index).uuid)
    return TimeoutSensor(lambda: _nvidia_sensor(uuid))


def _nvidia_sensor(uuid: str) -> GpuSensor:
    smi_sensor = None if (nvml_sensor := nvml.find_sensor(uuid)) else nvidia_smi.find_sensor(uuid)
    return nvml_sensor or (NullSensor() if smi_sensor is None else RateLimitedSensor(smi_sensor))
