"""What can be told of a GPU: its state under load, what it is set to, why its clocks are low?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from clustersim.cost.calibration_record import DeviceTelemetry

_IDLE: Final = 0x1  # a reason for a low clock, but not what keeps a GPU that works from a higher one
_REASONS: Final = {  # nvml.h: nvmlClocksEventReason..., formerly nvmlClocksThrottleReason...
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
class Facts:
    """What does not change while measuring. mig: whether the GPU is cut into parts; empty, 0 or None: not known."""

    driver: str = ""
    power_limit_w: float = 0.0
    ecc: bool | None = None
    mig: bool | None = None


class Sensor(Protocol):
    """What tells the state of one GPU."""

    def state(self) -> DeviceTelemetry:
        """Now."""

    def facts(self) -> Facts:
        """What it is set to."""


def reasons(mask: int) -> tuple[str, ...]:
    """What keeps clocks down, by the driver's bits; one that is not known here keeps its number."""
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
    return tuple(_REASONS.get(bit, hex(bit)) for bit in bits if bit != _IDLE)


def mean(states: Sequence[DeviceTelemetry]) -> DeviceTelemetry | None:
    """Means of what was told, and all reasons; None where nothing was."""
    told = [state for state in states if state != DeviceTelemetry()]
    if not told:
        return None
    return DeviceTelemetry(
        sm_clock_mhz=_mean([state.sm_clock_mhz for state in told]),
        memory_clock_mhz=_mean([state.memory_clock_mhz for state in told]),
        power_w=_mean([state.power_w for state in told]),
        temperature_c=_mean([state.temperature_c for state in told]),
        throttled=tuple(sorted({reason for state in told for reason in state.throttled})),
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else 0.0
