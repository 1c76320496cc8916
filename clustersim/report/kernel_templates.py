"""Which kernels run inside the passes that the page shows?

Most runs of a segment take exactly its isolated time. They are recognized by their duration and share one
template; only runs that waited, were slowed or vary are evaluated individually. Equal templates are stored
once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.cached_method import cached_method
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.program.task import ComputeTask, Segment
from clustersim.report.export.span_descriptions import SpanDescription, describe_operation
from clustersim.report.theme import CATEGORY_STYLES
from clustersim.report.timeline_data import KernelLabel, KernelTemplates
from clustersim.results.simulation_result import SimulationResult

_MAX_OPERATIONS: Final = 1_000_000
_ROUNDING: Final = 1e-9  # relative to the makespan
_DETAIL_LINES: Final = ("kernel", "dtype", "shape"), ("collective", "group")


def build_kernel_templates(result: SimulationResult, events: IntArray) -> KernelTemplates:
    """Operations inside the spans of these trace events; at most `_MAX_OPERATIONS` that no other span shares."""
    templates = _TemplateBuilder(result, _ROUNDING * result.trace.makespan)
    template_ids = np.full(len(events), -1)
    ranks = result.trace.rank[events]
    for rank in np.unique(ranks).tolist():
        rank_events = np.flatnonzero(ranks == rank)
        template_ids[rank_events] = templates.add_rank(rank, events[rank_events])
    return templates.to_kernel_templates(template_ids)


@dataclass
class _TemplateBuilder:
    """Distinct templates and labels, by index in order of first use.

    tolerance: seconds by which equal times may differ; columns: label indices, gaps and durations of each
    template; template_ids: index of each template by its key; label_ids: index of each label;
    unshared_operations: operations of individually evaluated runs so far; omitted_spans: spans beyond the limit.
    """

    result: SimulationResult
    tolerance: Seconds
    columns: list[tuple[IntArray, FloatArray, FloatArray]] = field(default_factory=list)
    template_ids: dict[object, int] = field(default_factory=dict)
    label_ids: dict[KernelLabel, int] = field(default_factory=dict)
    unshared_operations: int = 0
    omitted_spans: int = 0

    def add_rank(self, rank: int, events: IntArray) -> IntArray:
        """Template index of each of a rank's events: -1 for communication and for spans beyond the limit."""
        trace = self.result.trace
        tasks = self.result.program.programs[int(self.result.program.program_index[rank])].tasks
        segments = {
            task_id: task_ids.segment for task_id, task_ids in enumerate(tasks) if isinstance(task_ids, ComputeTask)
        }
        timings = {
            segment: self.result.cost.time_segment(rank, segment) for segment in dict.fromkeys(segments.values())
        }
        task_ids = trace.task[events].tolist()
        isolated_seconds = np.array(
            [timings[segments[task_id]].seconds if task_id in segments else np.nan for task_id in task_ids]
        )
        deviation = np.abs(trace.end[events] - trace.start[events] - isolated_seconds)
        was_delayed = (trace.waited[events] + trace.slowed[events] != 0) | np.isin(events, trace.contention.event)
        is_undelayed = (deviation <= self.tolerance) & ~was_delayed
        template_ids = np.full(len(events), -1)
        for index in np.flatnonzero(is_undelayed).tolist():
            template_ids[index] = self._isolated_template(segments[task_ids[index]], timings[segments[task_ids[index]]])
        delayed = np.flatnonzero(~is_undelayed & ~np.isnan(isolated_seconds))
        if len(delayed):
            template_ids[delayed] = self._delayed_templates(
                rank, events[delayed], [segments[task_ids[index]] for index in delayed.tolist()]
            )
        return template_ids

    def _isolated_template(self, segment: Segment, timing: SegmentTiming) -> int:
        """Template of runs that take their segment's isolated time."""
        key, labels = (segment, timing), self._label_ids(segment, timing)
        duration = np.array(timing.durations)
        return self._add(key, labels, np.zeros_like(duration), duration)

    def _delayed_templates(self, rank: int, events: IntArray, segments: Sequence[Segment]) -> list[int]:
        """Templates of delayed or jittered runs; -1 beyond the limit. segments: those of the events."""
        trace = self.result.trace
        cumulative_operations = np.cumsum([len(segment.operations) for segment in segments])
        allowed_count = int(
            np.searchsorted(cumulative_operations, _MAX_OPERATIONS - self.unshared_operations, side="right")
        )
        self.omitted_spans += len(events) - allowed_count
        if not allowed_count:
            return [-1] * len(events)
        self.unshared_operations += int(cumulative_operations[allowed_count - 1])
        tasks, starts = trace.task[events[:allowed_count]].tolist(), trace.start[events[:allowed_count]].tolist()
        operations = self.result.operation_spans(rank, frozenset(tasks))
        first = np.searchsorted(operations.task, np.arange(int(operations.task.max()) + 2))
        templates = []
        for task_id, start, segment in zip(tasks, starts, segments[:allowed_count], strict=True):
            selection = slice(int(first[task_id]), int(first[task_id + 1]))
            starts_inside, ends = operations.start[selection], operations.end[selection]
            gap, duration = starts_inside - np.concatenate(([start], ends[:-1])), ends - starts_inside
            labels = self._label_ids(segment, self.result.cost.time_segment(rank, segment))
            gap = np.where(gap > self.tolerance, gap, 0.0)
            key = (labels.tobytes(), gap.astype(np.float32).tobytes(), duration.astype(np.float32).tobytes())
            templates.append(self._add(key, labels, gap, duration))
        return templates + [-1] * (len(events) - allowed_count)

    def _add(self, key: object, labels: IntArray, gap: FloatArray, duration: FloatArray) -> int:
        if key not in self.template_ids:
            self.template_ids[key] = len(self.columns)
            self.columns.append((labels, gap, duration))
        return self.template_ids[key]

    @cached_method
    def _label_ids(self, segment: Segment, timing: SegmentTiming) -> IntArray:
        descriptions = (
            describe_operation(operation, timing, index) for index, operation in enumerate(segment.operations)
        )
        label_ids = [
            self.label_ids.setdefault(build_kernel_label(description), len(self.label_ids))
            for description in descriptions
        ]
        return np.array(label_ids, dtype=np.int64)

    def to_kernel_templates(self, template: IntArray) -> KernelTemplates:
        """All templates, concatenated."""
        empty = (np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))
        label, gap, duration = (np.concatenate(column) for column in zip(empty, *self.columns, strict=True))
        first = np.cumsum([0, *(len(labels) for labels, _, _ in self.columns)])
        return KernelTemplates(template, first, label, gap, duration, tuple(self.label_ids), self.omitted_spans)


def build_kernel_label(description: SpanDescription) -> KernelLabel:
    """Label on the page of an operation, from its description in exported traces."""
    arguments = description.arguments
    lines = [", ".join(str(arguments[key]) for key in keys if key in arguments) for keys in _DETAIL_LINES]
    lines += [f"bound by {arguments['bottleneck']}", str(arguments["duration_from"])]  # bottleneck and provenance
    return KernelLabel(
        description.name,
        CATEGORY_STYLES.index(description.category),
        tuple(filter(None, lines)),
        float(arguments.get("flop", 0)),
        float(arguments.get("memory_bytes", 0)),
        float(arguments.get("payload_bytes", 0)),
    )
