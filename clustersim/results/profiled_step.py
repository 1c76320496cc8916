"""Where does the time of a step go that a profiler saw, kernel by kernel?

A profiler knows what ran on which stream of a GPU and when, and nothing of layers or schedules. Every instant of a step
gets one part: kernels compute; or else something is communicated; or else something is copied to or from the host; or
else the GPU is idle. So the parts of a rank sum to its step.

A step lasts from its first kernel that computes to that of the next one, on each rank; the last one until nothing runs
any more, so it is left out where there are others. Of several steps the one with the median time is looked at, the mean
over ranks. What began before a step, or ends after it, counts in part.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Final, TypeVar

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes, Seconds
from clustersim.results.intervals import Intervals, common


class SpanKind(Enum):
    """What runs on a GPU, as far as names of kernels tell."""

    PRODUCTS = "matrix products"
    ATTENTION = "attention"
    NORM = "norms"
    POINTWISE = "pointwise"
    LOSS = "softmax and loss"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    COPIES = "casts and copies"
    OTHER = "other kernels"
    COMMUNICATION = "communication"
    HOST = "copies to and from the host"


SPAN_KINDS: Final = tuple(SpanKind)
COMPUTED: Final = tuple(kind for kind in SpanKind if kind not in (SpanKind.COMMUNICATION, SpanKind.HOST))
"""Kinds of kernels that compute; they come first."""
_Key = TypeVar("_Key", bound=Hashable)


class SpanPart(Enum):
    """What an instant of a step counts as; the first of these that applies."""

    COMPUTE = "compute"
    EXPOSED = "exposed communication"
    HOST = "exposed copies"
    IDLE = "idle"


SPAN_PARTS: Final = tuple(SpanPart)


@dataclass(frozen=True, slots=True)
class Moved:
    """A collective. name: as `program.task.Collective` has it, or the library's own where it is none of these.

    ranks: of its group; payload: bytes as `program.task.Collective` counts them; both 0 where a trace does not say;
    members: of the group, as far as they are known; group: its name in the trace.
    """

    name: str
    ranks: int = 0
    payload: Bytes = 0.0
    group: str = ""
    members: tuple[int, ...] = ()
    reduces: str = ""

    @property
    def alike(self) -> "Moved":
        """The same, whichever group did it."""
        return Moved(self.name, self.ranks, self.payload)


@dataclass(frozen=True, slots=True)
class SpanLabel:
    """What a span says. product: m, n, k and batch of a matrix product (m >= n), where that is known."""

    name: str
    kind: SpanKind
    moved: Moved | None = None
    product: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, eq=False)
class RankSpans:
    """What one rank's GPU ran, in columns of one length, by start.

    start, end: seconds by a clock that all ranks share; stream: the number; label: index into `labels`; step: index
    into `numbers`, the profiler's numbers of the steps, -1: launched in none.
    """

    rank: int
    start: FloatArray
    end: FloatArray
    stream: IntArray
    label: IntArray
    step: IntArray
    labels: tuple[SpanLabel, ...]
    numbers: tuple[int, ...]

    @cached_property
    def kind(self) -> IntArray:
        """[n] place in SPAN_KINDS."""
        places = np.array([SPAN_KINDS.index(label.kind) for label in self.labels], dtype=np.int64)
        return np.asarray(places[self.label])

    def begins(self) -> FloatArray:
        """When the first kernel of each step that computes began, infinite where none did: [steps]."""
        begins = np.full(len(self.numbers), np.inf)
        chosen = (self.step >= 0) & (self.kind < len(COMPUTED))
        np.minimum.at(begins, self.step[chosen], self.start[chosen])
        return begins


@dataclass(frozen=True, eq=False)
class RankStep:
    """One step of one rank: its spans, cut to the step, whose times are seconds from its beginning.

    begins: [n] whether each span began in it.
    """

    rank: int
    seconds: Seconds
    spans: RankSpans
    begins: FloatArray

    @cached_property
    def parts(self) -> FloatArray:
        """Seconds of SPAN_PARTS: [4], summing to the step."""
        kinds = (COMPUTED, (*COMPUTED, SpanKind.COMMUNICATION), SPAN_KINDS)
        compute, both, every = (float(self._joined(*some).seconds.sum()) for some in kinds)
        return np.array([compute, both - compute, every - both, max(0.0, self.seconds - every)])

    @cached_property
    def communication(self) -> Seconds:
        """Seconds in which something is communicated, hidden or not."""
        return float(self._joined(SpanKind.COMMUNICATION).seconds.sum())

    @cached_property
    def hidden(self) -> Seconds:
        """Those of them in which kernels compute."""
        _, _, shared = common(self._joined(SpanKind.COMMUNICATION), self._joined(*COMPUTED))
        return float(shared.seconds.sum())

    def kinds(self) -> FloatArray:
        """How many spans of each of SPAN_KINDS began, and their seconds, of all streams together: [2, kinds]."""
        return np.stack([self._sums(self.begins), self._sums(self.spans.end - self.spans.start)])

    def by_label(self) -> FloatArray:
        """The same of each label: [2, labels]."""
        lasting, many = self.spans.end - self.spans.start, len(self.spans.labels)
        return np.stack([np.bincount(self.spans.label, array, minlength=many) for array in (self.begins, lasting)])

    def streams(self) -> dict[int, FloatArray]:
        """Seconds in which each stream computes, communicates, copies to or from the host, and does nothing: [4]."""
        found = {}
        for stream in np.unique(self.spans.stream).tolist():
            groups = (COMPUTED, (SpanKind.COMMUNICATION,), (SpanKind.HOST,))
            busy = [float(self._joined(*kinds, stream=stream).seconds.sum()) for kinds in groups]
            found[int(stream)] = np.array([*busy, max(0.0, self.seconds - sum(busy))])
        return found

    def _sums(self, weights: FloatArray) -> FloatArray:
        return np.bincount(self.spans.kind, weights, minlength=len(SPAN_KINDS)).astype(np.float64, copy=False)

    def _joined(self, *kinds: SpanKind, stream: int | None = None) -> Intervals:
        chosen = np.isin(self.spans.kind, [SPAN_KINDS.index(kind) for kind in kinds])
        chosen &= (self.spans.stream == stream) if stream is not None else True
        zeros = np.zeros(int(chosen.sum()), dtype=np.int64)
        return Intervals(zeros, self.spans.start[chosen], self.spans.end[chosen]).joined()


@dataclass(frozen=True, slots=True, eq=False)
class ProfiledStep:
    """The step that stands for all that a profiler saw.

    number: the profiler's; step_times: [steps] seconds of those that are whole, the mean over ranks.
    """

    number: int
    step_times: FloatArray
    ranks: tuple[RankStep, ...]

    @property
    def seconds(self) -> Seconds:
        """The mean over ranks."""
        return float(np.mean([rank.seconds for rank in self.ranks]))

    @property
    def parts(self) -> FloatArray:
        """Seconds of SPAN_PARTS, the mean over ranks: [4]."""
        return np.asarray(np.mean([rank.parts for rank in self.ranks], axis=0))

    @property
    def kinds(self) -> FloatArray:
        """As `RankStep.kinds`, the mean over ranks: [2, kinds]."""
        return np.asarray(np.mean([rank.kinds() for rank in self.ranks], axis=0))

    @property
    def communication(self) -> Seconds:
        """Seconds in which something is communicated, hidden or not, the mean over ranks."""
        return float(np.mean([rank.communication for rank in self.ranks]))

    @property
    def hidden(self) -> Seconds:
        """Those of them in which kernels compute."""
        return float(np.mean([rank.hidden for rank in self.ranks]))

    def streams(self) -> dict[int, FloatArray]:
        """As `RankStep.streams`, the mean over the ranks that have the stream."""
        found: dict[int, list[FloatArray]] = {}
        for rank in self.ranks:
            for stream, seconds in rank.streams().items():
                found.setdefault(stream, []).append(seconds)
        return {stream: np.mean(some, axis=0) for stream, some in sorted(found.items())}

    def collectives(self) -> dict[Moved, FloatArray]:
        """How many of each began, and their seconds, the mean over ranks: [2]."""
        return self._by(lambda label: None if label.moved is None else label.moved.alike)

    def products(self) -> dict[tuple[int, int, int, int], FloatArray]:
        """The same of matrix products whose sizes are known."""
        return self._by(lambda label: label.product)

    def _by(self, what: Callable[[SpanLabel], _Key | None]) -> dict[_Key, FloatArray]:
        found: dict[_Key, FloatArray] = {}
        for rank in self.ranks:
            sums = rank.by_label()
            for place, label in enumerate(rank.spans.labels):
                key = what(label)
                if key is not None and sums[:, place].any():
                    found[key] = found.get(key, np.zeros(2)) + sums[:, place] / len(self.ranks)
        return found


def median_step(ranks: Sequence[RankSpans], seconds: Seconds | None = None) -> ProfiledStep:
    """The step with the median time of those that are whole, or the only one.

    ranks: with equal `numbers`; seconds: what the only step takes, where that is known; else it lasts from the first
    span of any rank to the end of the last one.
    """
    begins = np.array([rank.begins() for rank in ranks])
    if begins.shape[1] == 1:
        first, last = _bounds(ranks)
        lasts = last - first if seconds is None else seconds
        return _step(ranks, 0, np.array([lasts]), np.full((len(ranks), 2), first) + np.array([0.0, lasts]))
    times = np.diff(begins, axis=1)
    means = times.mean(axis=0)
    place = int(np.argsort(means, kind="stable")[(len(means) - 1) // 2])
    return _step(ranks, place, means, begins[:, place : place + 2])


def _bounds(ranks: Sequence[RankSpans]) -> tuple[Seconds, Seconds]:
    """When the first span that belongs to a step begins, and when the last one ends."""
    chosen = [(rank, rank.step >= 0) for rank in ranks]
    return min(rank_spans.start[of].min() for rank_spans, of in chosen), max(item.end[of].max() for item, of in chosen)


def _step(ranks: Sequence[RankSpans], place: int, times: FloatArray, bounds: FloatArray) -> ProfiledStep:
    cut = tuple(_cut(rank, *bound) for rank, bound in zip(ranks, bounds.tolist(), strict=True))
    return ProfiledStep(ranks[0].numbers[place], times, cut)


def _cut(spans: RankSpans, begin: Seconds, end: Seconds) -> RankStep:
    """What runs between two moments."""
    chosen = np.flatnonzero((spans.end > begin) & (spans.start < end))
    start, stop = spans.start[chosen], spans.end[chosen]
    inside = replace(
        spans,
        start=np.maximum(start, begin) - begin,
        end=np.minimum(stop, end) - begin,
        stream=spans.stream[chosen],
        label=spans.label[chosen],
        step=spans.step[chosen],
    )
    return RankStep(spans.rank, end - begin, inside, (start >= begin).astype(np.float64))


def met(ranks: Sequence[RankSpans], step: int | None = None) -> dict[tuple[Moved, int], dict[int, Seconds]]:
    """What each collective took on each rank of its group, as far as they have traces; of one group in turn.

    step: only those of this place in `numbers`; else all that were launched in a step.
    """
    found: dict[tuple[Moved, int], dict[int, Seconds]] = {}
    for spans in ranks:
        number: dict[Moved, int] = {}
        for place in np.flatnonzero(spans.step >= 0 if step is None else spans.step == step).tolist():
            moved = spans.labels[int(spans.label[place])].moved
            if moved is not None:
                number[moved] = number.get(moved, -1) + 1
                lasting = float(spans.end[place] - spans.start[place])
                found.setdefault((moved, number[moved]), {})[spans.rank] = lasting
    return found


def waiting(ranks: Sequence[RankSpans], number: int) -> Seconds:
    """Seconds of a step in which collectives wait for other members, the mean over ranks.

    That is what they last longer than the shortest of their members' kernels; those whose members have not all traces
    are left out. number: the profiler's, of the step.
    """
    took = met(ranks, ranks[0].numbers.index(number)).items()
    whole = (np.array([*item.values()]) for (moved, _), item in took if len(item) == moved.ranks)
    return float(sum((array - array.min()).sum() for array in whole)) / len(ranks)
