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
from clustersim.results.intervals import Intervals, intersect


class GpuSpanKind(Enum):
    """What runs on a GPU, as far as names of kernels tell."""

    MATMUL = "matrix products"
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


GPU_SPAN_KINDS: Final = tuple(GpuSpanKind)
COMPUTE_KINDS: Final = tuple(kind for kind in GpuSpanKind if kind not in (GpuSpanKind.COMMUNICATION, GpuSpanKind.HOST))
"""Kinds of kernels that compute; they come first."""
_Key = TypeVar("_Key", bound=Hashable)


class StepCategory(Enum):
    """What an instant of a step counts as; the first of these that applies."""

    COMPUTE = "compute"
    EXPOSED = "exposed communication"
    HOST = "exposed copies"
    IDLE = "idle"


STEP_CATEGORIES: Final = tuple(StepCategory)


@dataclass(frozen=True, slots=True)
class ProfiledCollective:
    """A collective. name: as `program.task.Collective` has it, or the library's own where it is none of these.

    ranks: of its group; payload: bytes as `program.task.Collective` counts them; both 0 where a trace does not say;
    members: of the group, as far as they are known; group: its name in the trace.
    """

    name: str
    group_size: int = 0
    payload: Bytes = 0.0
    group_name: str = ""
    members: tuple[int, ...] = ()
    reduction: str = ""

    @property
    def without_group(self) -> "ProfiledCollective":
        """The same, whichever group did it."""
        return ProfiledCollective(self.name, self.group_size, self.payload)


@dataclass(frozen=True, slots=True)
class GpuSpanLabel:
    """What a span says. product: m, n, k and batch of a matrix product (m >= n), where that is known."""

    name: str
    kind: GpuSpanKind
    collective: ProfiledCollective | None = None
    matmul_shape: tuple[int, int, int, int] | None = None


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
    label_index: IntArray
    step_index: IntArray
    labels: tuple[GpuSpanLabel, ...]
    step_numbers: tuple[int, ...]

    @cached_property
    def kind(self) -> IntArray:
        """[n] place in SPAN_KINDS."""
        kind_by_label = np.array([GPU_SPAN_KINDS.index(label.kind) for label in self.labels], dtype=np.int64)
        return np.asarray(kind_by_label[self.label_index])

    def step_starts(self) -> FloatArray:
        """When the first kernel of each step that computes began, infinite where none did: [steps]."""
        starts = np.full(len(self.step_numbers), np.inf)
        is_compute = (self.step_index >= 0) & (self.kind < len(COMPUTE_KINDS))
        np.minimum.at(starts, self.step_index[is_compute], self.start[is_compute])
        return starts


