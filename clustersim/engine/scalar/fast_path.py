"""Fast path: consecutive sub-segments that run as one event while their links are idle.

A sub-segment of kernels is one phase; a transfer is its latency phase and then, if it moves data, its flow
phase.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

import numpy as np

from clustersim.common.units import Seconds
from clustersim.engine.kernel.network.fluid_network import FlowDemand
from clustersim.engine.recording.operation_log import PhasedEndTimes
from clustersim.engine.scalar.segment_action import ProgressCurves
from clustersim.engine.scalar.sub_segment import SubSegment


class FastPathPhase(NamedTuple):
    """One phase of a sub-segment. demand: on links, if data move in it."""

    sub_segment_index: int
    seconds: Seconds
    demand: FlowDemand | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FastPath:
    """Consecutive sub-segments without synchronization, at least one of which loads links.

    first_phase: [sub-segments + 1] index of the first phase of each, and the number of phases; link_ids: links
    that any of them loads; end_times: start times of phases and operations.
    """

    sub_segments: tuple[SubSegment, ...]
    phases: tuple[FastPathPhase, ...]
    first_phase: tuple[int, ...]
    link_ids: tuple[int, ...]
    end_times: PhasedEndTimes

    @classmethod
    def from_sub_segments(cls, sub_segments: Sequence[SubSegment], curves: ProgressCurves) -> "FastPath | None":
        """The longest eligible prefix; None where it loads no links, or is a single sub-segment.

        curves: of the full segment.
        """
        selected = tuple(takewhile(_is_eligible, sub_segments))
        phases = [tuple(_sub_segment_phases(index, sub_segment)) for index, sub_segment in enumerate(selected)]
        all_phases = tuple(chain.from_iterable(phases))
        link_ids = dict.fromkeys(link_id for phase in all_phases if phase.demand for link_id in phase.demand.link_ids)
        if not link_ids or len(selected) == 1:
            return None
        first_phase = tuple(accumulate(map(len, phases), initial=0))
        return cls(selected, all_phases, first_phase, tuple(link_ids), _end_times(selected, all_phases, curves))


def _end_times(
    sub_segments: Sequence[SubSegment], phases: Sequence[FastPathPhase], curves: ProgressCurves
) -> PhasedEndTimes:
    """Start times of operations: a transfer starts with its phase, a kernel at an offset within its sub-segment."""
    sizes = [sub_segment.end - sub_segment.begin for sub_segment in sub_segments]
    first_phase = np.searchsorted([phase.sub_segment_index for phase in phases], np.arange(len(sub_segments) + 1))
    uncontended = np.array(curves.uncontended)
    offsets = np.concatenate(
        [
            uncontended[sub_segment.begin : sub_segment.end] - uncontended[sub_segment.begin]
            for sub_segment in sub_segments
        ]
    )
    seconds = tuple(phase.seconds for phase in phases)
    return PhasedEndTimes(seconds, np.repeat(first_phase, [*sizes, 1]), offsets)


def _is_eligible(sub_segment: SubSegment) -> bool:
    """Whether a sub-segment needs no synchronization, has a constant duration, and loads idle links at full rate."""
    if sub_segment.sync_op is not None or sub_segment.curves is None:
        return False
    transfer = sub_segment.transfer
    return transfer is None or (
        transfer.overlap is None and (transfer.demand is None or transfer.demand.runs_at_full_rate)
    )


def _sub_segment_phases(index: int, sub_segment: SubSegment) -> Iterator[FastPathPhase]:
    transfer = sub_segment.transfer
    if transfer is not None:
        yield FastPathPhase(index, transfer.latency)
        if transfer.demand is not None:
            yield FastPathPhase(index, transfer.demand.work_seconds, transfer.demand)
    elif sub_segment.curves is not None:
        yield FastPathPhase(index, sub_segment.curves.uncontended[-1])
