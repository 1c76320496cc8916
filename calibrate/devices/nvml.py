"""What does NVML report about a GPU? Through `nvidia-ml-py` (the module `pynvml`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from calibrate.devices.telemetry import GpuSettings, throttle_reasons
from clustersim.cost.calibration_record import DeviceTelemetry

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class NvmlSensor:
    """A GPU. handle: NVML handle of the full GPU; is_full_gpu: False where a MIG instance is measured."""

    handle: Any
    is_full_gpu: bool

    def read_telemetry(self) -> DeviceTelemetry:
        """Current telemetry; 0 for values that this GPU or driver does not report."""
        import pynvml

        query = self._query
        mask = query(pynvml.nvmlDeviceGetCurrentClocksEventReasons, None)  # since driver 535
        if mask is None:
            mask = query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, 0)
        return DeviceTelemetry(
            sm_clock_mhz=float(query(pynvml.nvmlDeviceGetClockInfo, 0, pynvml.NVML_CLOCK_SM)),
            memory_clock_mhz=float(query(pynvml.nvmlDeviceGetClockInfo, 0, pynvml.NVML_CLOCK_MEM)),
            power_w=1e-3 * query(pynvml.nvmlDeviceGetPowerUsage, 0),
            temperature_c=float(query(pynvml.nvmlDeviceGetTemperature, 0, pynvml.NVML_TEMPERATURE_GPU)),
            throttled=throttle_reasons(mask),
        )

    def read_settings(self) -> GpuSettings:
        """Current settings, not those pending for the next reboot."""
        import pynvml

        ecc = self._query(pynvml.nvmlDeviceGetEccMode, None)
        mig = self._query(pynvml.nvmlDeviceGetMigMode, None)
        return GpuSettings(
            driver=_query_or_default(pynvml.nvmlSystemGetDriverVersion, ""),
            power_limit_w=1e-3 * self._query(pynvml.nvmlDeviceGetEnforcedPowerLimit, 0),
            ecc=None if ecc is None else bool(ecc[0]),
            mig=(None if mig is None else bool(mig[0])) if self.is_full_gpu else True,
        )

    def _query(self, function: Callable[..., ResultT], default: Any, *arguments: int) -> Any:
        return _query_or_default(function, default, self.handle, *arguments)


def find_sensor(uuid: str) -> NvmlSensor | None:
    """The sensor of the GPU with that UUID (without `GPU-` or `MIG-`).

    None where NVML is missing or does not know it.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or one of another version than the library
        return None
    handle = _query_or_default(pynvml.nvmlDeviceGetHandleByUUID, None, f"GPU-{uuid}")
    if handle is not None:
        return NvmlSensor(handle, is_full_gpu=True)
    mig_handle = _query_or_default(pynvml.nvmlDeviceGetHandleByUUID, None, f"MIG-{uuid}")
    parent = (
        None
        if mig_handle is None
        else _query_or_default(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, None, mig_handle)
    )
    return None if parent is None else NvmlSensor(parent, is_full_gpu=False)


def _query_or_default(function: Callable[..., ResultT], default: Any, *arguments: Any) -> Any:
    """The result of an NVML call; a default where this GPU, driver or user has none."""
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return default
