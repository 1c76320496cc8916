"""How does a block run in which simulated ranks meet?

All of a block's meetings are of one group, whose members run the same program. So once the last member has begun the
block, all its meetings follow from when each began: the block is one event for each member, as for a rank that meets
nobody. Where a collective begins or ends beside a member, the run so far is worked out again (`segment_eval`), and what is left
of it ends when that says. No member ends before the last one has come, because they meet inside.

Blocks in which ranks meet in groups of several roles, or whose exchanges share links, are left to the ranks.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np
import simpy

from clustersim.common.units import Seconds
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.recording.recorder import WaitAndSlowdown
from clustersim.engine.vectorized.segment_durations import RankSegmentDurations, find_group_syncs, rank_group_colours
from clustersim.engine.vectorized.segment_eval import (
    MaxPlusSummary,
    OverlapInterval,
    OverlapIntervals,
    SegmentDurations,
    evaluate_segment,
)
from clustersim.program.program import Program
from clustersim.program.task import Segment
from clustersim.symmetry.refinement import SymmetryClasses


@dataclass(slots=True, eq=False)
class Participant:
    """One member of a run. done: it has ended the block; lost: what it lost there, once it has."""

    member_index: int
    run: "GroupSegmentRun"
    done: simpy.Event
    loss: WaitAndSlowdown = field(default_factory=WaitAndSlowdown)
    overlaps: list[tuple[Seconds, Seconds, int]] = field(default_factory=list)
    end: Seconds = inf
    timer_id: int = 0

    def set_level(self, level: int) -> None:
        """Note that a collective begins (its pace) or ends (0) beside the member, and go on accordingly."""
        now = self.run.environment.now
        if self.overlaps and self.overlaps[-1][1] == inf:
            self.overlaps[-1] = self.overlaps[-1][0], now, self.overlaps[-1][2]
        if level:
            self.overlaps.append((now, inf, level))
        self.run.schedule_ends()


class GroupSegmentRun:
    """One run of a block by the members of a group, who come to it one after the other."""

    __slots__ = ("_missing", "_summary", "_durations", "_participants", "_start", "environment")

    def __init__(
        self, environment: SimEnvironment, durations: SegmentDurations, summary: MaxPlusSummary | None
    ) -> None:
        self.environment, self._durations, self._summary = environment, durations, summary
        self._start = np.full(durations.rank_count, inf)
        self._participants: list[Participant] = []
        self._missing = durations.rank_count

    def arrive(self, member_index: int, *, level: int) -> Participant:
        """Begin the block as the member at this place; beside: its pace now."""
        participant = Participant(member_index, self, simpy.Event(self.environment))
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
        """Whether all members have come."""
        return not self._missing

    def schedule_ends(self) -> None:
        """Let every member end when it will if nothing changes."""
        if self._missing or not self._participants:
            return
        if self._summary is None or any(participant.overlaps for participant in self._participants):
            run = evaluate_segment(self._start, self._durations, self._overlap_intervals())
        else:
            run = self._summary.evaluate(self._start)
        end, waited, slowed = run.end.tolist(), run.waited.tolist(), run.slowed.tolist()
        for participant in self._participants:
            member_index = participant.member_index
            if not participant.done.triggered:
                participant.loss = WaitAndSlowdown(waited[member_index], slowed[member_index])
                if end[member_index] != participant.end:
                    self._set_timer(participant, end[member_index])

    def _set_timer(self, participant: Participant, end: Seconds) -> None:
        participant.end = end
        participant.timer_id += 1
        timer_id = participant.timer_id
        event = self.environment.event_after(max(end - self.environment.now, 0.0))
        event.callbacks.append(lambda _: self._on_timer(participant, timer_id))

    def _on_timer(self, participant: Participant, timer_id: int) -> None:
        """End the block for a member, unless it is due at another time since this timer was set."""
        if timer_id == participant.timer_id:
            participant.done.succeed()
            if all(member.done.triggered for member in self._participants):
                self._participants.clear()  # they know the run: only a collector would find what it holds

    def _overlap_intervals(self) -> OverlapIntervals:
        """Collectives beside the members: [members] of the first of each one, then the second, ..."""
        max_overlaps = max(len(participant.overlaps) for participant in self._participants)
        begins, ends = np.full((2, max_overlaps, len(self._participants)), inf)
        ends *= -1.0  # where there is none, it ends before it begins
        levels = np.ones((max_overlaps, len(self._participants)), dtype=np.int64)
        for participant in self._participants:
            for index, (begin, end, level) in enumerate(participant.overlaps):
                (
                    begins[index, participant.member_index],
                    ends[index, participant.member_index],
                    levels[index, participant.member_index],
                ) = begin, end, level
        return [OverlapInterval(*interval) for interval in zip(begins, ends, levels, strict=True)]


class GroupSegments:
    """All runs of blocks in which ranks meet, and the groups that run them."""

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
        self._group_cache: dict[tuple[str, int], _SegmentGroup] = {}  # by colour
        self._rank_cache: dict[tuple[str, int], _SegmentGroup] = {}  # by rank

    def arrive(self, rank: int, task_id: int, segment: Segment, comm_group: str, *, level: int) -> Participant:
        """Begin the block of task `number` as a rank, together with the others of its group of a role."""
        group = self._rank_cache.get((comm_group, rank))
        if group is None:
            group = self._rank_cache[comm_group, rank] = self._group_of_rank(comm_group, rank)
        run = group.runs.get(task_id)
        if run is None:
            run = group.runs[task_id] = GroupSegmentRun(
                self._environment, *group.durations.durations_and_summary(task_id, segment)
            )
        participant = run.arrive(group.member_index[rank], level=level)
        if run.is_complete:
            del group.runs[task_id]
        return participant

    def _group_of_rank(self, comm_group: str, rank: int) -> "_SegmentGroup":
        """The group of a role that a rank is in."""
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
    """Ranks that run blocks together. place: of each of them; runs: by task, those that not all have come to."""

    durations: RankSegmentDurations
    member_index: dict[int, int]
    runs: dict[int, GroupSegmentRun] = field(default_factory=dict)
