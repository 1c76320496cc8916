"""What does a GPU say of itself while it works: clocks, power, temperature, and what keeps its clocks down?

Through the driver's library (NVML, by `nvidia-ml-py`); through `nvidia-smi` where that library is missing; on ROCm by
what PyTorch asks of the driver. A GPU is found by its UUID, which containers and CUDA_VISIBLE_DEVICES do not renumber;
a part of a GPU (MIG) has the clocks, power and temperature of the whole. None of these may stop or end measuring: what
is not known is left out, and a driver that does not answer in time is not asked again.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, Protocol, TypeVar

import torch

from clustersim.cost.record import UnderLoad
from clustersim.units import Seconds

_PATIENCE: Final = 20.0  # seconds that a driver may take; nvidia-smi takes some on a node that was idle
_SELDOM: Final = 10.0  # seconds for which an answer holds that itself takes tenths of a second
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

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while measuring. mig: whether the GPU is cut into parts; empty, 0 or None: not known."""

    driver: str = ""
    power_limit_w: float = 0.0
    ecc: bool | None = None
    mig: bool | None = None


class Sensor(Protocol):
    """What tells the state of one GPU."""

    def state(self) -> UnderLoad:
        """Now."""

    def facts(self) -> Facts:
        """What it is set to."""


@dataclass(frozen=True, slots=True)
class Mute:
    """Nothing here can tell."""

    def state(self) -> UnderLoad:
        """Not known."""
        return UnderLoad()

    def facts(self) -> Facts:
        """Not known."""
        return Facts()


class Patient:
    """A sensor that is asked in another thread, and no more once it has not answered in time."""

    def __init__(self, find: Callable[[], Sensor], patience: float = _PATIENCE) -> None:
        self._patience, self._gone = patience, False
        found: Sensor = self._ask(find, Mute())
        self._sensor = found

    def state(self) -> UnderLoad:
        """Now, as far as it is known."""
        return self._ask(lambda: self._sensor.state(), UnderLoad())

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
        self._last: tuple[Seconds, UnderLoad] | None = None

    def state(self) -> UnderLoad:
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

    def state(self) -> UnderLoad:
        """Now."""
        return UnderLoad(
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
    from calibrate.devices import nvml, smi

    slow = None if (fast := nvml.find(uuid)) else smi.find(uuid)
    return fast or (Mute() if slow is None else Seldom(slow))


def reasons(mask: int) -> tuple[str, ...]:
    """What keeps clocks down, by the driver's bits; one that is not known here keeps its number."""
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
    return tuple(_REASONS.get(bit, hex(bit)) for bit in bits if bit != _IDLE)


def mean(states: Sequence[UnderLoad]) -> UnderLoad | None:
    """Means of what was told, and all reasons; None where nothing was."""
    told = [state for state in states if state != UnderLoad()]
    if not told:
        return None
    return UnderLoad(
        sm_clock_mhz=_mean([state.sm_clock_mhz for state in told]),
        memory_clock_mhz=_mean([state.memory_clock_mhz for state in told]),
        power_w=_mean([state.power_w for state in told]),
        temperature_c=_mean([state.temperature_c for state in told]),
        throttled=tuple(sorted({reason for state in told for reason in state.throttled})),
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else 0.0
