"""What of a job's time goes into checkpoints, and what of its work is safe? In closed form, between two restarts.

After every `compute` seconds of work a snapshot is taken, for which steps wait `block` seconds; every `stored_every`th
then goes to storage beside further steps for `drain` seconds, which slows these by `drag` seconds for each snapshot,
spread evenly over the work behind the first of them. With compute 10, block 1, drain 4, drag 0 and every snapshot
stored, snapshots begin at 10, 21, 32 ... and are safe at 15, 26, 37 ...
"""

from dataclasses import dataclass
from math import ceil, floor

from clustersim.common.units import Seconds

_CLOSE = 1e-9  # by which sums of seconds may be off, relative to the whole


@dataclass(frozen=True, slots=True)
class Saving:
    """compute: of work between two snapshots; the rest as above. peers: nodes keep copies of what another one holds."""

    compute: Seconds
    block: Seconds
    drain: Seconds = 0.0
    drag: Seconds = 0.0
    stored_every: int = 1
    peers: bool = False

    def begins(self, number: int) -> Seconds:
        """When a snapshot (1, 2, ...) begins."""
        dragged = max(0, number - self.stored_every)
        return number * self.compute + (number - 1) * self.block + dragged * self.drag

    def work(self, wall: Seconds) -> Seconds:
        """How much was worked after so many seconds."""
        first = self.stored_every * (self.compute + self.block)
        if wall < first:
            many, rest = divmod(wall, self.compute + self.block)
            return many * self.compute + min(rest, self.compute)
        each = self.compute + self.drag
        many, rest = divmod(wall - first, each + self.block)
        return (self.stored_every + many) * self.compute + min(rest / each, 1.0) * self.compute

    def wall(self, work: Seconds) -> Seconds:
        """When so much is worked; a snapshot that would begin just then is not in it."""
        snapshots = max(0, ceil(work / self.compute * (1.0 - _CLOSE)) - 1)
        dragged = max(0.0, work - self.stored_every * self.compute)
        return work + snapshots * self.block + dragged * self.drag / self.compute

    def safe(self, wall: Seconds, *, stored: bool) -> int:
        """The number of the last snapshot that is safe after so many seconds, in storage or with peers; 0: none."""
        every = self.stored_every if stored else 1
        late = self.block + (self.drain if stored else 0.0)
        number = floor(self.work(wall) / self.compute * (1.0 + _CLOSE)) // every * every
        while number > 0 and self.begins(number) + late > wall:
            number -= every
        return max(0, number)

    def begun(self, wall: Seconds) -> int:
        """The number of the last snapshot that began by then; 0: none."""
        number = floor(self.work(wall) / self.compute * (1.0 + _CLOSE))
        return number if number == 0 or self.begins(number) <= wall else number - 1
