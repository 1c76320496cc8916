"""Group segments: segments with synchronization inside, run jointly by all members of one group.

All synchronization of the segment is with one group, whose members run the same program. So once the last
member has begun the segment, all its synchronization points follow from when each began: the segment is one
event per member, computed by max-plus arithmetic (`segment_eval`). When a collective begins or ends on
another stream of a member, the run is evaluated again, and the ends of those members that are not done are
rescheduled. No member ends before the last one has begun, because they synchronize inside.

Segments that synchronize with groups of several kinds, or whose comm ops share links, are run by each rank
itself (`RankProcess`).
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np
import simpy

from clustersim.common.units import Seconds
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.fluid_action import FluidAction
from clustersim.engine.recording.recorder import WaitAndSlowdown
from clustersim.engine.scalar.group_durations import GroupDurations, MemberOverlap
from clustersim.engine.vectorized.segment_durations import RankSegmentDurations, find_group_syncs, rank_group_colours
from clustersim.program.program import Program
from clustersim.program.task import Segment
from clustersim.symmetry.refinement import SymmetryClasses


class Participant(FluidAction):
    """One member in a run. loss: seconds lost there, once it is done; end: of the segment, as far as is known.

    overlaps: (begin, end, interference level) of collectives on its other streams.
    """

    __slots__ = ("_run", "end", "loss", "member_index", "overlaps")

    def __init__(self, run: "GroupSegmentRun", member_index: int) -> None:
        super().__init__(run.environment, inf)
        self._run, self.member_index, self.end, self.loss = run, member_index, inf, WaitAndSlowdown()
        self.overlaps: list[MemberOverlap] = []
        self.done.callbacks.append(run.on_end)

    def set_level(self, level: int) -> None:
        """Note that a collective begins (its interference level) or ends (0) on another stream, and reschedule."""
        now = self.environment.now
        if self.overlaps and self.overlaps[-1][1] == inf:
            self.overlaps[-1] = self.overlaps[-1][0], now, self.overlaps[-1][2]
        if level:
            self.overlaps.append((now, inf, level))
        self._run.schedule_ends()

    def set_end(self, end: Seconds, loss: WaitAndSlowdown) -> None:
        """End at this time, unless it is over."""
        if self.done.processed:
            return
        self.loss = loss
        if end != self.end:
            self.end = end
            self.set_remaining(max(end - self.environment.now, 0.0))


class GroupSegmentRun:
    """One run of a segment by the members of a group, who begin it one after the other."""

    __slots__ = ("_durations", "_missing", "_participants", "_running", "_start", "environment")

    def __init__(self, environment: SimEnvironment, durations: GroupDurations) -> None:
        self.environment, self._durations = environment, durations
        self._start = [inf] * durations.member_count
        self._participants: list[Participant] = []
        self._missing = self._running = durations.member_count

    def arrive(self, member_index: int, *, level: int) -> Participant:
        """Begin the segment as a member; level: its current interference level."""
        participant = Participant(self, member_index)
        self._participants.append(participant)
        self._start[member_index] = self.environment.now
        self._missing -= 1
        if level:
            participant.set_level(level)
        else:
            self.schedule_ends()
        return participant

    @property
    def is_complete(self) -> bool:
        """Whether all members have arrived."""
        return not self._missing

    def schedule_ends(self) -> None:
        """Schedule the end of every member, as it is if nothing changes."""
        if self._missing or not self._participants:
            return
        overlaps = {participant.member_index: participant.overlaps for participant in self._participants}
        ends = self._durations.ends(self._start, [overlaps[member] for member in range(len(overlaps))])
        for participant in self._participants:
            participant.set_end(*ends[participant.member_index])

    def on_end(self, _: simpy.Event) -> None:
        """A member has ended the segment; once all have, break the cycle between them and the run."""
        self._running -= 1
        if not self._running:
            self._participants.clear()  # so that no garbage collection is needed


class GroupSegments:
    """All groups that run segments jointly, and their runs in progress."""

    def __init__(
        self,
        environment: SimEnvironment,
        program: Program,
        classes: SymmetryClasses,
        cost: SegmentCost,
        jitter: Jitter | None,
    ) -> None:
        self._environment, self._program, self._classes, self._cost = environment, program, classes, cost
        self._jitter = jitter
        self._simulated = np.unique(classes.representative)
        self._group_cache: dict[tuple[str, int], _SegmentGroup] = {}  # by kind of group and group colour
        self._rank_cache: dict[tuple[str, int], _SegmentGroup] = {}  # by kind of group and rank

    def arrive(self, rank: int, task_id: int, segment: Segment, comm_group: str, *, level: int) -> Participant:
        """Begin the segment of task `task_id` as a rank, jointly with the other members of its group."""
        group = self._rank_cache.get((comm_group, rank))
        if group is None:
            group = self._rank_cache[comm_group, rank] = self._group_of_rank(comm_group, rank)
        run = group.runs.get(task_id)
        if run is None:
            run = group.runs[task_id] = GroupSegmentRun(self._environment, group.durations_of(task_id, segment))
        participant = run.arrive(group.member_index[rank], level=level)
        if run.is_complete:
            del group.runs[task_id]
        return participant

    def _group_of_rank(self, comm_group: str, rank: int) -> "_SegmentGroup":
        """The group of a kind that a rank is in."""
        colour = int(self._classes.group_colours[comm_group][self._program.group_indices[comm_group][rank]])
        if (comm_group, colour) not in self._group_cache:
            self._group_cache[comm_group, colour] = self._create_group(comm_group, colour)
        return self._group_cache[comm_group, colour]

    def _create_group(self, comm_group: str, colour: int) -> "_SegmentGroup":
        """The simulated ranks that stand for the members of a group."""
        candidates = self._simulated[self._program.group_indices[comm_group][self._simulated] >= 0]
        ranks = candidates[rank_group_colours(self._program, self._classes, comm_group, candidates) == colour]
        program = self._program.programs[int(self._program.program_index[ranks[0]])]
        group_syncs = find_group_syncs(self._program, self._classes, ranks)
        source = RankSegmentDurations(program, ranks, self._cost, self._jitter, group_syncs)
        return _SegmentGroup(source, {rank: index for index, rank in enumerate(ranks.tolist())})


@dataclass(frozen=True, slots=True, eq=False)
class _SegmentGroup:
    """Ranks that run segments jointly. member_index: by rank; runs: pending ones by task id."""

    source: RankSegmentDurations
    member_index: dict[int, int]
    runs: dict[int, GroupSegmentRun] = field(default_factory=dict)
    _durations: dict[Segment, GroupDurations] = field(default_factory=dict)

    def durations_of(self, task_id: int, segment: Segment) -> GroupDurations:
        """Durations of the segment of a task; cached unless kernels have jitter."""
        durations = self._durations.get(segment)
        if durations is None:
            durations = GroupDurations(*self.source.durations_and_summary(task_id, segment))
            if self.source.jitter is None:
                self._durations[segment] = durations
        return durations
