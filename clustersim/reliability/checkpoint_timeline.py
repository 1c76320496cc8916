"""What of a job's time goes into checkpoints, and what of its work is safe? In closed form, between two restarts.

After every `compute` seconds of work a snapshot is taken, for which steps wait `block` seconds; every `stored_every`th
then goes to storage beside further steps for `drain` seconds, which slows these by `slowdown_seconds` seconds for each snapshot,
spread evenly over the work behind the first of them. With compute 10, block 1, drain 4, drag 0 and every snapshot
stored, snapshots begin at 10, 21, 32 ... and are safe at 15, 26, 37 ...
"""

from dataclasses import dataclass
from math import ceil, floor

from clustersim.common.units import Seconds

_RELATIVE_TOLERANCE = 1e-9  # by which sums of seconds may be off, relative to the whole


@dataclass(frozen=True, slots=True)
class CheckpointTimeline:
    """compute: of work between two snapshots; the rest as above. peers: nodes keep copies of what another one holds."""

    interval: Seconds
    block_seconds: Seconds
    drain_seconds: Seconds = 0.0
    slowdown_seconds: Seconds = 0.0
    stored_every: int = 1
    has_peer_copies: bool = False

    def snapshot_begin(self, index: int) -> Seconds:
        """When a snapshot (1, 2, ...) begins."""
        slowed_count = max(0, index - self.stored_every)
        return index * self.interval + (index - 1) * self.block_seconds + slowed_count * self.slowdown_seconds

    def work_after(self, wall: Seconds) -> Seconds:
        """How much was worked after so many seconds."""
        first_stored = self.stored_every * (self.interval + self.block_seconds)
        if wall < first_stored:
            cycles, remainder = divmod(wall, self.interval + self.block_seconds)
            return cycles * self.interval + min(remainder, self.interval)
        cycle_seconds = self.interval + self.slowdown_seconds
        cycles, remainder = divmod(wall - first_stored, cycle_seconds + self.block_seconds)
        return (self.stored_every + cycles) * self.interval + min(remainder / cycle_seconds, 1.0) * self.interval

    def wall_time_of(self, work: Seconds) -> Seconds:
        """When so much is worked; a snapshot that would begin just then is not in it."""
        snapshots = max(0, ceil(work / self.interval * (1.0 - _RELATIVE_TOLERANCE)) - 1)
        slowed_work = max(0.0, work - self.stored_every * self.interval)
        return work + snapshots * self.block_seconds + slowed_work * self.slowdown_seconds / self.interval

    def last_safe_snapshot(self, wall: Seconds, *, in_storage: bool) -> int:
        """The number of the last snapshot that is safe after so many seconds, in storage or with peers; 0: none."""
        stride = self.stored_every if in_storage else 1
        delay = self.block_seconds + (self.drain_seconds if in_storage else 0.0)
        index = floor(self.work_after(wall) / self.interval * (1.0 + _RELATIVE_TOLERANCE)) // stride * stride
        while index > 0 and self.snapshot_begin(index) + delay > wall:
            index -= stride
        return max(0, index)

    def last_begun_snapshot(self, wall: Seconds) -> int:
        """The number of the last snapshot that began by then; 0: none."""
        index = floor(self.work_after(wall) / self.interval * (1.0 + _RELATIVE_TOLERANCE))
        return index if index == 0 or self.snapshot_begin(index) <= wall else index - 1
