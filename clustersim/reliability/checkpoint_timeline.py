"""How much time goes into checkpoints, and how much work is safe? Closed form between two restarts.

After every `interval` seconds of work a snapshot is taken, which blocks steps for `block_seconds`; every
`stored_every`th is then written to storage in the background for `drain_seconds`, which slows the steps by
`slowdown_seconds` per snapshot, spread evenly over the work after the first of them. With interval 10,
block 1, drain 4, slowdown 0 and every snapshot stored, snapshots begin at 10, 21, 32 ... and are safe at
15, 26, 37 ...
"""

from dataclasses import dataclass
from math import ceil, floor

from clustersim.common.units import Seconds

_RELATIVE_TOLERANCE = 1e-9  # relative rounding error of sums of seconds


@dataclass(frozen=True, slots=True)
class CheckpointTimeline:
    """Times of checkpoints after a restart, in seconds.

    interval: work between two snapshots; has_peer_copies: nodes hold copies of each other's snapshots.
    """

    interval: Seconds
    block_seconds: Seconds
    drain_seconds: Seconds = 0.0
    slowdown_seconds: Seconds = 0.0
    stored_every: int = 1
    has_peer_copies: bool = False

    def snapshot_begin(self, index: int) -> Seconds:
        """When snapshot 1, 2, ... begins."""
        slowed_count = max(0, index - self.stored_every)
        return index * self.interval + (index - 1) * self.block_seconds + slowed_count * self.slowdown_seconds

    def work_after(self, wall: Seconds) -> Seconds:
        """The work done after this much wall time."""
        first_stored = self.stored_every * (self.interval + self.block_seconds)
        if wall < first_stored:
            cycles, remainder = divmod(wall, self.interval + self.block_seconds)
            return cycles * self.interval + min(remainder, self.interval)
        cycle_seconds = self.interval + self.slowdown_seconds
        cycles, remainder = divmod(wall - first_stored, cycle_seconds + self.block_seconds)
        return (self.stored_every + cycles) * self.interval + min(remainder / cycle_seconds, 1.0) * self.interval

    def wall_time_of(self, work: Seconds) -> Seconds:
        """The wall time of this much work, without a snapshot that would begin just then."""
        snapshots = max(0, ceil(work / self.interval * (1.0 - _RELATIVE_TOLERANCE)) - 1)
        wall = work + snapshots * self.block_seconds
        if self.slowdown_seconds:
            wall += max(0.0, work - self.stored_every * self.interval) * self.slowdown_seconds / self.interval
        return wall

    def last_safe_snapshot(self, wall: Seconds, work: Seconds, *, in_storage: bool) -> int:
        """Index of the last snapshot that is safe after this much wall time, in storage or on peers; 0: none.

        work: done by then.
        """
        stride = self.stored_every if in_storage else 1
        delay = self.block_seconds + (self.drain_seconds if in_storage else 0.0)
        index = floor(work / self.interval * (1.0 + _RELATIVE_TOLERANCE)) // stride * stride
        while index > 0 and self.snapshot_begin(index) + delay > wall:
            index -= stride
        return max(0, index)

    def last_begun_snapshot(self, wall: Seconds) -> int:
        """Index of the last snapshot that has begun by then; 0: none."""
        index = floor(self.work_after(wall) / self.interval * (1.0 + _RELATIVE_TOLERANCE))
        return index if index == 0 or self.snapshot_begin(index) <= wall else index - 1
