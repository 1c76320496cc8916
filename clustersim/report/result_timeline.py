"""How does a trace become a timeline? Spans of the shown ranks with labels and styles.

A message is shown on its sender: the receiver's event repeats it, so a span that waits for a message has
the cause of the send as its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.cached_method import cached_by
from clustersim.common.units import format_bandwidth, format_flops, format_seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.model.kernels import Kernel
from clustersim.parallel.mesh import HOST_GROUP, LAUNCH_GROUP
from clustersim.program.placement import looped_placement
from clustersim.program.task import CommOp, CommOverlap, ComputeTask, Segment, Stream, Task
from clustersim.report.export.span_descriptions import action_of_task, describe_comm_task, style_of_task
from clustersim.report.export.span_table import resolve_message_cause
from clustersim.report.html_document import render_text
from clustersim.report.kernel_templates import build_kernel_templates
from clustersim.report.labels import pipeline_row_type, stage_name
from clustersim.report.theme import CATEGORY_STYLES
from clustersim.report.timeline_data import PipelineTimeline, TimelinePath, TimelineRow, TimelineSpans
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario

_LANES: Final = {
    "compute": (Stream.COMPUTE,),
    "data parallel": (Stream.DP,),
    "pipeline": (Stream.SEND_NEXT, Stream.SEND_PREVIOUS, Stream.IMAGES),
}
_OFFLOAD_LANES: Final = {"to the host": (Stream.D2H,), "host": (Stream.HOST,), "from the host": (Stream.H2D,)}
_EP_LANES: Final = {"experts": (Stream.EP,)}
_LAUNCH_LANES: Final = {"launches": (Stream.LAUNCH,)}
_MAX_KERNELS: Final = 4


def build_timeline(result: SimulationResult, ranks: Sequence[int]) -> PipelineTimeline:
    """Spans of the given simulated ranks (one row each), the kernels inside them, and the critical path on them."""
    scenario = result.scenario
    stages = np.minimum(result.program.program_index[list(ranks)], scenario.layout.pp - 1).tolist()
    stands_for, straggler_ranks = result.trace.represented_counts, result.stragglers.listed_ranks
    rows = tuple(
        TimelineRow(
            stage_name(scenario, stage), f"{stage} "
                                         "slow" if rank in straggler_ranks else str(stage), rank, int(stands_for[rank]),
            f"slow rank {rank}" if rank in straggler_ranks else f"rank {rank}" if stages.count(stage) > 1 else "",
        )
        for stage, rank in zip(stages, ranks, strict=True)
    )  # fmt: skip
    positions = _event_positions(result, ranks)
    shown_events = np.flatnonzero((positions >= 0).all(axis=0))
    return PipelineTimeline(
        rows,
        tuple(_lane_streams(result)),
        _timeline_spans(result, ranks, shown_events, positions[:, shown_events]),
        _timeline_path(result, positions),
        build_kernel_templates(result, shown_events),
        pipeline_row_type(scenario),
        describe_stage_placement(scenario),
        tuple(np.cumsum(result.step_times)[:-1].tolist()),
        candidate_row_count=max(len(rows), len(result.ledgers)),
    )


def describe_stage_placement(scenario: Scenario) -> str:
    """Explanation of rows that hold several stages; empty if each row is one stage."""
    placement = scenario.placement
    is_interleaved = placement == looped_placement(placement.pipeline_size, len(placement.stages_on_rank(0)))
    return render_text("row_note", placement=placement, in_turn=is_interleaved, mirrored=scenario.layout.mirrored)


def _lane_streams(result: SimulationResult) -> dict[str, tuple[Stream, ...]]:
    """Streams of each lane; host lanes only with offloading, lanes of experts and launches only if those are tasks."""
    uses_host = HOST_GROUP.name in result.program.groups
    uses_ep_stream = any(Stream.EP in program.streams for program in result.program.programs)
    launch_lanes = _LAUNCH_LANES if LAUNCH_GROUP.name in result.program.groups else {}
    return _LANES | (_OFFLOAD_LANES if uses_host else {}) | (_EP_LANES if uses_ep_stream else {}) | launch_lanes


def _event_positions(result: SimulationResult, ranks: Sequence[int]) -> IntArray:
    """Timeline row and lane of each trace event, -1 if not shown: [2, events]."""
    row = np.full(result.rank_count, -1)
    row[ranks] = np.arange(len(ranks))
    lane_of_stream = {stream: lane for lane, streams in enumerate(_lane_streams(result).values()) for stream in streams}
    lane = np.array([lane_of_stream.get(stream, -1) for stream in Stream])
    return np.stack((row[result.trace.rank], lane[result.trace.stream]))


def _timeline_path(result: SimulationResult, positions: IntArray) -> TimelinePath:
    events = result.critical_path[positions[1, result.critical_path] >= 0]
    is_shown = positions[0, events] >= 0
    follows = np.concatenate((is_shown[:1], is_shown[:-1]))[is_shown]
    events = events[is_shown]
    row, lane = positions[:, events]
    return TimelinePath(row, lane, result.trace.start[events], result.trace.end[events], follows)


def _timeline_spans(
    result: SimulationResult, ranks: Sequence[int], events: IntArray, positions: IntArray
) -> TimelineSpans:
    """Columns of some trace events. positions: [2, events] their rows and lanes."""
    trace, (row, lane) = result.trace, positions
    span_of_event = np.full(len(trace) + 1, -1)  # the last entry is the target of cause -1
    span_of_event[events] = np.arange(len(events))
    texts: dict[str, int] = {}
    columns = _task_columns(result, ranks, texts)[:, row, trace.task[events]]
    waiting_since = np.where(lane == 0, trace.queued_times(events), trace.ready[events])
    return TimelineSpans(
        row=row,
        lane=lane,
        category=columns[0],
        microbatch=columns[1],
        chunk=columns[2],
        waiting_since=waiting_since,
        start=trace.start[events],
        end=trace.end[events],
        bytes=columns[3].astype(np.float64),
        name=columns[4],
        detail=columns[5],
        cause=span_of_event[resolve_message_cause(trace, events)],
        waited=trace.waited[events],
        slowed=trace.slowed[events],
        texts=tuple(texts),
        microbatches_per_step=result.scenario.microbatch_count if result.scenario.steps > 1 else 0,
    )


def _task_columns(result: SimulationResult, ranks: Sequence[int], texts: dict[str, int]) -> IntArray:
    """Style, microbatch, chunk, bytes, name and detail of every task: [columns, rows, tasks]."""
    programs = [result.program.programs[int(result.program.program_index[rank])] for rank in ranks]
    columns = np.full((6, len(ranks), max(len(program.tasks) for program in programs)), -1)
    for stage, (rank, program) in enumerate(zip(ranks, programs, strict=True)):
        labeler = _TaskLabeler(result, rank, texts)
        for task_id, task in enumerate(program.tasks):
            columns[:, stage, task_id] = labeler.task_columns(task)
    return columns


@dataclass(frozen=True)
class _TaskLabeler:
    """Labels the tasks of one rank.

    texts: index of each text.
    """

    result: SimulationResult
    rank: int
    texts: dict[str, int]

    def task_columns(self, task: Task) -> tuple[int, ...]:
        """Style, microbatch, chunk, bytes, name and detail of a task."""
        body = task.segment if isinstance(task, ComputeTask) else task.comm_op
        action, payload = action_of_task(task), 0 if isinstance(task, ComputeTask) else int(task.comm_op.payload)
        chunk = -1 if action is None else self.result.scenario.placement.chunk_index(action.stage)
        style = CATEGORY_STYLES.index(style_of_task(task))
        return style, -1 if action is None else action.microbatch, chunk, payload, *self._label_indices(body, task)

    @cached_by(lambda _, body, _task: body)
    def _label_indices(self, _body: Segment | CommOp, task: Task) -> tuple[int, int]:
        """Indices of the name and detail of a task, equal for those of one segment or comm op."""
        name, detail = self._name_and_detail(task)
        return self._text_index(name), self._text_index(detail)

    def _text_index(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts)) if text else -1

    def _name_and_detail(self, task: Task) -> tuple[str, str]:
        if isinstance(task, ComputeTask):
            return task.segment.name, self._describe_longest_operations(task.segment)
        description = describe_comm_task(task, self.result.cost.comm_timing_by_group(task.comm_op))
        return description.title, description.detail

    def _describe_longest_operations(self, segment: Segment) -> str:
        """The longest operations of a segment, equal ones merged: duration, rate and bottleneck, one line each."""
        timing = self.result.cost.time_segment(self.rank, segment)
        indices_by_body: dict[Kernel | CommOp | CommOverlap, list[int]] = {}
        for index, operation in enumerate(segment.operations):
            indices_by_body.setdefault(operation.body, []).append(index)
        longest = sorted(indices_by_body.values(), key=lambda indices: -len(indices) * timing.durations[indices[0]])[
            :_MAX_KERNELS
        ]
        return "\n".join(_describe_operation(segment, timing, indices) for indices in longest)


def _describe_operation(segment: Segment, timing: SegmentTiming, indices: Sequence[int]) -> str:
    """Count, duration, rate and bottleneck of equal operations. indices: theirs in the segment."""
    operation, seconds = segment.operations[indices[0]], timing.durations[indices[0]]
    kernel = operation.kernel
    count = f"{len(indices)} × " if len(indices) > 1 else ""
    name = " + ".join(body.name for body in (kernel, operation.comm_op) if body is not None)
    rate = _format_rate(seconds, kernel.flops if kernel else 0.0, kernel.bytes if kernel else 0.0)
    return f"  {count}{name} {format_seconds(seconds)}{rate}, {timing.bottleneck[indices[0]].value}"


def _format_rate(seconds: float, flops: float, bytes_moved: float) -> str:
    """FLOP rate of compute-dense work, else memory bandwidth; empty if neither applies."""
    if seconds <= 0:
        return ""
    if flops > 20 * bytes_moved:
        return f" at {format_flops(flops / seconds)}"
    return f" at {format_bandwidth(bytes_moved / seconds)}" if bytes_moved > 0 else ""
