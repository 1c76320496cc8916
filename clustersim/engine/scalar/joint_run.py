"""Joint runs: segments that synchronize with one group over shared links, run once for all members of the group.

Where all links that a segment shares with others are loaded by collectives of the group with which it synchronizes,
the members are apart only between two of these: they begin the next one, and end its transfer, at the same instant.
So from the first synchronization to the last one there is one process for the group, and the times of its members are
arrays. Before and after, each member runs by itself (`RankProcess`), as it does all the time where a comm op of
another group shares links.

On a member whose kernels a collective of another stream may overlap, they are an action of its own.
"""

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import simpy

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentCost
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.recording.operation_log import EndTimes, JointSpans
from clustersim.engine.recording.recorder import Recorder, WaitAndSlowdown
from clustersim.engine.scalar.segment_action import ProgressCurves, SegmentAction
from clustersim.engine.scalar.sub_segment import SubSegment
from clustersim.program.task import Segment


class JointMember(Protocol):
    """A rank that takes part."""

    @property
    def rank_id(self) -> int:
        """The rank."""

    def has_no_overlap(self, task_id: int) -> bool:
        """Whether no DP or EP collective can overlap a task's segment on this rank."""

    def begin_action(self, curves: ProgressCurves) -> SegmentAction:
        """Begin operations that such collectives slow."""

    def end_action(self) -> None:
        """These operations have ended."""


@dataclass(frozen=True, slots=True, eq=False)
class JointSegment:
    """What is the same in every run of a segment by a group.

    sub_segments: of each member, without curves, which are its own; first, last: the first and the last of these that
    begin with a synchronization.
    """

    sub_segments: list[SubSegment]
    first: int
    last: int

    @classmethod
    def from_sub_segments(cls, sub_segments: list[SubSegment]) -> "JointSegment":
        """Find what is run jointly."""
        synchronized = [index for index, entry in enumerate(sub_segments) if entry.sync_op is not None]
        return cls([replace(entry, curves=None) for entry in sub_segments], synchronized[0], synchronized[-1])

    @property
    def end(self) -> int:
        """Sub-segment from which on each member runs by itself again."""
        return self.last if self.sub_segments[self.last].transfer is None else self.last + 1