@dataclass(frozen=True, eq=False)
class RankStep:
    """One step of one rank: its spans, cut to the step, whose times are seconds from its beginning.

    begins: [n] whether each span began in it.
    """

    rank: int
    step_time: Seconds
    spans: RankSpans
    is_begun: FloatArray

    @cached_property
    def category_seconds(self) -> FloatArray:
        """Seconds of SPAN_PARTS: [4], summing to the step."""
        kind_sets = (COMPUTE_KINDS, (*COMPUTE_KINDS, GpuSpanKind.COMMUNICATION), GPU_SPAN_KINDS)
        compute, with_comm, busy = (float(self._merged_intervals(*some).seconds.sum()) for some in kind_sets)
        return np.array([compute, with_comm - compute, busy - with_comm, max(0.0, self.step_time - busy)])

    @cached_property
    def comm_seconds(self) -> Seconds:
        """Seconds in which something is communicated, hidden or not."""
        return float(self._merged_intervals(GpuSpanKind.COMMUNICATION).seconds.sum())

    @cached_property
    def hidden_seconds(self) -> Seconds:
        """Those of them in which kernels compute."""
        _, _, common_time = intersect(
            self._merged_intervals(GpuSpanKind.COMMUNICATION), self._merged_intervals(*COMPUTE_KINDS)
        )
        return float(common_time.seconds.sum())

    def kind_totals(self) -> FloatArray:
        """How many spans of each of SPAN_KINDS began, and their seconds, of all streams together: [2, kinds]."""
        return np.stack([self._sum_by_kind(self.is_begun), self._sum_by_kind(self.spans.end - self.spans.start)])

    def label_totals(self) -> FloatArray:
        """The same of each label: [2, labels]."""
        durations, label_count = self.spans.end - self.spans.start, len(self.spans.labels)
        return np.stack(
            [np.bincount(self.spans.label_index, array, minlength=label_count) for array in (self.is_begun, durations)]
        )

    def stream_seconds(self) -> dict[int, FloatArray]:
        """Seconds in which each stream computes, communicates, copies to or from the host, and does nothing: [4]."""
        seconds_by_stream = {}
        for stream in np.unique(self.spans.stream).tolist():
            kind_sets = (COMPUTE_KINDS, (GpuSpanKind.COMMUNICATION,), (GpuSpanKind.HOST,))
            busy = [float(self._merged_intervals(*kinds, stream=stream).seconds.sum()) for kinds in kind_sets]
            seconds_by_stream[int(stream)] = np.array([*busy, max(0.0, self.step_time - sum(busy))])
        return seconds_by_stream

    def _sum_by_kind(self, weights: FloatArray) -> FloatArray:
        return np.bincount(self.spans.kind, weights, minlength=len(GPU_SPAN_KINDS)).astype(np.float64, copy=False)

    def _merged_intervals(self, *kinds: GpuSpanKind, stream: int | None = None) -> Intervals:
        is_selected = np.isin(self.spans.kind, [GPU_SPAN_KINDS.index(kind) for kind in kinds])
        is_selected &= (self.spans.stream == stream) if stream is not None else True
        zeros = np.zeros(int(is_selected.sum()), dtype=np.int64)
        return Intervals(zeros, self.spans.start[is_selected], self.spans.end[is_selected]).merge_overlapping()


@dataclass(frozen=True, slots=True, eq=False)
class ProfiledStep:
    """The step that stands for all that a profiler saw.

    number: the profiler's; step_times: [steps] seconds of those that are whole, the mean over ranks.
    """

    step_number: int
    step_times: FloatArray
    ranks: tuple[RankStep, ...]

    @property
    def step_time(self) -> Seconds:
        """The mean over ranks."""
        return float(np.mean([rank.step_time for rank in self.ranks]))

    @property
    def category_seconds(self) -> FloatArray:
        """Seconds of SPAN_PARTS, the mean over ranks: [4]."""
        return np.asarray(np.mean([rank.category_seconds for rank in self.ranks], axis=0))

    @property
    def kind_totals(self) -> FloatArray:
        """As `kind_totals`, the mean over ranks: [2, kinds]."""
        return np.asarray(np.mean([rank.kind_totals() for rank in self.ranks], axis=0))

    @property
    def comm_seconds(self) -> Seconds:
        """Seconds in which something is communicated, hidden or not, the mean over ranks."""
        return float(np.mean([rank.comm_seconds for rank in self.ranks]))

    @property
    def hidden_seconds(self) -> Seconds:
        """Those of them in which kernels compute."""
        return float(np.mean([rank.hidden_seconds for rank in self.ranks]))

    def stream_seconds(self) -> dict[int, FloatArray]:
        """As `stream_seconds`, the mean over the ranks that have the stream."""
        seconds_by_stream: dict[int, list[FloatArray]] = {}
        for rank in self.ranks:
            for stream, seconds in rank.stream_seconds().items():
                seconds_by_stream.setdefault(stream, []).append(seconds)
        return {stream: np.mean(rank_seconds, axis=0) for stream, rank_seconds in sorted(seconds_by_stream.items())}

    def collective_totals(self) -> dict[ProfiledCollective, FloatArray]:
        """How many of each began, and their seconds, the mean over ranks: [2]."""
        return self._totals_by(lambda label: None if label.collective is None else label.collective.without_group)

    def matmul_totals(self) -> dict[tuple[int, int, int, int], FloatArray]:
        """The same of matrix products whose sizes are known."""
        return self._totals_by(lambda label: label.matmul_shape)

    def _totals_by(self, key_function: Callable[[GpuSpanLabel], _Key | None]) -> dict[_Key, FloatArray]:
        totals: dict[_Key, FloatArray] = {}
        for rank in self.ranks:
            sums = rank.label_totals()
            for index, label in enumerate(rank.spans.labels):
                key = key_function(label)
                if key is not None and sums[:, index].any():
                    totals[key] = totals.get(key, np.zeros(2)) + sums[:, index] / len(self.ranks)
        return totals


