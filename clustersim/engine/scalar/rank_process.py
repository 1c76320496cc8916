"""How does one rank work through its streams?

For each task of a stream: wait until the rank's earlier tasks that it names are done, perform it, write its span, tell
those who wait. A compute task takes its block's time; where other simulated ranks take part in a block's exchanges,
all of them run it together (`joint`), or piece by piece, so that they can meet inside it. A collective starts
when its last member has come. A message starts when it is sent (receive buffers are posted ahead) and is done at both
ends together.

While a collective of the data stream, or of the experts', moves data, kernels of the compute stream go at another pace,
and so does the collective where they slow it (`moving`). Beside both they go at the slower pace of the two.
"""

from collections.abc import Callable, Generator, Mapping
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
from clustersim.engine.scalar.fluid_action import FluidAction, ProgressCurves
from clustersim.engine.scalar.group_segments import Participant
from clustersim.engine.scalar.shared_state import SharedState
from clustersim.engine.scalar.skipped_period import SkippedPeriod
from clustersim.engine.scalar.split_segment import SegmentSplitter
from clustersim.engine.scalar.sub_segment import ContendedTransfer, SubSegment
from clustersim.program.task import OVERLAPPING_STREAMS, CollectiveTask, CommOp, ComputeTask, Segment, SendTask, Stream

StreamProcess = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class StreamCursor:
    """How far a stream has come: `queue[place]` is its head.

    gathers: the head has come to a collective and waits for others. skipped: something was (`skip_periods`) since the head
    began to wait; moved: what is repeated, if it has moved on with it; idle: for how many seconds more it has waited,
    if it has not.
    """

    task_ids: list[int]
    position: int = 0
    in_rendezvous: bool = False
    skipped: bool = False
    repetitions: list[Repetition] = field(default_factory=list)
    skipped_wait: Seconds = 0.0

    def shift_event_key(self, event_key: int) -> int:
        """The name of the row that allowed the head, after what has moved on; it is told once."""
        for repetition in self.repetitions:
            event_key = int(repetition.shift_event_keys(np.array(event_key), repetition.count))
        self.repetitions.clear()
        return event_key


def ignore_mark(level: int) -> None:
    """What a rank tells of marked tasks that have ended: nobody listens."""


def _ignore_awaited(stream: Stream, task_id: int) -> None:
    """What a stream waits for beside which no kernels go at another pace: nobody asks."""


