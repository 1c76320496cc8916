"""What can be told of a GPU: its state under load, what it is set to, why its clocks are low?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from clustersim.cost.calibration_record import DeviceTelemetry

_IDLE_BIT: Final = 0x1  # a reason for a low clock, but not what keeps a GPU that works from a higher one
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
    """What does not change while measuring. mig: whether the GPU is cut into parts; empty, 0 or None: not known."""

    driver: str = ""
    power_limit_w: float = 0.0
    ecc: bool | None = None
    mig: bool | None = None


class GpuSensor(Protocol):
    """What tells the state of one GPU."""

    def read_telemetry(self) -> DeviceTelemetry:
        """Now."""

    def read_settings(self) -> GpuSettings:
        """What it is set to."""


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """What keeps clocks down, by the driver's bits; one that is not known here keeps its number."""
    bits = [1 << bit_index for bit_index in range(mask.bit_length()) if mask >> bit_index & 1]
    return tuple(_REASON_BY_BIT.get(bit, hex(bit)) for bit in bits if bit != _IDLE_BIT)


def mean_telemetry(states: Sequence[DeviceTelemetry]) -> DeviceTelemetry | None:
    """Means of what was told, and all reasons; None where nothing was."""
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
