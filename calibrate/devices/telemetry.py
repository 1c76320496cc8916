"""What can be read from a GPU: its telemetry under load, its settings, its throttle reasons?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from clustersim.cost.calibration_record import DeviceTelemetry

_IDLE_BIT: Final = 0x1  # explains the low clock of an idle GPU, not that of a busy one
_REASON_BY_BIT: Final = {  # nvml.h: nvmlClocksEventReason..., formerly nvmlClocksThrottleReason...
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """Settings that do not change while measuring. mig: whether MIG mode is on; empty, 0 or None: unknown."""

    driver: str = ""
    power_limit_w: float = 0.0
    ecc: bool | None = None
    mig: bool | None = None


class GpuSensor(Protocol):
    """Reads the state of one GPU."""

    def read_telemetry(self) -> DeviceTelemetry:
        """Current telemetry."""

    def read_settings(self) -> GpuSettings:
        """Settings of the GPU."""


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Names of the throttle reasons in the driver's bit mask; unknown bits keep their hexadecimal value."""
    bits = [1 << bit_index for bit_index in range(mask.bit_length()) if mask >> bit_index & 1]
    return tuple(_REASON_BY_BIT.get(bit, hex(bit)) for bit in bits if bit != _IDLE_BIT)


def mean_telemetry(states: Sequence[DeviceTelemetry]) -> DeviceTelemetry | None:
    """Means over the samples that report anything, and all throttle reasons; None where none does."""
    reported = [state for state in states if state != DeviceTelemetry()]
    if not reported:
        return None
    return DeviceTelemetry(
        sm_clock_mhz=_mean_of_nonzero([state.sm_clock_mhz for state in reported]),
        memory_clock_mhz=_mean_of_nonzero([state.memory_clock_mhz for state in reported]),
        power_w=_mean_of_nonzero([state.power_w for state in reported]),
        temperature_c=_mean_of_nonzero([state.temperature_c for state in reported]),
        throttled=tuple(sorted({reason for state in reported for reason in state.throttled})),
    )


def _mean_of_nonzero(values: Sequence[float]) -> float:
    nonzero = [value for value in values if value]
    return sum(nonzero) / len(nonzero) if nonzero else 0.0