@dataclass(slots=True)
class RankProcess:
    """One simulated rank: which of its tasks are done, and who waits for which.

    marks: tasks whose ends are told, and as what (`steady`).
    """

    rank_id: int
    shared: SharedState
    mark_levels: Mapping[int, int] = field(init=False, default_factory=dict)
    on_mark: Callable[[int], None] = field(init=False, default=ignore_mark)
    done: bytearray = field(init=False)
    cursors: dict[Stream, StreamCursor] = field(init=False, default_factory=dict)
    _current_task_id: int = field(init=False, default=-1)
    _completion_events: dict[int, simpy.Event] = field(init=False, default_factory=dict)
    _interference_level: int = field(init=False, default=0)
    _stream_levels: dict[Stream, int] = field(init=False, default_factory=lambda: dict.fromkeys(OVERLAPPING_STREAMS, 0))
    _current_action: FluidAction | Participant | None = field(init=False, default=None)
    _awaited_task_ids: dict[Stream, int] = field(
        init=False, default_factory=lambda: dict.fromkeys(OVERLAPPING_STREAMS, -1)
    )
    _no_overlap_until: int = field(init=False, default=-1)
    _current_segment: Segment | None = field(init=False, default=None)
    _collectives: dict[Stream, tuple[InFlightCollective, CommOp]] = field(init=False, default_factory=dict)
    _curve_cache: dict[Segment, ProgressCurves] = field(init=False, default_factory=dict)
    _isolated_cache: dict[Segment, Seconds | None] = field(init=False, default_factory=dict)
    _splitter: SegmentSplitter = field(init=False)

    def __post_init__(self) -> None:
        self._splitter = SegmentSplitter(self.rank_id, self.shared)
        self.done = bytearray(len(self.shared.rank_program(self.rank_id).tasks))

    def start(self) -> None:
        """Let every stream of the rank run."""
        program = self.shared.rank_program(self.rank_id)
        task_ids: dict[Stream, list[int]] = {}
        for task_id, stream in enumerate(program.streams):
            task_ids.setdefault(stream, []).append(task_id)
        self._awaited_task_ids |= {
            stream: len(program.tasks) for stream in OVERLAPPING_STREAMS if stream not in task_ids
        }
        self._no_overlap_until = min(self._awaited_task_ids.values())
        self.cursors |= {
            stream: StreamCursor(task_ids[stream]) for stream in sorted(task_ids) if stream is not Stream.RECEIVE
        }
        for stream, cursor in self.cursors.items():
            self.shared.environment.process(self._run_stream(stream, cursor))

    def finish_task(self, task_id: int) -> None:
        """Note that a task is done and wake those who wait for it."""
        self.done[task_id] = True
        event = self._completion_events.pop(task_id, None)
        if event is not None:
            event.succeed()
        if task_id in self.mark_levels:
            self.on_mark(self.mark_levels[task_id])

    def _run_stream(self, stream: Stream, cursor: StreamCursor) -> StreamProcess:
        environment, done, tasks = self.shared.environment, self.done, self.shared.rank_program(self.rank_id).tasks
        add_span, begin_transfer, deliver_message = (
            self.shared.recorder.add_span,
            self.shared.transfers.begin_transfer,
            self.shared.deliver_message,
        )
        rank_id, task_ids, first_key = self.rank_id, cursor.task_ids, self.rank_id * EVENT_KEY_STRIDE
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
                    predecessor, now = first_key + dependency, environment.now
                    if cursor.skipped:
                        predecessor, queued = yield from self._await_after_skip(
                            note_awaited, stream, (predecessor, queued)
                        )
                        now, task_id = environment.now, task_ids[cursor.position]
                        task = tasks[task_id]
                        break
                elif predecessor < 0:
                    predecessor = first_key + dependency
            ready, start = now, now
            waited = slowed = 0.0
            match task:
                case ComputeTask():
                    seconds = self._isolated_seconds(task_id, task.segment)
                    if seconds is None:
                        waited, slowed = yield from self._run_observable_segment(task_id, task.segment)
                    else:
                        yield environment.event_after(seconds)
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
            predecessor = first_key + task_id
            self.finish_task(task_id)
        note_awaited(stream, len(done))

    def _await_after_skip(
        self, note_awaited: Callable[[Stream, int], None], stream: Stream, predecessor_and_queued: tuple[int, Seconds]
    ) -> Generator[simpy.Event, Any, tuple[int, Seconds]]:
        """Wait for what else the head waits for, which may be another task by now, like what it was.

        known: what allowed it so far, and when it was queued; the same as they are in the end.
        """
        cursor, (predecessor, queued) = self.cursors[stream], predecessor_and_queued
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
        """Run a collective: when it began, what allowed it, and for how long it waited beyond what the clock says."""
        shared, tasks = self.shared, self.shared.rank_program(self.rank_id).tasks
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
        """What the head of a stream waits for before it can begin."""
        if cursor.position == len(cursor.task_ids):
            return []
        task = self.shared.rank_program(self.rank_id).tasks[cursor.task_ids[cursor.position]]
        return [dependency for dependency in task.depends_on if not self.done[dependency]]

    def skip_periods(self, period: SkippedPeriod, repetition: Repetition) -> None:
        """Take what is under way for what is that many periods later, and all up to there as done."""
        task_offset = period.task_count * repetition.count
        awaited: set[int] = set()
        for stream, cursor in self.cursors.items():
            cursor.skipped, period_tasks = True, period.stream_task_counts[stream]
            if not period_tasks:
                cursor.skipped_wait += repetition.period_seconds * repetition.count
                continue
            awaited.update(self.unmet_dependencies(cursor)[:1])
            cursor.position += period_tasks * repetition.count
            cursor.repetitions.append(repetition)
            if 0 <= self._awaited_task_ids.get(stream, -1) < len(self.done):
                self._awaited_task_ids[stream] += task_offset
        self._no_overlap_until = min(self._awaited_task_ids.values())
        self._current_task_id += task_offset if period.stream_task_counts.get(Stream.COMPUTE) else 0
        self._completion_events = {
            task_id + task_offset if task_id in awaited else task_id: event
            for task_id, event in self._completion_events.items()
        }
        in_flight = self.done[period.first_undone : period.end_done]
        self.done[period.first_undone : period.first_undone + task_offset] = b"\1" * task_offset
        self.done[period.first_undone + task_offset : period.end_done + task_offset] = in_flight

    def _note_awaited(self, stream: Stream, task_id: int) -> None:
        """Note for which compute task a stream of `BESIDE` waits, so that nothing moves there; -1: for none.

        None, too, where it waits for another stream's task.
        """
        if task_id >= 0:
            self._set_stream_level(stream, 0)
        streams = self.shared.rank_program(self.rank_id).streams
        is_other_stream = 0 <= task_id < len(streams) and streams[task_id] is not Stream.COMPUTE
        self._awaited_task_ids[stream] = -1 if is_other_stream else task_id
        self._no_overlap_until = min(self._awaited_task_ids.values())

    def _completion_event(self, task_id: int) -> simpy.Event:
        event = self._completion_events.get(task_id)
        if event is None:
            event = self._completion_events[task_id] = simpy.Event(self.shared.environment)
        return event

    def _set_stream_level(self, stream: Stream, level: int) -> None:
        """Let the compute stream know its pace beside what is under way on a stream (0: nothing), if it is new.

        One that follows another like it at once changes nothing.
        """
        if stream not in OVERLAPPING_STREAMS or level == self._stream_levels[stream]:
            return
        self._stream_levels[stream] = level
        combined = self.shared.cost.combined_interference_level(*self._stream_levels.values())
        if combined != self._interference_level:
            self._interference_level = combined
            if self._current_action is not None:
                self._current_action.set_level(combined)

    def _begin_collective(self, stream: Stream, comm_op: CommOp, rendezvous: Rendezvous) -> simpy.Event:
        """The end of a collective that begins now, whose members' kernels slow it if they may be beside it."""
        transfers = self.shared.transfers
        if stream not in OVERLAPPING_STREAMS or not self.shared.cost.compute_slows_comm:
            return rendezvous.begin_once(partial(transfers.begin_transfer, self.rank_id, comm_op))
        collective = rendezvous.begin_once(partial(transfers.begin_collective, self.rank_id, comm_op))
        self._collectives[stream] = collective, comm_op
        self._update_comm_rates()
        return collective.done

    def _set_current_segment(self, segment: Segment | None) -> None:
        """Note which block runs."""
        self._current_segment = segment
        self._update_comm_rates()

    def _update_comm_rates(self) -> None:
        """Tell collectives that are under way at which pace they can go beside what the rank computes."""
        for collective, comm_op in self._collectives.values():
            segment, cost = self._current_segment, self.shared.cost
            collective.bound_rate(
                self.rank_id, 1.0 if segment is None else cost.comm_speed(self.rank_id, segment, comm_op)
            )

    def _run_segment(self, task_id: int, segment: Segment) -> Generator[simpy.Event, Any, WaitAndSlowdown]:
        """Run a block as one event, or piece by piece where others meet or share links with it inside."""
        comm_group = self.shared.group_segment_kind(self.rank_id, segment)
        if comm_group is not None:
            participant = self._current_action = self.shared.group_segments.arrive(
                self.rank_id, task_id, segment, comm_group, level=self._interference_level
            )
            yield participant.done
            self._current_action = None
            return participant.loss
        curves, no_overlap = self._segment_curves(task_id, segment), self._has_no_overlap(task_id)
        if self.shared.is_isolated(self.rank_id, segment, no_overlap=no_overlap):
            action = yield from self._run_action(curves, no_overlap=no_overlap)
            return WaitAndSlowdown(slowed=0.0 if action is None else action.slowed_seconds)
        return (yield from self._run_sub_segments(segment, curves, no_overlap=no_overlap and self.shared.coalesce))

    def _run_sub_segments(
        self, segment: Segment, curves: ProgressCurves, *, no_overlap: bool
    ) -> Generator[simpy.Event, Any, WaitAndSlowdown]:
        """Run a block piece by piece; quiet: nothing is beside it, and several may be one event.

        Operations between exchanges that share links, or where others meet, are one piece.
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
                sub_curves = sub_segment.curves or curves.slice_operations(sub_segment.begin, sub_segment.end)
                action = yield from self._run_action(sub_curves, no_overlap=self._has_no_overlap(self._current_task_id))
                slowed += 0.0 if action is None else action.slowed_seconds
                self._record_sub_segment(sub_segment, curves if action is None else action.end_times(), start)
            else:
                delay = yield from self._run_contended_operation(
                    sub_segment.begin, segment, sub_segment.transfer, rendezvous
                )
                slowed += delay.kernel_delay
                operation_position = self.rank_id, self._current_task_id, sub_segment.begin
                self.shared.recorder.add_operation(operation_position, start, self.shared.environment.now, delay)
        return WaitAndSlowdown(waited, slowed)

    def _isolated_seconds(self, task_id: int, segment: Segment) -> Seconds | None:
        """Seconds of the block of a task that nobody else sees and that nothing can be beside; None of others."""
        if self._interference_level or self._no_overlap_until < task_id:  # not `_has_no_overlap`
            return None
        if segment not in self._isolated_cache:
            self._isolated_cache[segment] = self._always_isolated_seconds(task_id, segment)
        return self._isolated_cache[segment]

    def _always_isolated_seconds(self, task_id: int, segment: Segment) -> Seconds | None:
        """Seconds of every run of a block that nobody else sees; None where others do, or runs differ."""
        shared = self.shared
        if shared.jitter is not None or shared.cost.compute_slows_comm or not shared.is_isolated(self.rank_id, segment):
            return None
        return (
            self._segment_curves(task_id, segment).uncontended[-1]
            if shared.group_segment_kind(self.rank_id, segment) is None
            else None
        )

    def _run_observable_segment(self, task_id: int, segment: Segment) -> Generator[simpy.Event, Any, WaitAndSlowdown]:
        """Run a block that others may see, or collectives that its kernels slow."""
        self._set_current_segment(segment)
        self._current_task_id = task_id
        loss = yield from self._run_segment(task_id, segment)
        self._set_current_segment(None)
        self.shared.record_sync(self.rank_id, self._current_task_id, segment)
        return loss

    def _segment_curves(self, task_id: int, segment: Segment) -> ProgressCurves:
        """Paces of the block of a task; those of all its runs where kernels do not vary."""
        curves = self._curve_cache.get(segment)
        if curves is None:
            curves = self.shared.progress_curves.segment_curves(self.rank_id, task_id, segment)
            if self.shared.jitter is None:
                self._curve_cache[segment] = curves
        return curves

    def _has_no_overlap(self, task_id: int) -> bool:
        """Whether no collective can be beside the block of a task: their streams wait for its end, or a later one's.

        The compute stream runs its tasks in ascending number.
        """
        return not self._interference_level and self._no_overlap_until >= task_id

    def _record_sub_segment(self, sub_segment: SubSegment, end_times: EndTimes, start: Seconds) -> None:
        """Write the operations of a piece that has just ended."""
        now = self.shared.environment.now
        self.shared.recorder.add_sub_segment(
            (self.rank_id, self._current_task_id, sub_segment.begin), sub_segment.end, (start, now), end_times
        )

    def _start_fast_path(self, fast_path: FastPath | None) -> FastPathRun | None:
        """Begin pieces as one event, if nobody is on their links."""
        network = self.shared.transfers.network
        if fast_path is None or network is None or not network.are_idle(fast_path.link_ids):
            return None
        return FastPathRun(self.shared.environment, network, fast_path)

    def _record_fast_path(self, run: FastPathRun) -> None:
        """Write the operations of a passage that has just ended."""
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
        """What an exchange that has just ended took more than alone."""
        now = self.shared.environment.now
        delay = now - start - transfer.uncontended_seconds
        return ContentionDelay(0.0, delay, delay).without_rounding(now)

    def _synchronize(self, comm_op: CommOp) -> Generator[simpy.Event, Any, Rendezvous]:
        """Wait for the other ranks that take part in an exchange."""
        rendezvous = self.shared.join_collective(self.rank_id, comm_op, Stream.COMPUTE)
        yield rendezvous.arrive(-1)
        return rendezvous

    def _run_contended_operation(
        self, operation_index: int, segment: Segment, transfer: ContendedTransfer, rendezvous: Rendezvous | None
    ) -> Generator[simpy.Event, Any, ContentionDelay]:
        """Run an operation of a task whose exchange shares links, with its kernel beside it if it has one."""
        shared, start, overlap = self.shared, self.shared.environment.now, transfer.overlap
        transferred = transfer.begin() if rendezvous is None else rendezvous.begin_once(transfer.begin)
        if overlap is None:
            yield transferred
            return self._contention_delay(start, transfer)
        transfer_ends: list[Seconds] = []
        transferred.callbacks.append(lambda _: transfer_ends.append(shared.environment.now))
        action = yield from self._run_action(
            shared.progress_curves.kernel_curves(self.rank_id, self._current_task_id, segment, operation_index)
        )
        slowed = 0.0 if action is None else action.slowed_seconds
        kernel_seconds = shared.environment.now - start
        if not transfer_ends:
            yield transferred
        transfer_seconds = transfer_ends[0] - start
        total_seconds = overlap.duration(kernel_seconds, transfer_seconds)
        yield shared.environment.event_after(max(start + total_seconds - shared.environment.now, 0.0))
        kernel_runtime, uncontended_runtime = (
            overlap.kernel_duration(kernel_seconds, transfer_seconds),
            overlap.kernel_duration(kernel_seconds - slowed, overlap.comm_seconds),
        )
        exposed = (total_seconds - kernel_runtime) - (
            overlap.duration(kernel_seconds - slowed, overlap.comm_seconds) - uncontended_runtime
        )
        exposed = max(exposed, -transfer.exposed_seconds)  # jitter may have exposed more than the timing says
        return ContentionDelay(
            kernel_runtime - uncontended_runtime, exposed, transfer_seconds - overlap.comm_seconds
        ).without_rounding(shared.environment.now)

    def _run_action(
        self, curves: ProgressCurves, *, no_overlap: bool = False
    ) -> Generator[simpy.Event, Any, FluidAction | None]:
        """Run operations that nobody else can observe; return how they went, None where nothing was beside them."""
        environment = self.shared.environment
        if no_overlap or curves.is_unaffected:
            yield environment.event_after(curves.uncontended[-1])
            return None
        action = self._current_action = FluidAction(environment, curves, self._interference_level)
        yield action.done
        self._current_action = None
        return action if action.was_slowed else None
