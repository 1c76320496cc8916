"""When does one rank run its tasks? The rank of the scalar engine: simpy processes that execute its streams.

A simulated rank stands for all ranks of its symmetry class. A collective therefore waits only for the
simulated ranks that stand for its members: for nobody if all members are of one class.

For each task of a stream: wait until its dependencies are done, run it, record its span, wake those who wait
for it.

    ComputeTask      lasts as long as its segment. An isolated segment (no other simulated rank takes part in
        its collectives, and no links are shared) is one event. If other simulated ranks take part, the group
        runs it jointly (`group_segments`); if links are shared, it is split into sub-segments
        (`split_segment`).
    CollectiveTask   starts when the last member of its group has arrived (`rendezvous`).
    SendTask         starts when it is issued, as receive buffers are pre-posted; it ends with its ReceiveTask.

While a DP or EP collective is in flight, compute kernels run at a reduced rate, given by an interference
level: an index into the slowdowns by kernel class (0: nothing in flight), not a degree. With both in flight,
the level of the pair applies (for each class the larger slowdown of the two). Where the device model also has
slowdowns of collectives by kernels, the collective is slowed as well (`in_flight_collective`).

While a stream waits or runs a task, fast-forward (`fast_forward.steady_state`) may skip periods, that is
microbatches or layers of a steady state. This moves the head of the stream to a task of a later period, so
whoever resumes after a `yield` reads the head from the cursor again.
"""

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import simpy

from clustersim.common.units import Seconds
from clustersim.engine.kernel.in_flight_collective import InFlightCollective
from clustersim.engine.kernel.rendezvous import Rendezvous
from clustersim.engine.recording.operation_log import EndTimes
from clustersim.engine.recording.recorder import ContentionDelay, WaitAndSlowdown
from clustersim.engine.recording.unroll import EVENT_KEY_STRIDE, Repetition
from clustersim.engine.scalar.fast_path import FastPath
from clustersim.engine.scalar.fast_path_run import FastPathRun
from clustersim.engine.scalar.group_segments import Participant
from clustersim.engine.scalar.segment_action import ProgressCurves, SegmentAction
from clustersim.engine.scalar.shared_state import SharedState
from clustersim.engine.scalar.skipped_period import SkippedPeriod
from clustersim.engine.scalar.split_segment import SegmentSplitter
from clustersim.engine.scalar.sub_segment import ContendedTransfer, SubSegment
from clustersim.program.program import RankProgram
from clustersim.program.task import OVERLAPPING_STREAMS, CollectiveTask, CommOp, ComputeTask, Segment, SendTask, Stream

StreamProcess = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class StreamCursor:
    """Position of a stream in its tasks: `task_ids[position]` is the head, the task that it runs or waits to run.

    in_rendezvous: the head has arrived at a collective and waits for other members. For fast-forward: skipped:
    periods were skipped since the head began to wait; repetitions: the skips that moved the head to a later
    period, by which event keys noted before are still to be shifted; skipped_wait: seconds of the skips that did
    not move it, which it waited in addition to those on the clock.
    """

    task_ids: list[int]
    position: int = 0
    in_rendezvous: bool = False
    skipped: bool = False
    repetitions: list[Repetition] = field(default_factory=list)
    skipped_wait: Seconds = 0.0

    def shift_event_key(self, event_key: int) -> int:
        """Key of the head's critical predecessor after the skipped periods; clears `repetitions`."""
        for repetition in self.repetitions:
            event_key = int(repetition.shift_event_keys(np.array(event_key), repetition.count))
        self.repetitions.clear()
        return event_key


def ignore_mark(level: int) -> None:
    """Default `on_mark` callback: does nothing."""


def _ignore_awaited(stream: Stream, task_id: int) -> None:
    """No-op for streams that do not interfere with kernels."""


