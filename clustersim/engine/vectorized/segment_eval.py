"""How does a block run on many ranks side by side?

Operations run back to back. A rank goes on with an exchange when the last member of its group has come to it. While a
collective runs on another stream of the rank, its kernels take longer by a part, each by its own and beside each kind
of collective by another; what it communicates inside the block does not.

All times are arrays over the ranks. Without a collective beside, a block in which ranks meet in groups of one role is
three sums and two maxima: until the first meeting, from there to the last one, and the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.engine.vectorized.group_sync import Meeting


class Beside(NamedTuple):
    """A collective beside, or one on every rank: [ranks] when it begins and ends, and the pace of kernels meanwhile."""

    begin: FloatArray
    end: FloatArray
    pace: IntArray | int = 1


Busy = Sequence[Beside]
"""Collectives beside, one after the other on every rank."""
NEVER: Final[Busy] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Durations of a block's operations on n ranks.

    kernels, rest: [n or 1, operations] seconds of kernels alone, and of what a collective beside does not slow;
    slowing: [paces - 1, n or 1, operations] the part by which it does slow kernels; meetings: for each operation who
    meets for it, None if nobody. Of several runs, for `step_through`: [n or 1, runs or 1, operations], and slowing
    [paces - 1, n or 1, 1, operations].
    """

    ranks: int
    kernels: FloatArray
    rest: FloatArray
    slowing: FloatArray
    meetings: tuple[Meeting | None, ...]

    @property
    def meets(self) -> bool:
        """Whether any ranks meet."""
        return any(meeting is not None for meeting in self.meetings)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """How a block ran: [n] each. waited: seconds for others, slowed: by collectives beside, both inside the block."""

    end: FloatArray
    waited: FloatArray
    slowed: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A block in which ranks meet in the groups of one role, undisturbed.

    lead: [n] seconds before the first meeting (without one: all); middle, tail: [n] from there to the last one, and
    after it; waited: [n] seconds in the middle in which others were waited for.
    """

    meeting: Meeting | None
    lead: FloatArray
    middle: FloatArray
    tail: FloatArray
    waited: FloatArray

    def run(self, start: FloatArray) -> Run:
        """Run from these times."""
        come = start + self.lead
        if self.meeting is None:
            return Run(come, self.waited, self.waited)
        met = self.meeting.latest(come)
        return Run(met + self.middle + self.tail, met - come + self.waited, np.zeros_like(met))


def outline(pieces: Pieces) -> Outline | None:
    """The outline of a block; None where ranks meet in groups of several roles."""
    durations, nothing = pieces.kernels + pieces.rest, np.zeros(pieces.ranks)
    places = [place for place, meeting in enumerate(pieces.meetings) if meeting is not None]
    if not places:
        return Outline(None, np.broadcast_to(durations.sum(axis=1), pieces.ranks), nothing, nothing, nothing)
    meeting = pieces.meetings[places[0]]
    if meeting is None or any(pieces.meetings[place] is not meeting for place in places):
        return None
    lead = durations[:, : places[0]].sum(axis=1)
    own = np.broadcast_to(np.add.reduceat(durations, places, axis=1), (pieces.ranks, len(places)))
    between = own[:, :-1]
    middle = (between if len(durations) == 1 else meeting.latest(between)).sum(axis=1)
    return Outline(meeting, np.broadcast_to(lead, pieces.ranks), middle, own[:, -1], middle - between.sum(axis=1))


def leaders(pieces: Pieces, waited: FloatArray) -> IntArray:
    """For each rank the place of the one that waited least among those that it meets: [n]."""
    leader = np.arange(pieces.ranks)
    for meeting in dict.fromkeys(pieces.meetings):
        if meeting is not None:
            ahead = -waited[leader]
            leader = leader[meeting.last(ahead, meeting.latest(ahead))]
    return leader


def beside(run: Run, start: FloatArray, busy: Busy) -> Busy:
    """The collectives that may be beside a block, if any is beside it where it runs undisturbed.

    What slows one rank makes another wait for it, and so may bring any collective beside that rank's block that has not
    ended before.
    """
    later = [array for array in busy if (array.end > start).any()]
    return later if any(((item.begin < run.end) & (item.end > start)).any() for item in later) else NEVER


def play(start: FloatArray, pieces: Pieces, busy: Busy = NEVER) -> Run:
    """Run a block, operations that follow each other without a meeting or a change of kind at once."""
    now, waited, slowed = start, np.zeros(pieces.ranks), np.zeros(pieces.ranks)
    for begin, end in pairwise((*_cuts(pieces), len(pieces.meetings))):
        now, waited = _met(pieces.meetings[begin], now, waited)
        part = pieces.kernels[:, begin:end].sum(axis=1), pieces.rest[:, begin:end].sum(axis=1)
        now, more = _work(now, *part, pieces.slowing[..., begin], busy)
        slowed = slowed + more
    return Run(now, waited, slowed)


def step_through(start: FloatArray, pieces: Pieces, busy: Busy) -> tuple[Run, FloatArray, FloatArray]:
    """Run a block operation by operation; also when each began and ended: [n, operations].

    Or run it several times at once, from start and beside collectives [n, runs]: [n, runs, operations].
    """
    begins, ends = np.empty((2, *start.shape, len(pieces.meetings)))
    now, waited, slowed = start, np.zeros_like(start), np.zeros_like(start)
    for place, meeting in enumerate(pieces.meetings):
        now, waited = _met(meeting, now, waited)
        begins[..., place] = now
        now, more = _work(now, pieces.kernels[..., place], pieces.rest[..., place], pieces.slowing[..., place], busy)
        slowed = slowed + more
        ends[..., place] = now
    return Run(now, waited, slowed), begins, ends


def _met(meeting: Meeting | None, come: FloatArray, waited: FloatArray) -> tuple[FloatArray, FloatArray]:
    """When ranks go on that come to a meeting, and how long they have waited then."""
    if meeting is None:
        return come, waited
    met = meeting.latest(come)
    return met, waited + (met - come)


def _work(
    start: FloatArray, kernel: FloatArray, rest: FloatArray, slowing: FloatArray, busy: Busy
) -> tuple[FloatArray, FloatArray]:
    """When work ends of which a part is kernels, evenly; and how many seconds of it collectives beside have cost.

    slowing: [paces - 1, ...] of all these kernels.
    """
    alone = kernel + rest
    end, slowed = start + alone, np.zeros_like(start)
    if not busy or not kernel.any():
        return end, slowed
    parts = slowing * np.divide(kernel, alone, out=np.zeros_like(alone), where=alone > 0)
    for since, until, pace in busy:
        first = np.maximum(start, since)
        left = end - first
        if (left <= 0.0).all():
            continue
        part = parts[pace - 1] if isinstance(pace, int) else np.choose(pace - 1, parts)
        lost = part / (1.0 + part)
        more = np.minimum(np.maximum(left, 0.0) * (1.0 + part), np.maximum(until - first, 0.0)) * lost
        end, slowed = end + more, slowed + more
    return end, slowed


def _cuts(pieces: Pieces) -> tuple[int, ...]:
    """Where to cut a block so that a piece has no meeting but before its first operation, and work of one kind.

    Kernels and communication are slowed differently, so they may not be added up, neither may kernels that collectives
    slow by different parts, nor two that are both.
    """
    meetings, slowing = pieces.meetings, pieces.slowing
    other = (slowing[..., 1:] != slowing[..., :-1]).any(axis=(0, 1))
    kind = np.where((pieces.rest == 0).all(axis=0), 0, np.where((pieces.kernels == 0).all(axis=0), 1, 2))
    return tuple(
        place
        for place in range(len(meetings))
        if place == 0
        or meetings[place] is not None
        or kind[place] == 2
        or kind[place] != kind[place - 1]
        or other[place - 1]
    )
