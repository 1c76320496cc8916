"""Segment splitting: sub-segments of a segment that is not a single event, and what is constant about them.

Ranks synchronize at the start of sub-segments only. What a sub-segment needs from other ranks and from the
network is the same in every run of the segment, so it is computed once.
"""

from dataclasses import dataclass
from itertools import pairwise

from clustersim.common.cached_method import cached_by, cached_method
from clustersim.engine.scalar.fast_path import FastPath
from clustersim.engine.scalar.segment_action import ProgressCurves
from clustersim.engine.scalar.shared_state import SharedState
from clustersim.engine.scalar.sub_segment import ContendedTransfer, SubSegment
from clustersim.program.task import CommOp, Operation, Segment


@dataclass
class SegmentSplitter:
    """Splits the segments of one rank."""

    rank: int
    shared: SharedState

    @cached_by(lambda _self, segment, _curves, *, no_overlap: (segment, no_overlap))
    def sub_segments(self, segment: Segment, curves: ProgressCurves, *, no_overlap: bool) -> list[SubSegment]:
        """The sub-segments of a segment.

        curves: of all its operations; no_overlap: nothing can be concurrent with it.
        """
        ranges = pairwise(self._boundaries(segment, no_overlap=no_overlap))
        return [self._sub_segment(segment, curves, *begin_end, no_overlap=no_overlap) for begin_end in ranges]

    @cached_by(lambda _self, segment, _curves, position: (segment, position))
    def fast_path(self, segment: Segment, curves: ProgressCurves, position: int) -> FastPath | None:
        """Sub-segments from a position on that run as one event if nothing is concurrent and their links are idle."""
        return FastPath.from_sub_segments(self.sub_segments(segment, curves, no_overlap=True)[position:], curves)

    def _boundaries(self, segment: Segment, *, no_overlap: bool) -> list[int]:
        """Operation indices at which sub-segments begin, and the end."""
        positions = range(len(segment.operations) + 1)
        if not self.shared.coalesce:
            return list(positions)
        properties = [self._comm_properties(operation, no_overlap=no_overlap) for operation in segment.operations]
        return [0, *(n for n in positions[1:-1] if any(properties[n]) or properties[n - 1][1]), len(segment.operations)]

    def _sub_segment(
        self, segment: Segment, curves: ProgressCurves, begin: int, end: int, *, no_overlap: bool
    ) -> SubSegment:
        comm_op = segment.operations[begin].comm_op
        synchronizes, is_contended = self._comm_properties(segment.operations[begin], no_overlap=no_overlap)
        transfer = self._contended_transfer(segment, begin, comm_op) if comm_op is not None and is_contended else None
        sub_curves = curves.slice_operations(begin, end) if self.shared.jitter is None else None
        return SubSegment(begin, end, comm_op if synchronizes else None, transfer, sub_curves)

    @cached_method
    def _comm_properties(self, operation: Operation, *, no_overlap: bool) -> tuple[bool, bool]:
        """Whether other simulated ranks take part in an operation's comm op, and whether it shares links."""
        comm_op = operation.comm_op
        if comm_op is None:
            return False, False
        is_contended = self.shared.is_contended(self.rank, comm_op, no_overlap=no_overlap)
        return self.shared.synchronizes(self.rank, comm_op), is_contended

    def _contended_transfer(self, segment: Segment, operation_index: int, comm_op: CommOp) -> ContendedTransfer:
        shared, timing = self.shared, self.shared.cost.time_segment(self.rank, segment)
        uncontended_seconds = shared.cost.comm_timing(self.rank, comm_op).seconds
        begin, latency_and_demand = (
            shared.transfers.prepare(self.rank, comm_op),
            shared.transfers.latency_and_demand(self.rank, comm_op),
        )
        return ContendedTransfer(
            begin,
            *latency_and_demand,
            uncontended_seconds,
            timing.overlaps.get(operation_index),
            float(timing.exposed_comm[operation_index]),
        )