def median_step(ranks: Sequence[RankSpans], single_step_time: Seconds | None = None) -> ProfiledStep:
    """The step with the median time of those that are whole, or the only one.

    ranks: with equal `numbers`; seconds: what the only step takes, where that is known; else it lasts from the first
    span of any rank to the end of the last one.
    """
    starts = np.array([rank.step_starts() for rank in ranks])
    if starts.shape[1] == 1:
        first, end = _step_bounds(ranks)
        step_time = end - first if single_step_time is None else single_step_time
        return _build_step(
            ranks, 0, np.array([step_time]), np.full((len(ranks), 2), first) + np.array([0.0, step_time])
        )
    times = np.diff(starts, axis=1)
    means = times.mean(axis=0)
    step_index = int(np.argsort(means, kind="stable")[(len(means) - 1) // 2])
    return _build_step(ranks, step_index, means, starts[:, step_index : step_index + 2])


def _step_bounds(ranks: Sequence[RankSpans]) -> tuple[Seconds, Seconds]:
    """When the first span that belongs to a step begins, and when the last one ends."""
    selections = [(rank, rank.step_index >= 0) for rank in ranks]
    return min(rank_spans.start[in_step].min() for rank_spans, in_step in selections), max(
        item.end[in_step].max() for item, in_step in selections
    )


def _build_step(
    ranks: Sequence[RankSpans], step_index: int, step_times: FloatArray, bounds: FloatArray
) -> ProfiledStep:
    rank_steps = tuple(_clip_spans(rank, *bound) for rank, bound in zip(ranks, bounds.tolist(), strict=True))
    return ProfiledStep(ranks[0].step_numbers[step_index], step_times, rank_steps)


def _clip_spans(spans: RankSpans, begin: Seconds, end: Seconds) -> RankStep:
    """What runs between two moments."""
    selected = np.flatnonzero((spans.end > begin) & (spans.start < end))
    start_times, end_times = spans.start[selected], spans.end[selected]
    clipped = replace(
        spans,
        start=np.maximum(start_times, begin) - begin,
        end=np.minimum(end_times, end) - begin,
        stream=spans.stream[selected],
        label_index=spans.label_index[selected],
        step_index=spans.step_index[selected],
    )
    return RankStep(spans.rank, end - begin, clipped, (start_times >= begin).astype(np.float64))


def collective_durations(
    ranks: Sequence[RankSpans], step_index: int | None = None
) -> dict[tuple[ProfiledCollective, int], dict[int, Seconds]]:
    """What each collective took on each rank of its group, as far as they have traces; of one group in turn.

    step: only those of this place in `numbers`; else all that were launched in a step.
    """
    durations: dict[tuple[ProfiledCollective, int], dict[int, Seconds]] = {}
    for spans in ranks:
        occurrences: dict[ProfiledCollective, int] = {}
        for span_index in np.flatnonzero(
            spans.step_index >= 0 if step_index is None else spans.step_index == step_index
        ).tolist():
            collective = spans.labels[int(spans.label_index[span_index])].collective
            if collective is not None:
                occurrences[collective] = occurrences.get(collective, -1) + 1
                duration = float(spans.end[span_index] - spans.start[span_index])
                durations.setdefault((collective, occurrences[collective]), {})[spans.rank] = duration
    return durations


def collective_wait_seconds(ranks: Sequence[RankSpans], step_number: int) -> Seconds:
    """Seconds of a step in which collectives wait for other members, the mean over ranks.

    That is what they last longer than the shortest of their members' kernels; those whose members have not all traces
    are left out. number: the profiler's, of the step.
    """
    durations = collective_durations(ranks, ranks[0].step_numbers.index(step_number)).items()
    complete = (np.array([*item.values()]) for (collective, _), item in durations if len(item) == collective.group_size)
    return float(sum((array - array.min()).sum() for array in complete)) / len(ranks)
