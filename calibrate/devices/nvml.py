"""What does the driver's library say of a GPU? NVML, through `nvidia-ml-py` (the module `pynvml`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from calibrate.devices.telemetry import Facts, reasons
from clustersim.cost.calibration_record import DeviceTelemetry

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Nvml:
    """A GPU. handle: NVML's of the whole of it; whole: what is measured is not a part of it (MIG)."""

    handle: Any
    whole: bool

    def state(self) -> DeviceTelemetry:
        """Now; 0 for what this GPU or driver does not tell."""
        import pynvml

        told = self._told
        mask = told(pynvml.nvmlDeviceGetCurrentClocksEventReasons, None)  # since driver 535
        if mask is None:
            mask = told(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, 0)
        return DeviceTelemetry(
            sm_clock_mhz=float(told(pynvml.nvmlDeviceGetClockInfo, 0, pynvml.NVML_CLOCK_SM)),
            memory_clock_mhz=float(told(pynvml.nvmlDeviceGetClockInfo, 0, pynvml.NVML_CLOCK_MEM)),
            power_w=1e-3 * told(pynvml.nvmlDeviceGetPowerUsage, 0),
            temperature_c=float(told(pynvml.nvmlDeviceGetTemperature, 0, pynvml.NVML_TEMPERATURE_GPU)),
            throttled=reasons(mask),
        )

    def facts(self) -> Facts:
        """What it is set to: current modes, not those after the next reboot."""
        import pynvml

        ecc = self._told(pynvml.nvmlDeviceGetEccMode, None)
        mig = self._told(pynvml.nvmlDeviceGetMigMode, None)
        return Facts(
            driver=_told(pynvml.nvmlSystemGetDriverVersion, ""),
            power_limit_w=1e-3 * self._told(pynvml.nvmlDeviceGetEnforcedPowerLimit, 0),
            ecc=None if ecc is None else bool(ecc[0]),
            mig=(None if mig is None else bool(mig[0])) if self.whole else True,
        )

    def _told(self, ask: Callable[..., Answer], otherwise: Any, *more: int) -> Any:
        return _told(ask, otherwise, self.handle, *more)


def find(uuid: str) -> Nvml | None:
    """The GPU of that UUID (without `GPU-` or `MIG-`); None where the library is missing or does not know it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or one of another version than its library
        return None
    whole = _told(pynvml.nvmlDeviceGetHandleByUUID, None, f"GPU-{uuid}")
    if whole is not None:
        return Nvml(whole, whole=True)
    part = _told(pynvml.nvmlDeviceGetHandleByUUID, None, f"MIG-{uuid}")
    parent = None if part is None else _told(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, None, part)
    return None if parent is None else Nvml(parent, whole=False)


def _told(ask: Callable[..., Answer], otherwise: Any, *given: Any) -> Any:
    """An answer; something else where this GPU, driver or user has none."""
    import pynvml

    try:
        return ask(*given)
    except pynvml.NVMLError:
        return otherwise
