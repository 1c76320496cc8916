"""Time breakdown of a profiled step, kernel by kernel.

A profiler records what ran on which stream of a GPU and when, and knows nothing of layers or schedules.
Every instant of a step has one category: computing kernels; otherwise communication; otherwise copies to or
from the host; otherwise idle. So the categories of a rank sum to its step.

A step lasts from its first computing kernel to that of the next one, on each rank; the last step until
nothing runs any more, so it is left out if there are others. Of several steps the one with the median time
(averaged over ranks) is reported. Spans that cross a step boundary are clipped to the step.
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
    """Kind of a GPU span, as far as kernel names reveal it."""

    MATMUL = "matmuls"
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
"""Kinds of computing kernels; they come first in `GPU_SPAN_KINDS`."""
_Key = TypeVar("_Key", bound=Hashable)


class StepCategory(Enum):
    """Category of an instant of a step; the first one that applies."""

    COMPUTE = "compute"
    EXPOSED = "exposed communication"
    HOST = "exposed copies"
    IDLE = "idle"


STEP_CATEGORIES: Final = tuple(StepCategory)


@dataclass(frozen=True, slots=True)
class ProfiledCollective:
    """A profiled collective.

    name: as in `program.task.CollectiveType`, or the library's own name where it is none of these.

    group_size: ranks of its group; payload: bytes as `program.task.CollectiveType` counts them; both 0 where
    the trace does not say; members: of the group, as far as known; group_name: its name in the trace;
    reduction: the reduction operation.
    """

    name: str
    group_size: int = 0
    payload: Bytes = 0.0
    group_name: str = ""
    members: tuple[int, ...] = ()
    reduction: str = ""

    @property
    def without_group(self) -> "ProfiledCollective":
        """The same collective, regardless of the group."""
        return ProfiledCollective(self.name, self.group_size, self.payload)


@dataclass(frozen=True, slots=True)
class GpuSpanLabel:
    """Label of a span. matmul_shape: (m, n, k, batch) of a matmul (m >= n), where known."""

    name: str
    kind: GpuSpanKind
    collective: ProfiledCollective | None = None
    matmul_shape: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, eq=False)
class RankSpans:
    """Spans of one rank's GPU, in columns of one length, by start.

    start, end: seconds on a clock that all ranks share; stream: stream id; label_index: index into `labels`;
    step_index: index into `step_numbers` (the profiler's step numbers), -1: launched in no step.
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
        """[n] index in `GPU_SPAN_KINDS`."""
        kind_by_label = np.array([GPU_SPAN_KINDS.index(label.kind) for label in self.labels], dtype=np.int64)
        return np.asarray(kind_by_label[self.label_index])

    def step_starts(self) -> FloatArray:
        """Start of the first computing kernel of each step, infinite where there is none: [steps]."""
        starts = np.full(len(self.step_numbers), np.inf)
        is_compute = (self.step_index >= 0) & (self.kind < len(COMPUTE_KINDS))
        np.minimum.at(starts, self.step_index[is_compute], self.start[is_compute])
        return starts


@dataclass(frozen=True, eq=False)
class RankStep:
    """One step of one rank: its spans, clipped to the step, with times in seconds from its start.

    is_begun: [n] 1.0 for spans that began within the step, else 0.0.
    """

    rank: int
    step_time: Seconds
    spans: RankSpans
    is_begun: FloatArray

    @cached_property
    def category_seconds(self) -> FloatArray:
        """Seconds by `STEP_CATEGORIES`: [4], summing to the step."""
        kind_sets = (COMPUTE_KINDS, (*COMPUTE_KINDS, GpuSpanKind.COMMUNICATION), GPU_SPAN_KINDS)
        compute, with_comm, busy = (float(self._merged_intervals(*kinds).seconds.sum()) for kinds in kind_sets)
        return np.array([compute, with_comm - compute, busy - with_comm, max(0.0, self.step_time - busy)])

    @cached_property
    def comm_seconds(self) -> Seconds:
        """Seconds with communication in flight, hidden or not."""
        return float(self._merged_intervals(GpuSpanKind.COMMUNICATION).seconds.sum())

    @cached_property
    def hidden_seconds(self) -> Seconds:
        """Seconds with communication in flight while kernels compute."""
        _, _, common_time = intersect(
            self._merged_intervals(GpuSpanKind.COMMUNICATION), self._merged_intervals(*COMPUTE_KINDS)
        )
        return float(common_time.seconds.sum())

    def kind_totals(self) -> FloatArray:
        """Number of spans of each of `GPU_SPAN_KINDS` that began, and their seconds on all streams: [2, kinds]."""
        return np.stack([self._sum_by_kind(self.is_begun), self._sum_by_kind(self.spans.end - self.spans.start)])

    def label_totals(self) -> FloatArray:
        """Number of spans with each label that began, and their seconds: [2, labels]."""
        durations, label_count = self.spans.end - self.spans.start, len(self.spans.labels)
        return np.stack(
            [np.bincount(self.spans.label_index, array, minlength=label_count) for array in (self.is_begun, durations)]
        )

    def stream_seconds(self) -> dict[int, FloatArray]:
        """Seconds in which each stream computes, communicates, copies to or from the host, and is idle: [4]."""
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
    """The step that represents a profile.

    step_number: the profiler's; step_times: [steps] seconds of complete steps, averaged over ranks.
    """

    step_number: int
    step_times: FloatArray
    ranks: tuple[RankStep, ...]

    @property
    def step_time(self) -> Seconds:
        """Step time in seconds, averaged over ranks."""
        return float(np.mean([rank.step_time for rank in self.ranks]))

    @property
    def category_seconds(self) -> FloatArray:
        """Seconds by `STEP_CATEGORIES`, averaged over ranks: [4]."""
        return np.asarray(np.mean([rank.category_seconds for rank in self.ranks], axis=0))

    @property
    def kind_totals(self) -> FloatArray:
        """As `RankStep.kind_totals`, averaged over ranks: [2, kinds]."""
        return np.asarray(np.mean([rank.kind_totals() for rank in self.ranks], axis=0))

    @property
    def comm_seconds(self) -> Seconds:
        """Seconds with communication in flight, hidden or not, averaged over ranks."""
        return float(np.mean([rank.comm_seconds for rank in self.ranks]))

    @property
    def hidden_seconds(self) -> Seconds:
        """Seconds with communication in flight while kernels compute, averaged over ranks."""
        return float(np.mean([rank.hidden_seconds for rank in self.ranks]))

    def stream_seconds(self) -> dict[int, FloatArray]:
        """As `RankStep.stream_seconds`, averaged over the ranks that have the stream."""
        seconds_by_stream: dict[int, list[FloatArray]] = {}
        for rank in self.ranks:
            for stream, seconds in rank.stream_seconds().items():
                seconds_by_stream.setdefault(stream, []).append(seconds)
        return {stream: np.mean(rank_seconds, axis=0) for stream, rank_seconds in sorted(seconds_by_stream.items())}

    def collective_totals(self) -> dict[ProfiledCollective, FloatArray]:
        """Count and seconds of each collective, averaged over ranks: [2]."""
        return self._totals_by(lambda label: None if label.collective is None else label.collective.without_group)

    def matmul_totals(self) -> dict[tuple[int, int, int, int], FloatArray]:
        """Count and seconds of each matmul shape, where known, averaged over ranks: [2]."""
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
    """The complete step with the median time, or the only one.

    ranks: with equal `step_numbers`; single_step_time: time of the only step, if known; otherwise it lasts from
    the first span of any rank to the end of the last one.
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
    """Start of the first span that belongs to a step, and end of the last one."""
    selections = [(rank, rank.step_index >= 0) for rank in ranks]
    return min(rank_spans.start[in_step].min() for rank_spans, in_step in selections), max(
        spans.end[in_step].max() for spans, in_step in selections
    )


def _build_step(
    ranks: Sequence[RankSpans], step_index: int, step_times: FloatArray, bounds: FloatArray
) -> ProfiledStep:
    rank_steps = tuple(_clip_spans(rank, *bound) for rank, bound in zip(ranks, bounds.tolist(), strict=True))
    return ProfiledStep(ranks[0].step_numbers[step_index], step_times, rank_steps)


def _clip_spans(spans: RankSpans, begin: Seconds, end: Seconds) -> RankStep:
    """Spans clipped to a time range."""
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
    """Duration of each collective on every profiled rank of its group; keys: (collective, occurrence index).

    step_index: restricts to this index in `step_numbers`; otherwise all that were launched in a step.
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
    """Seconds of a step in which collectives wait for other members, averaged over ranks.

    That is how much longer they last than the shortest of their members' kernels; collectives with members that
    were not profiled are left out. step_number: the profiler's number of the step.
    """
    durations = collective_durations(ranks, ranks[0].step_numbers.index(step_number)).items()
    complete = (
        np.array([*seconds_by_rank.values()])
        for (collective, _), seconds_by_rank in durations
        if len(seconds_by_rank) == collective.group_size
    )
    return float(sum((array - array.min()).sum() for array in complete)) / len(ranks)
