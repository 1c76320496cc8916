"""When is a device as warm as in a step that runs for hours?

It computes the products of `filler` until its SM clock drifts less than 1 % over 10 s (the mean of the last third of
them over that of the first; one look differs from the next by a step of the clock, which is as much as that), or until
the time that was given is up. Where no driver tells the clock, the pace of the products stands for it: they are bound
by the SMs. A GPU begins at its boost clock, meets its power limit within a second, its temperature in a minute or two.
A device without a filler (a CPU, see there) is looked at once.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

from calibrate.devices.device import TorchDevice
from calibrate.devices.load_generator import Filler
from clustersim.common.units import Seconds, format_seconds
from clustersim.cost.calibration_record import DeviceTelemetry, TelemetrySample

PART: Final = "soak"
_LOOKS: Final = 0.5  # seconds between two
_WINDOW: Final = 10.0
_DRIFT: Final = 0.01

Pace = tuple[Seconds, float]
"""When, and how fast then: the SM clock, or products per second."""


def soak(device: TorchDevice, seconds: Seconds, say: Callable[[str], None]) -> tuple[TelemetrySample, ...]:
    """Warm a device for so long at most; what it was like meanwhile. say: is told how it ended."""
    began, filler = perf_counter(), device.filler()
    if filler is None:
        return (TelemetrySample(0.0, PART, device.state()),)
    moments: list[TelemetrySample] = []
    paces: list[Pace] = []
    while (drift := _drift(paces)) is None or abs(drift) >= _DRIFT:
        if perf_counter() - began >= seconds:
            break
        moments.append(_look(device, filler, began))
        paces.append((moments[-1].seconds, moments[-1].state.sm_clock_mhz or 1.0 / filler.seconds))
    say(_told(paces, drift))
    return tuple(moments)


def _look(device: TorchDevice, filler: Filler, began: Seconds) -> TelemetrySample:
    """Some products, and the device as it was on average while they ran: a driver takes longer than what is ahead."""
    with device.watched() as seen:
        filler.run(_LOOKS)
    return TelemetrySample(perf_counter() - began, PART, seen.under or DeviceTelemetry())


def _drift(paces: Sequence[Pace]) -> float | None:
    """By which part the pace changed over the window; None before there was one."""
    if not paces or paces[-1][0] - paces[0][0] < _WINDOW:
        return None
    end = paces[-1][0]
    window = [(end - moment, pace) for moment, pace in paces if end - moment <= _WINDOW]
    first = [pace for ago, pace in window if ago >= _WINDOW * 2 / 3]
    last = [pace for ago, pace in window if ago <= _WINDOW / 3]
    return (sum(last) / len(last)) / (sum(first) / len(first)) - 1.0


def _told(paces: Sequence[Pace], drift: float | None) -> str:
    if not paces or drift is None:
        return f"too short a soak to tell whether clocks are steady: it takes {format_seconds(_WINDOW)} at least"
    change = paces[-1][1] / paces[0][1] - 1.0
    steady = f"steady after {format_seconds(round(paces[-1][0]))}: {change:+.1%} from the first half second"
    return steady if abs(drift) < _DRIFT else f"not steady: {drift:+.1%} over the last {format_seconds(_WINDOW)}"
