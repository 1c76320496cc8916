"""Collectives in flight whose rate is bounded by concurrent kernels of their members.

The rate is that of the member whose kernels slow the collective most, since data pass through all of them.
During a segment the rate is constant: the mean over the segment's operations (`SegmentCost`). What is
transferred during a full segment is therefore exact, during a fraction of one it is an approximation. While
no member computes, the rate is 1 (uncontended).
"""

from dataclasses import dataclass, field

from clustersim.engine.kernel.fluid_action import FluidAction


@dataclass(slots=True, eq=False)
class InFlightCollective:
    """A collective in flight. action: its transfer; moves_data: false if that is only latency, which is not slowed."""

    action: FluidAction
    moves_data: bool = True
    _rank_bounds: dict[int, float] = field(init=False, default_factory=dict)

    def bound_rate(self, rank: int, rate: float) -> None:
        """Set the rate bound of one member; the minimum over all members applies."""
        self._rank_bounds[rank] = rate
        slowest = min(self._rank_bounds.values())
        if self.moves_data and slowest != self.action.rate_bound and not self.action.done.processed:
            self.action.set_rate_bound(slowest)