@dataclass(slots=True, eq=False)
class JointRun:
    """A run of a segment by the members of a group. Columns: [members] in the order in which they arrive.

    done: when all of it that is run jointly has ended; waited, slowed: seconds that each member lost in it.
    """

    environment: SimEnvironment
    recorder: Recorder
    cost: SegmentCost
    task_id: int
    joint_segment: JointSegment
    waited: FloatArray = field(init=False)
    slowed: FloatArray = field(init=False)
    _members: list[JointMember] = field(init=False, default_factory=list)
    _curves: list[ProgressCurves] = field(init=False, default_factory=list)
    _arrivals: list[Seconds] = field(init=False, default_factory=list)
    _slowed: list[Seconds] = field(init=False, default_factory=list)
    _done: list[simpy.Event] = field(init=False, default_factory=list)

    @property
    def member_count(self) -> int:
        """Members that have arrived."""
        return len(self._members)

    def arrive(self, member: JointMember, curves: ProgressCurves, slowed: Seconds) -> simpy.Event:
        """Arrive at the first synchronization; return when the member may go on by itself.

        curves: of all operations of the segment; slowed: seconds that the member has lost in it so far.
        """
        self._members.append(member)
        self._curves.append(curves)
        self._arrivals.append(self.environment.now)
        self._slowed.append(slowed)
        self._done.append(simpy.Event(self.environment))
        return self._done[-1]

    def begin(self) -> None:
        """Begin, as all members have arrived."""
        self.environment.process(self._run())

    def loss(self, member_index: int) -> WaitAndSlowdown:
        """What a member has lost."""
        return WaitAndSlowdown(float(self.waited[member_index]), float(self.slowed[member_index]))

    def _run(self) -> Generator[simpy.Event, Any, None]:
        """Run the sub-segments from the first synchronization to the last one."""
        ranks = np.array([member.rank_id for member in self._members])
        ends = np.array([curves.uncontended for curves in self._curves])
        arrivals, self.waited, self.slowed = np.array(self._arrivals), np.zeros(len(ranks)), np.array(self._slowed)
        segment, order = self.joint_segment, np.arange(len(ranks))
        for sub_segment in segment.sub_segments[segment.first : segment.end]:
            start, end_times = self.environment.now, None
            self.waited += start - arrivals
            order = order[np.argsort(arrivals[order], kind="stable")]
            if sub_segment.transfer is not None:
                yield sub_segment.transfer.begin()
                arrivals = np.full(len(ranks), self.environment.now)
                self._record_delays(sub_segment, ranks, start)
            else:
                seconds = ends[:, sub_segment.end] - ends[:, sub_segment.begin]
                arrivals, end_times = yield from self._run_kernels(sub_segment, seconds)
            operations = sub_segment.begin, sub_segment.end
            self.recorder.joint_spans.append(JointSpans(ranks, self.task_id, operations, start, arrivals, end_times))
        self.waited += self.environment.now - arrivals
        self._members.clear()
        for index in order[np.argsort(arrivals[order], kind="stable")].tolist():  # as they would arrive one by one
            self._done[index].succeed()

    def _run_kernels(
        self, sub_segment: SubSegment, seconds: FloatArray
    ) -> Generator[simpy.Event, Any, tuple[FloatArray, Sequence[EndTimes]]]:
        """Run operations without shared links until the last member has; return when each has, and their end times."""
        arrivals, actions = self.environment.now + seconds, self._begin_actions(sub_segment)
        if not actions:
            yield simpy.Timeout(self.environment, float(seconds.max()))
            return arrivals, self._curves
        end_times = list[EndTimes](self._curves)
        for index, action in actions.items():
            action.done.callbacks.append(partial(self._end_action, index, action, (arrivals, end_times)))
        yield simpy.Timeout(self.environment, max(np.delete(seconds, list(actions)).tolist(), default=0.0))
        for action in actions.values():
            if not action.done.processed:
                yield action.done
        return arrivals, end_times

    def _begin_actions(self, sub_segment: SubSegment) -> dict[int, SegmentAction]:
        """Actions of the members on which collectives may overlap and slow these operations, by index."""
        actions = {}
        for index, member in enumerate(self._members):
            if not member.has_no_overlap(self.task_id):
                curves = self._curves[index].slice_operations(sub_segment.begin, sub_segment.end)
                if not curves.is_unaffected:
                    actions[index] = member.begin_action(curves)
        return actions

    def _end_action(
        self, index: int, action: SegmentAction, ends: tuple[FloatArray, list[EndTimes]], _: simpy.Event
    ) -> None:
        self._members[index].end_action()
        arrivals, end_times = ends
        arrivals[index] = self.environment.now
        if action.was_slowed:
            self.slowed[index] += action.slowed_seconds
            end_times[index] = action.end_times()

    def _record_delays(self, sub_segment: SubSegment, ranks: IntArray, start: Seconds) -> None:
        """Record by how much sharing links has delayed a transfer that has just ended."""
        comm_op, now = sub_segment.sync_op, self.environment.now
        if comm_op is not None:
            delays = now - start - self.cost.comm_seconds(ranks, comm_op)
            self.recorder.add_joint_delays(ranks, (self.task_id, sub_segment.begin), delays, now)


@dataclass(slots=True, eq=False)
class JointSegments:
    """All groups that run segments jointly, and their runs in progress."""

    environment: SimEnvironment
    recorder: Recorder
    cost: SegmentCost
    _segments: dict[tuple[Hashable, Segment], JointSegment] = field(init=False, default_factory=dict)
    _runs: dict[tuple[Hashable, int], JointRun] = field(init=False, default_factory=dict)

    def joint_segment(
        self, group: Hashable, segment: Segment, find_sub_segments: Callable[[], list[SubSegment]]
    ) -> JointSegment:
        """What is the same in every run of a segment by a group; its sub-segments are found once."""
        if (group, segment) not in self._segments:
            self._segments[group, segment] = JointSegment.from_sub_segments(find_sub_segments())
        return self._segments[group, segment]

    def run_of(self, group: Hashable, task_id: int, joint_segment: JointSegment) -> JointRun:
        """The run of a task's segment that a group is about to begin."""
        if (group, task_id) not in self._runs:
            self._runs[group, task_id] = JointRun(self.environment, self.recorder, self.cost, task_id, joint_segment)
        return self._runs[group, task_id]

    def begin(self, group: Hashable, run: JointRun) -> None:
        """Begin a run, for which all members have arrived."""
        del self._runs[group, run.task_id]
        run.begin()
