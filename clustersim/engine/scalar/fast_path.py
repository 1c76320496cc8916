"""What do pieces of a block take that follow each other, where nobody shares their links?

A piece of kernels is one phase; an exchange is its latency and then, if it moves anything, its load.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

import numpy as np

from clustersim.common.units import Seconds
from clustersim.engine.kernel.network.fluid_network import FlowDemand
from clustersim.engine.recording.operation_log import PhasedEndTimes
from clustersim.engine.scalar.fluid_action import ProgressCurves
from clustersim.engine.scalar.sub_segment import SubSegment


class FastPathPhase(NamedTuple):
    """One of a piece. piece: its place in the course; load: what it asks of links, if it is the time that data move."""

    sub_segment_index: int
    seconds: Seconds
    demand: FlowDemand | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FastPath:
    """Pieces that follow each other without a meeting, at least one of which asks something of links.

    first: [pieces + 1] the first phase of each, and how many phases there are; links: those that any of them loads;
    ends: when phases and operations begin.
    """

    sub_segments: tuple[SubSegment, ...]
    phases: tuple[FastPathPhase, ...]
    first_phase: tuple[int, ...]
    link_ids: tuple[int, ...]
    end_times: PhasedEndTimes

    @classmethod
    def from_sub_segments(cls, sub_segments: Sequence[SubSegment], curves: ProgressCurves) -> "FastPath | None":
        """The pieces up to one that cannot be in a course; None where these load no links, or are only one.

        whole: paces of their block.
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
    """When operations of pieces begin: exchanges with their phase, kernels behind the first one of their piece."""
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
    """Whether a piece meets nobody, always lasts as long, and loads links at full speed if nobody else does."""
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