@dataclass(slots=True)
class RankProcess:
    """One simulated rank: which of its tasks are done, and who waits for which.

    mark_levels: tasks whose completion is reported to `on_mark`, and the loop level to report (`steady_state`:
    microbatches or layers; no interference level); done: [tasks] 1 for completed tasks; cursors: by stream.
    _interference_level, _stream_levels: of what is in flight on the rank, and on each overlapping stream;
    _level_listener: the running operations, which are notified when that changes; _awaited_task_ids: compute task
    that each overlapping stream waits for (`_note_awaited`); _last_no_overlap_task_id: last compute task during
    which none of these can have a collective in flight; _collectives: the latest of each, perhaps done.
    """

    rank_id: int
    shared: SharedState
    program: RankProgram = field(init=False)
    mark_levels: Mapping[int, int] = field(init=False, default_factory=dict)
    on_mark: Callable[[int], None] = field(init=False, default=ignore_mark)
    done: bytearray = field(init=False)
    cursors: dict[Stream, StreamCursor] = field(init=False, default_factory=dict)
    _current_task_id: int = field(init=False, default=-1)
    _completion_events: dict[int, simpy.Event] = field(init=False, default_factory=dict)
    _interference_level: int = field(init=False, default=0)
    _stream_levels: dict[Stream, int] = field(init=False, default_factory=lambda: dict.fromkeys(OVERLAPPING_STREAMS, 0))
    _level_listener: SegmentAction | Participant | None = field(init=False, default=None)
    _awaited_task_ids: dict[Stream, int] = field(
        init=False, default_factory=lambda: dict.fromkeys(OVERLAPPING_STREAMS, -1)
    )
    _last_no_overlap_task_id: int = field(init=False, default=-1)
    _current_segment: Segment | None = field(init=False, default=None)
    _collectives: dict[Stream, tuple[InFlightCollective, CommOp]] = field(init=False, default_factory=dict)
    _curve_cache: dict[Segment, ProgressCurves] = field(init=False, default_factory=dict)
    _isolated_cache: dict[Segment, Seconds | None] = field(init=False, default_factory=dict)
    _splitter: SegmentSplitter = field(init=False)

    def __post_init__(self) -> None:
        self._splitter = SegmentSplitter(self.rank_id, self.shared)
        self.program = self.shared.rank_program(self.rank_id)
        self.done = bytearray(len(self.program.tasks))

    def start(self) -> None:
        """Start a process for every stream of the rank, except the receive stream, which senders advance."""
        task_ids = self.shared.stream_task_ids(self.rank_id)
        self._awaited_task_ids |= {stream: len(self.done) for stream in OVERLAPPING_STREAMS if stream not in task_ids}
        self._last_no_overlap_task_id = min(self._awaited_task_ids.values())
        self.cursors |= {
            stream: StreamCursor(task_ids[stream]) for stream in sorted(task_ids) if stream is not Stream.RECEIVE
        }
        for stream, cursor in self.cursors.items():
            self.shared.environment.process(self._run_stream(stream, cursor))

    def finish_task(self, task_id: int) -> None:
        """Mark a task as done and wake the streams that wait for it."""
        self.done[task_id] = True
        event = self._completion_events.pop(task_id, None)
        if event is not None:
            event.succeed()
        if task_id in self.mark_levels:
            self.on_mark(self.mark_levels[task_id])

    def _run_stream(self, stream: Stream, cursor: StreamCursor) -> StreamProcess:
        """Run the tasks of a stream in order.

        predecessor: event key (rank and task id) of the task whose end allowed the head to start; queued: when the
        stream ended the task before; ready: when all dependencies were done; start: when also all members of its
        collective had arrived.
        """
        environment, done, tasks = self.shared.environment, self.done, self.program.tasks
        add_span, begin_transfer, deliver_message = (
            self.shared.recorder.spans.extend,
            self.shared.transfers.begin_transfer,
            self.shared.deliver_message,
        )
        rank_id, task_ids, event_key_base = self.rank_id, cursor.task_ids, self.rank_id * EVENT_KEY_STRIDE
        note_awaited = self._note_awaited if stream in OVERLAPPING_STREAMS else _ignore_awaited
        predecessor, now = -1, environment.now
        while cursor.position < len(task_ids):
            task_id = task_ids[cursor.position]
            task, queued = tasks[task_id], now
            for dependency in task.depends_on:
                if not done[dependency]:
                    note_awaited(stream, dependency)
                    yield self._completion_event(dependency)
                    note_awaited(stream, -1)
                    predecessor, now = event_key_base + dependency, environment.now
                    if cursor.skipped:
                        predecessor, queued = yield from self._await_after_skip(stream, predecessor, queued)
                        now, task_id = environment.now, task_ids[cursor.position]
                        task = tasks[task_id]
                        break
                elif predecessor < 0:
                    predecessor = event_key_base + dependency
            ready, start = now, now
            waited = slowed = 0.0
            match task:
                case ComputeTask():
                    seconds = self._isolated_seconds(task_id, task.segment)
                    if seconds is None:
                        waited, slowed = yield from self._run_non_isolated_segment(task_id, task.segment)
                    else:
                        yield simpy.Timeout(environment, seconds)
                case CollectiveTask():
                    start, predecessor, skipped_wait = yield from self._run_collective(stream, cursor, predecessor)
                    queued, ready = queued - skipped_wait, ready - skipped_wait
                case SendTask():
                    yield begin_transfer(rank_id, task.comm_op)
                    predecessor = cursor.shift_event_key(predecessor) if cursor.repetitions else predecessor
                    deliver_message(rank_id, cast(SendTask, tasks[task_ids[cursor.position]]), start, predecessor)
            now, task_id = environment.now, task_ids[cursor.position]
            predecessor = cursor.shift_event_key(predecessor) if cursor.repetitions else predecessor
            add_span((rank_id, task_id, stream, predecessor, queued, ready, start, now, waited, slowed))
            cursor.position += 1
            predecessor = event_key_base + task_id
            self.finish_task(task_id)
        note_awaited(stream, len(done))  # behind all tasks: nothing can be in flight any more

    def _await_after_skip(
        self, stream: Stream, predecessor: int, queued: Seconds
    ) -> Generator[simpy.Event, Any, tuple[int, Seconds]]:
        """Wait for the dependencies of the head again after skipped periods, which may have moved it to a later task.

        predecessor, queued: of the head before the wait; returns both as they are after it.
        """
        cursor = self.cursors[stream]
        note_awaited = self._note_awaited if stream in OVERLAPPING_STREAMS else _ignore_awaited
        while cursor.skipped:
            predecessor, queued = cursor.shift_event_key(predecessor), queued - cursor.skipped_wait
            cursor.skipped, cursor.skipped_wait = False, 0.0
            for dependency in self.unmet_dependencies(cursor)[:1]:
                note_awaited(stream, dependency)
                yield self._completion_event(dependency)
                note_awaited(stream, -1)
                predecessor, cursor.skipped = self.rank_id * EVENT_KEY_STRIDE + dependency, True
        return predecessor, queued

    def _run_collective(
        self, stream: Stream, cursor: StreamCursor, predecessor: int
    ) -> Generator[simpy.Event, Any, tuple[Seconds, int, Seconds]]:
        """Run a collective; return its start, its critical predecessor, and seconds of waiting in skipped periods."""
        shared, tasks = self.shared, self.program.tasks
        comm_op = cast(CollectiveTask, tasks[cursor.task_ids[cursor.position]]).comm_op
        rendezvous = shared.join_collective(self.rank_id, comm_op, stream)
        all_arrived = rendezvous.arrive(predecessor)
        if not all_arrived.triggered:
            self._set_stream_level(stream, 0)
            cursor.in_rendezvous = True
        yield all_arrived
        start, skipped_wait, cursor.in_rendezvous, cursor.skipped_wait = (
            shared.environment.now,
            cursor.skipped_wait,
            False,
            0.0,
        )
        cursor.skipped = False
        cursor.repetitions.clear()
        self._set_stream_level(stream, shared.cost.interference_level(comm_op))
        yield self._begin_collective(stream, comm_op, rendezvous)
        return start, rendezvous.critical_predecessor, skipped_wait

    def unmet_dependencies(self, cursor: StreamCursor) -> list[int]:
        """Dependencies of the head of a stream that are not done."""
        if cursor.position == len(cursor.task_ids):
            return []
        task = self.program.tasks[cursor.task_ids[cursor.position]]
        return [dependency for dependency in task.depends_on if not self.done[dependency]]

    def skip_periods(self, period: SkippedPeriod, repetition: Repetition) -> None:
        """Advance every stream past the tasks of the skipped periods, and mark these as done."""
        task_offset = period.task_count * repetition.count
        awaited: set[int] = set()
        for stream, cursor in self.cursors.items():
            cursor.skipped, tasks_per_period = True, period.stream_task_counts[stream]
            if not tasks_per_period:
                cursor.skipped_wait += repetition.period_seconds * repetition.count
                continue
            awaited.update(self.unmet_dependencies(cursor)[:1])
            cursor.position += tasks_per_period * repetition.count
            cursor.repetitions.append(repetition)
            if 0 <= self._awaited_task_ids.get(stream, -1) < len(self.done):
                self._awaited_task_ids[stream] += task_offset
        self._last_no_overlap_task_id = min(self._awaited_task_ids.values())
        self._current_task_id += task_offset if period.stream_task_counts.get(Stream.COMPUTE) else 0
        self._completion_events = {
            task_id + task_offset if task_id in awaited else task_id: event
            for task_id, event in self._completion_events.items()
        }
        partly_done = self.done[period.first_undone : period.end_done]
        self.done[period.first_undone : period.first_undone + task_offset] = b"\1" * task_offset
        self.done[period.first_undone + task_offset : period.end_done + task_offset] = partly_done

    def _note_awaited(self, stream: Stream, task_id: int) -> None:
        """Note the compute task that an overlapping stream waits for, with nothing in flight meanwhile.

        task_id: -1 when it stops waiting, as a collective may then be in flight; behind all tasks when it has none
        left. A task of another stream counts as -1: it may end during any compute task.
        """
        if task_id >= 0:
            self._set_stream_level(stream, 0)
        streams = self.program.streams
        is_other_stream = 0 <= task_id < len(streams) and streams[task_id] is not Stream.COMPUTE
        self._awaited_task_ids[stream] = -1 if is_other_stream else task_id
        self._last_no_overlap_task_id = min(self._awaited_task_ids.values())

    def _completion_event(self, task_id: int) -> simpy.Event:
        event = self._completion_events.get(task_id)
        if event is None:
            event = self._completion_events[task_id] = simpy.Event(self.shared.environment)
        return event

    def _set_stream_level(self, stream: Stream, level: int) -> None:
        """Set the interference level of what is in flight on a stream (0: nothing), and that of the running segment.

        The end of a collective is no call of its own: its stream then begins the next one (which changes nothing if
        that has the same level), waits or ends.
        """
        if stream not in OVERLAPPING_STREAMS or level == self._stream_levels[stream]:
            return
        self._stream_levels[stream] = level
        combined = self.shared.cost.combined_interference_level(*self._stream_levels.values())
        if combined != self._interference_level:
            self._interference_level = combined
            if self._level_listener is not None:
                self._level_listener.set_level(combined)

    def _begin_collective(self, stream: Stream, comm_op: CommOp, rendezvous: Rendezvous) -> simpy.Event:
        """Begin a collective; return its completion. Overlapped kernels slow it where the device model says so."""
        transfers = self.shared.transfers
        if stream not in OVERLAPPING_STREAMS or not self.shared.cost.compute_slows_comm:
            return rendezvous.begin_once(partial(transfers.begin_transfer, self.rank_id, comm_op))
        collective = rendezvous.begin_once(partial(transfers.begin_collective, self.rank_id, comm_op))
        self._collectives[stream] = collective, comm_op
        self._update_comm_rates()
        return collective.action.done

    def _set_current_segment(self, segment: Segment | None) -> None:
        """Note the running segment (None: none), and update collectives in flight."""
        self._current_segment = segment
        if self._collectives:
            self._update_comm_rates()

    def _update_comm_rates(self) -> None:
        """Bound the rate of collectives in flight by the kernels of the running segment."""
        segment, cost = self._current_segment, self.shared.cost
        for collective, comm_op in self._collectives.values():
            collective.bound_rate(
                self.rank_id, 1.0 if segment is None else cost.comm_speed(self.rank_id, segment, comm_op)
            )

    def _run_sub_segments(
        self, segment: Segment, curves: ProgressCurves, *, no_overlap: bool
    ) -> Generator[simpy.Event, Any, WaitAndSlowdown]:
        """Run a segment by sub-segments; no_overlap: no DP or EP collective can be in flight (allows a `FastPath`).

        Operations between contended comm ops and synchronization points are one sub-segment.
        """
        sub_segments, position = self._splitter.sub_segments(segment, curves, no_overlap=no_overlap), 0
        waited = slowed = 0.0
        while position < len(sub_segments):
            fast_path_run = (
                self._start_fast_path(self._splitter.fast_path(segment, curves, position)) if no_overlap else None
            )
            if fast_path_run is not None:
                yield fast_path_run.done
                self._record_fast_path(fast_path_run)
                position += fast_path_run.completed_count
                continue
            sub_segment = sub_segments[position]
            position += 1
            arrival = self.shared.environment.now
            rendezvous = None if sub_segment.sync_op is None else (yield from self._synchronize(sub_segment.sync_op))
            start = self.shared.environment.now
            waited += start - arrival
            if sub_segment.transfer is None:
                slowed += yield from self._run_kernels(sub_segment, curves)
            else:
                delay = yield from self._run_contended_operation(
                    sub_segment.begin, segment, sub_segment.transfer, rendezvous
                )
                slowed += delay.kernel_delay
                operation_position = self.rank_id, self._current_task_id, sub_segment.begin
                self.shared.recorder.add_operation(operation_position, start, self.shared.environment.now, delay)
        return WaitAndSlowdown(waited, slowed)

    def _run_jointly(
        self, segment: Segment, curves: ProgressCurves, group: Hashable, member_count: int
    ) -> Generator[simpy.Event, Any, WaitAndSlowdown]:
        """Run a segment jointly with a group from the first synchronization to the last, else by sub-segments."""
        joint_segments, slowed = self.shared.joint_segments, 0.0
        joint_segment = joint_segments.joint_segment(
            group, segment, lambda: self._splitter.sub_segments(segment, curves, no_overlap=False)
        )
        for sub_segment in joint_segment.sub_segments[: joint_segment.first]:
            slowed += yield from self._run_kernels(sub_segment, curves)
        run = joint_segments.run_of(group, self._current_task_id, joint_segment)
        index, done = run.member_count, run.arrive(self, curves, slowed)
        if run.member_count == member_count:
            joint_segments.begin(group, run)
        yield done
        waited, slowed = run.loss(index)
        for sub_segment in joint_segment.sub_segments[joint_segment.end :]:
            slowed += yield from self._run_kernels(sub_segment, curves)
        return WaitAndSlowdown(waited, slowed)

    def _run_kernels(self, sub_segment: SubSegment, curves: ProgressCurves) -> Generator[simpy.Event, Any, Seconds]:
        """Run a sub-segment without shared links; return the seconds by which overlapping collectives slowed it."""
        start = self.shared.environment.now
        sub_curves = sub_segment.curves or curves.slice_operations(sub_segment.begin, sub_segment.end)
        action = yield from self._run_action(sub_curves, no_overlap=self.has_no_overlap(self._current_task_id))
        self._record_sub_segment(sub_segment, curves if action is None else action.end_times(), start)
        return 0.0 if action is None else action.slowed_seconds

    def _isolated_seconds(self, task_id: int, segment: Segment) -> Seconds | None:
        """Duration of a task's segment if it is isolated and no DP or EP collective overlaps it; None otherwise."""
        if self._interference_level or self._last_no_overlap_task_id < task_id:  # `has_no_overlap` inlined
            return None
        if segment not in self._isolated_cache:
            self._isolated_cache[segment] = self._always_isolated_seconds(task_id, segment)
        return self._isolated_cache[segment]

    def _always_isolated_seconds(self, task_id: int, segment: Segment) -> Seconds | None:
        """Duration of a segment that is isolated in every run; None if it is not, or if durations vary."""
        shared = self.shared
        if shared.jitter is not None or shared.cost.compute_slows_comm or not shared.is_isolated(self.rank_id, segment):
            return None
        return (
            self._segment_curves(task_id, segment).uncontended[-1]
            if shared.sync_group(self.rank_id, segment) is None
            else None
        )

    def _run_non_isolated_segment(self, task_id: int, segment: Segment) -> Generator[simpy.Event, Any, WaitAndSlowdown]:
        """Run a segment whose end may depend on others: overlapping collectives, other simulated ranks, shared links.

        Or whose kernels slow collectives or have jitter. It runs jointly with its group, as one event, or by
        sub-segments (sync or shared links inside).
        """
        shared, self._current_task_id = self.shared, task_id
        self._set_current_segment(segment)
        group = shared.sync_group(self.rank_id, segment)
        if group is None:
            loss = yield from self._run_segment(task_id, segment)
        elif group.is_stepwise:
            curves = self._segment_curves(task_id, segment)
            loss = yield from self._run_jointly(segment, curves, *shared.group_of_rank(group.comm_group, self.rank_id))
            shared.record_sync(self.rank_id, self._current_task_id, segment)
        else:
            participant = self._level_listener = shared.group_segments.arrive(
                self.rank_id, task_id, segment, group.comm_group, level=self._interference_level
            )
            yield participant.done
            self._level_listener, loss = None, participant.loss
            shared.record_sync(self.rank_id, self._current_task_id, segment)
        self._set_current_segment(None)
        return loss

    def _run_segment(self, task_id: int, segment: Segment) -> Generator[simpy.Event, Any, WaitAndSlowdown]:
        """Run a segment by itself: as one event, or by sub-segments (sync or shared links inside)."""
        curves, no_overlap = self._segment_curves(task_id, segment), self.has_no_overlap(task_id)
        if self.shared.is_isolated(self.rank_id, segment, no_overlap=no_overlap):
            action = yield from self._run_action(curves, no_overlap=no_overlap)
            return WaitAndSlowdown(slowed=0.0 if action is None else action.slowed_seconds)
        loss = yield from self._run_sub_segments(segment, curves, no_overlap=no_overlap and self.shared.coalesce)
        self.shared.record_sync(self.rank_id, self._current_task_id, segment)
        return loss

    def _segment_curves(self, task_id: int, segment: Segment) -> ProgressCurves:
        """Progress curves of a task's segment; cached unless kernels have jitter."""
        curves = self._curve_cache.get(segment)
        if curves is None:
            curves = self.shared.progress_curves.segment_curves(self.rank_id, task_id, segment)
            if self.shared.jitter is None:
                self._curve_cache[segment] = curves
        return curves

    def has_no_overlap(self, task_id: int) -> bool:
        """Whether no DP or EP collective can overlap a task's segment: their streams wait for its end or a later one's.

        The compute stream runs its tasks in ascending id.
        """
        return not self._interference_level and self._last_no_overlap_task_id >= task_id

    def _record_sub_segment(self, sub_segment: SubSegment, end_times: EndTimes, start: Seconds) -> None:
        """Record the operations of a sub-segment that has just ended."""
        now = self.shared.environment.now
        self.shared.recorder.add_sub_segment(
            (self.rank_id, self._current_task_id, sub_segment.begin), sub_segment.end, (start, now), end_times
        )

    def _start_fast_path(self, fast_path: FastPath | None) -> FastPathRun | None:
        """Run sub-segments as one event, if their links are idle."""
        network = self.shared.transfers.network
        if fast_path is None or network is None or not network.are_idle(fast_path.link_ids):
            return None
        return FastPathRun(self.shared.environment, network, fast_path)

    def _record_fast_path(self, run: FastPathRun) -> None:
        """Record the operations of a fast path that has just ended."""
        recorder, sub_segments = self.shared.recorder, run.fast_path.sub_segments
        uncontended_count = run.completed_count - (run.contended is not None)
        if uncontended_count:
            times = run.phase_times[0], run.planned_start(uncontended_count)
            recorder.add_sub_segment(
                (self.rank_id, self._current_task_id, sub_segments[0].begin),
                sub_segments[uncontended_count - 1].end,
                times,
                run.fast_path.end_times,
            )
        if run.contended is not None:
            operation_position, start = (
                (self.rank_id, self._current_task_id, sub_segments[uncontended_count].begin),
                run.planned_start(uncontended_count),
            )
            recorder.add_operation(
                operation_position, start, self.shared.environment.now, self._contention_delay(start, run.contended)
            )

    def _contention_delay(self, start: Seconds, transfer: ContendedTransfer) -> ContentionDelay:
        """Delay by link sharing of a transfer that has just ended."""
        now = self.shared.environment.now
        delay = now - start - transfer.uncontended_seconds
        return ContentionDelay(0.0, delay, delay).without_rounding(now)

    def _synchronize(self, comm_op: CommOp) -> Generator[simpy.Event, Any, Rendezvous]:
        """Wait for the other members of a comm op's group."""
        rendezvous = self.shared.join_collective(self.rank_id, comm_op, Stream.COMPUTE)
        yield rendezvous.arrive(-1)
        return rendezvous

    def _run_contended_operation(
        self, operation_index: int, segment: Segment, transfer: ContendedTransfer, rendezvous: Rendezvous | None
    ) -> Generator[simpy.Event, Any, ContentionDelay]:
        """Run an operation whose comm op shares links, overlapped with its kernel if it has one; return its delays."""
        shared, start, overlap = self.shared, self.shared.environment.now, transfer.overlap
        transferred = transfer.begin() if rendezvous is None else rendezvous.begin_once(transfer.begin)
        if overlap is None:
            yield transferred
            return self._contention_delay(start, transfer)
        transfer_end = shared.environment.event()  # what `transferred` stands for may change while the kernel runs

        def note_end(_: simpy.Event) -> None:
            transfer_end.succeed(shared.environment.now)

        transferred.callbacks.append(note_end)
        action = yield from self._run_action(
            shared.progress_curves.kernel_curves(self.rank_id, self._current_task_id, segment, operation_index)
        )
        slowed = 0.0 if action is None else action.slowed_seconds
        kernel_seconds = shared.environment.now - start
        transfer_seconds = (yield transfer_end) - start
        total_seconds = overlap.duration(kernel_seconds, transfer_seconds)
        yield simpy.Timeout(shared.environment, max(start + total_seconds - shared.environment.now, 0.0))
        kernel_runtime, uncontended_runtime = (
            overlap.kernel_duration(kernel_seconds, transfer_seconds),
            overlap.kernel_duration(kernel_seconds - slowed, overlap.comm_seconds),
        )
        exposed = (total_seconds - kernel_runtime) - (
            overlap.duration(kernel_seconds - slowed, overlap.comm_seconds) - uncontended_runtime
        )
        exposed = max(exposed, -transfer.exposed_seconds)  # jitter may have exposed more than the cost model expects
        return ContentionDelay(
            kernel_runtime - uncontended_runtime, exposed, transfer_seconds - overlap.comm_seconds
        ).without_rounding(shared.environment.now)

    def _run_action(
        self, curves: ProgressCurves, *, no_overlap: bool = False
    ) -> Generator[simpy.Event, Any, SegmentAction | None]:
        """Run operations without synchronization or shared links; return their action, None if not slowed."""
        environment = self.shared.environment
        if no_overlap or curves.is_unaffected:
            yield simpy.Timeout(environment, curves.uncontended[-1])
            return None
        action = self.begin_action(curves)
        yield action.done
        self.end_action()
        return action if action.was_slowed else None

    def begin_action(self, curves: ProgressCurves) -> SegmentAction:
        """Begin operations that overlapping collectives slow."""
        self._level_listener = SegmentAction(self.shared.environment, curves, self._interference_level)
        return self._level_listener

    def end_action(self) -> None:
        """These operations have ended."""
        self._level_listener = None
