"""At which clock does the device work for hours, and not only for the first seconds?

A GPU starts at its boost clock and falls to what its power limit and its cooling allow. So it works until clocks and
power no longer change (`devices.burn_in`), whenever anything is to be measured afterwards: it cools between sessions.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from calibrate.devices.burn_in import soak
from calibrate.kernels.progress import lasting
from calibrate.report.format import state_words
from calibrate.stages.stage import Bench, Part
from clustersim.common.units import Seconds

LEAST: Final = 20.0  # seconds: drift is what changes from one window of 10 s to the next


@dataclass(frozen=True, slots=True)
class Soak:
    """The device at work until it is steady, before other parts."""

    before: tuple[Part, ...]

    name: ClassVar[str] = "soak"
    minutes: ClassVar[float] = 2.0
    least: ClassVar[Seconds] = LEAST

    def obstacle(self, bench: Bench) -> str:
        """A processor has no clock of its own that falls after seconds."""
        return "a CPU needs none" if bench.is_cpu else ""

    def due(self, bench: Bench) -> bool:
        """Whenever anything else is: the device has cooled since it was last busy."""
        return any(part.due(bench) and not part.obstacle(bench) for part in self.before)

    def words(self, bench: Bench) -> str:  # noqa: ARG002 - the same on every GPU
        """What it does."""
        return "keeps the GPU busy until its clock no longer falls"

    def measure(self, bench: Bench, seconds: Seconds) -> str:
        """Keep the device busy; the clock that it came to."""
        with lasting(self.name, seconds) as say:
            moments = soak(bench.device, seconds, say)
        bench.session.seen(moments)
        return state_words(moments[-1].state) if moments else "the device does not say its clocks"
