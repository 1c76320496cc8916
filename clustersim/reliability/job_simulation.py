"""What happens to a job over weeks? It works, checkpoints, fails, restarts and waits.

Work is measured in seconds of the healthy job. While the job is up its work follows in closed form
(`checkpoint_timeline`), so a run has as many events as failures. Failures while the job is down lengthen
the outage. Nothing but the events in simpy's queue (detections, maintenance, the limit of its wall time) can happen to
a job besides its failures and repairs: it runs ahead of the queue's clock up to the next of them (lookahead), has that
one processed, and goes on.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from math import inf
from typing import Final, NamedTuple

import simpy

from clustersim.common.units import Seconds
from clustersim.hardware.failures import (
    ZERO_DURATION,
    DurationDistribution,
    FailureEffect,
    FailureMode,
    FailureSlowdown,
)
from clustersim.reliability.checkpoint_timeline import CheckpointTimeline
from clustersim.reliability.failure_domains import FailureDomains
from clustersim.reliability.failure_events import DRAWS_PER_EVENT, FailureEvent
from clustersim.reliability.node_pool import NodePool
from clustersim.results.goodput import TimelineInterval, TrainingRun
from clustersim.scenario.reliability import ElasticPolicy, ReliabilityModel, RestartTimes

NO_EFFECT: Final = "nothing"
"""An interrupt cause without effect."""
QUEUED: Final = "queued"
"""Other events of the queue may come first."""
LIMIT: Final = "limit"
"""The interrupt cause that ends a run."""
SLOW, CORRUPT, PLANNED = FailureEffect.SLOW, FailureEffect.CORRUPT, FailureEffect.PLANNED
"""Module constants for a hot loop: CPython 3.11 looks up enum members ten times more slowly than globals."""

CHECKPOINTS, LOST_WORK, DETECTION, RESTART = "checkpoints", "lost_work", "detection", "restart"
WAITING, MAINTENANCE, DEGRADED = "waiting", "maintenance", "degraded"
LOSSES: Final = (CHECKPOINTS, LOST_WORK, DETECTION, RESTART, WAITING, MAINTENANCE, DEGRADED)
"""What a job's time goes into besides useful work, as keys of the results."""

HEALTHY: Final = "healthy"


class RestartSkip(Enum):
    """Which restarts skip a phase. PLANNED: planned ones; ALLOCATION_KEPT: those that replace only the failed nodes."""

    NEVER = 0
    PLANNED = 1
    ALLOCATION_KEPT = 2


StateRate = Callable[[int, FailureSlowdown | None], tuple[str, float]]
"""(missing nodes, slowest component or None) -> (name of the cluster state, work per second relative to the
healthy job). The rate is 0 where the job cannot run.
"""


@dataclass(frozen=True, slots=True)
class JobParameters:
    """What determines a job's run besides its failures.

    work: seconds of the healthy job; load_seconds: to load a checkpoint; final_checkpoint_seconds: to write one
    before a planned stop; max_wall: limit of the run's wall time in seconds.
    """

    reliability: ReliabilityModel
    domains: FailureDomains
    checkpoint_timeline: CheckpointTimeline
    work: Seconds
    load_seconds: Seconds
    final_checkpoint_seconds: Seconds
    state_rate: StateRate
    max_wall: Seconds


@dataclass(slots=True)
class _RunTotals:
    """Totals of a run; see the run record of the goodput results."""

    losses: dict[str, Seconds] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))
    states: dict[str, Seconds] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    interruptions: int = 0
    uptime: Seconds = 0.0


class JobStop(NamedTuple):
    """Why a job stops.

    nodes: lost with it; is_planned: a checkpoint is written first; valid_until: time from which on results are
    corrupt; outage_seconds: duration of an intended outage; draws: z-scores of its random durations, 0 where it is no
    failure.
    """

    cause: str
    detection_time: DurationDistribution = ZERO_DURATION
    draws: Sequence[float] = (0.0,) * DRAWS_PER_EVENT
    nodes: tuple[int, ...] = ()
    repair_time: DurationDistribution | None = None
    is_planned: bool = False
    valid_until: Seconds | None = None
    outage_seconds: Seconds = 0.0

    @property
    def is_single_node(self) -> bool:
        """Whether at most one node is lost, so that its peers hold a copy of the checkpoint."""
        return len(self.nodes) < 2


@dataclass(frozen=True, slots=True)
class _DetectedFailure:
    """A silent failure that is detected. onset: time at which it began."""

    event: FailureEvent
    onset: Seconds


@dataclass(slots=True)
class _Uptime:
    """The job since a restart.

    segments: at each change of state (wall time since the restart, work, progress, rate); stored_progress: in
    storage from before the restart; begin, end: simulation time.
    """

    begin: Seconds
    stored_progress: Seconds
    segments: list[tuple[Seconds, Seconds, Seconds, float]]
    end: Seconds | None = None

    def progress_at(self, work: Seconds) -> Seconds:
        """The progress after this much work since the restart."""
        for _, segment_work, progress, rate in reversed(self.segments):
            if segment_work <= work:
                return progress + (work - segment_work) * rate
        return self.segments[0][2]

    def wall_at(self, progress: Seconds, checkpoints: CheckpointTimeline) -> Seconds:
        """The simulation time at which this progress was reached; that of the restart if it was before."""
        _, segment_work, segment_progress, rate = next(
            (segment for segment in reversed(self.segments) if segment[2] <= progress), self.segments[0]
        )
        return self.begin + checkpoints.wall_time_of(max(0.0, segment_work + (progress - segment_progress) / rate))


class _WallTimeLimit(Exception):  # noqa: N818 - control flow, not an error
    """The limit of a run's wall time is reached."""


class JobSimulation:
    """One run. progress_marks: (time, progress) at each end of an uptime, of which some progress may then be lost.

    env: its clock and queue; other processes of it do not change the run.
    """

    def __init__(
        self,
        parameters: JobParameters,
        events: Iterator[FailureEvent],
        timeline: list[TimelineInterval] | None = None,
        env: simpy.Environment | None = None,
    ) -> None:
        self._parameters, self._events, self._timeline = parameters, events, timeline
        self._reliability = parameters.reliability
        self._env = env or simpy.Environment()
        self._now = 0.0  # of the job; the clock of the queue may be behind it
        self._totals = _RunTotals()
        self._pool = NodePool(parameters.domains, self._reliability.spares, self._reliability.repair_slots)
        self._slow_nodes: dict[int, tuple[FailureSlowdown, float]] = {}
        self._uptimes: list[_Uptime] = []
        self._progress = self._stored_progress = 0.0
        self._restart_phases = _restart_phases(parameters)
        self._can_regrow = self._is_waiting = False  # whether repairs are of interest
        self.progress_marks: list[tuple[Seconds, Seconds]] = []
        self._next_event = next(events, None)
        self._interrupts: deque[tuple[Seconds, object]] = deque()  # (time, cause) by events of the queue, not yet seen
        if (maintenance := self._reliability.maintenance) is not None:
            stop = JobStop("maintenance", is_planned=True, outage_seconds=maintenance.duration)
            self._env.process(_repeat_interrupt(self._env, self._interrupts, maintenance.period, stop))

    def run(self, run_index: int = 0) -> TrainingRun:
        """Simulate until the work is done or the wall time limit is reached. run_index: stored in the result."""
        self._interrupt_at(self._env.now + self._parameters.max_wall, LIMIT)
        try:
            self._alternate_up_down()
            finished = True
        except _WallTimeLimit:
            finished = False
        totals = self._totals
        wall = self._now if finished else self._parameters.max_wall
        if not finished:  # unfinished work is lost
            totals.losses[LOST_WORK] += wall - self._progress - sum(totals.losses.values())
        return TrainingRun(
            number=run_index,
            wall=wall,
            work=self._progress,
            finished=finished,
            losses=totals.losses,
            states=totals.states,
            failures=dict(totals.failures),
            interruptions=totals.interruptions,
            up=totals.uptime,
            nodes=self._node_seconds(wall),
        )

    # Events

    def _node_seconds(self, wall: Seconds) -> dict[str, float]:
        self._pool.finish_repairs(wall)
        return self._pool.node_seconds(wall)

    def _run_ahead(self, end: Seconds) -> object:
        """Let time pass until `end`, or `QUEUED` where other events of the queue may come first.

        Returns what interrupts it (a stop or a silent failure), else None.
        """
        time, pool = end, self._pool
        event = self._next_event
        event_is_next = event is not None and event.time < end
        if event is not None and event_is_next:
            time = event.time
        watches_repairs = self._can_regrow or self._is_waiting
        if watches_repairs and pool.next_repair < time:
            time = pool.next_repair
        if time >= self._env.peek():
            return QUEUED
        self._now = max(self._now, time)
        if pool.next_repair <= self._now:
            pool.finish_repairs(self._now)
            if watches_repairs:
                return self._cause_of_repair()
        return self._take_failure(event) if event is not None and event_is_next else None

    def _wait_until(self, end: Seconds) -> object:
        """As `_run_ahead`, with other events of the queue, which are detections and maintenance."""
        while (cause := self._run_ahead(end)) is QUEUED:
            self._env.step()
            if self._interrupts:
                self._now, cause = self._interrupts.popleft()
                if cause is LIMIT:
                    raise _WallTimeLimit
                self._pool.finish_repairs(self._now)
                return cause
        return cause

    def _interrupt_at(self, time: Seconds, cause: object) -> None:
        """Interrupt the job at a time. The event must not refer to the job, which is freed once its run is over."""
        interrupts = self._interrupts
        self._env.timeout(time - self._env.now).callbacks.append(lambda _: interrupts.append((time, cause)))

    def _take_failure(self, event: FailureEvent) -> object:
        """What the next failure does: it stops the job, is silent, or has no effect."""
        self._next_event = next(self._events, None)
        if event.node in self._pool.missing:
            return NO_EFFECT  # the node is absent and cannot fail
        failure = self._reliability.failures[event.failure_index]
        self._totals.failures[failure.name] += 1
        is_silent = failure.effect is SLOW or failure.effect is CORRUPT
        return event if is_silent else self._build_stop(failure, event)

    def _cause_of_repair(self) -> object:
        """What repaired nodes do: a waiting job checks again, a shrunk job restarts if it can run more replicas."""
        if self._is_waiting or self._current_rate()[1] <= self._uptimes[-1].segments[-1][3]:
            return NO_EFFECT
        self._can_regrow = False
        return JobStop("nodes are back", is_planned=True)

    def _build_stop(self, failure: FailureMode, event: FailureEvent, valid_until: Seconds | None = None) -> JobStop:
        nodes = self._parameters.domains.lost_nodes(failure.failure_domain, event.node)
        is_planned = failure.effect is PLANNED or failure.effect is SLOW
        return JobStop(
            failure.name, failure.detection_time, event.draws, nodes, failure.repair_time, is_planned, valid_until
        )

    # Up and down

    def _alternate_up_down(self) -> None:
        while (stop := self._run_until_stop()) is not None:
            self._restart_after(stop)

    def _current_rate(self) -> tuple[str, float]:
        if not self._slow_nodes and not self._pool.missing:
            return HEALTHY, 1.0
        slowest = min(self._slow_nodes.values(), key=lambda slow_node: slow_node[1], default=None)
        return self._parameters.state_rate(len(self._pool.missing), None if slowest is None else slowest[0])

    def _run_until_stop(self) -> JobStop | None:
        """Work until all is done (returns None), or something stops the job."""
        checkpoints = self._parameters.checkpoint_timeline
        state, rate = self._current_rate()
        uptime = _Uptime(self._now, self._stored_progress, [(0.0, 0.0, self._progress, rate)])
        self._uptimes.append(uptime)
        self._can_regrow = bool(self._pool.missing)
        state_begin = self._now
        while True:
            _, segment_work, progress, rate = uptime.segments[-1]
            end = uptime.begin + checkpoints.wall_time_of(segment_work + (self._parameters.work - progress) / rate)
            cause = self._run_ahead(end)
            if cause is QUEUED:
                cause = self._wait_until(end)
            stop = None if cause is None else self._handle_while_up(cause)
            if stop is not None or cause is None:
                self._add_state_time(state, state_begin)
                return self._end_uptime(uptime, stop)
            new_state, new_rate = self._current_rate()
            if (new_state, new_rate) != (state, rate):
                self._add_state_time(state, state_begin)
                work = checkpoints.work_after(self._now - uptime.begin)
                uptime.segments.append((self._now - uptime.begin, work, uptime.progress_at(work), new_rate))
                state, state_begin = new_state, self._now

    def _handle_while_up(self, cause: object) -> JobStop | None:
        """The effect of an event on a running job: None if it continues."""
        if isinstance(cause, JobStop):
            return cause
        if isinstance(cause, _DetectedFailure):
            return self._handle_detection(cause)
        if isinstance(cause, FailureEvent):
            self._begin_silent_failure(cause)
        return None

    def _begin_silent_failure(self, event: FailureEvent) -> None:
        """A component is slow, or results are corrupt, from now on."""
        failure = self._reliability.failures[event.failure_index]
        if failure.slowdown is not None:
            self._slow_nodes[event.node] = (failure.slowdown, self._parameters.state_rate(0, failure.slowdown)[1])
        detection = self._now + failure.discovery_time.at_z_score(event.draws[1])
        self._interrupt_at(detection, _DetectedFailure(event, self._now))

    def _handle_detection(self, detected: _DetectedFailure) -> JobStop | None:
        """A slow node is replaced, or tolerated; corrupt results are rolled back."""
        failure, node = self._reliability.failures[detected.event.failure_index], detected.event.node
        if failure.effect is CORRUPT:
            return self._build_stop(failure, detected.event, valid_until=detected.onset)
        if self._slow_nodes.pop(node, None) is None or not self._reliability.replaces_slow_nodes:
            return None
        return self._build_stop(failure, detected.event)

    def _end_uptime(self, uptime: _Uptime, stop: JobStop | None) -> JobStop | None:
        """End an uptime: account for its work and what of it is safe; a planned stop writes a checkpoint first."""
        checkpoints, totals = self._parameters.checkpoint_timeline, self._totals
        self._can_regrow = False
        wall = self._now - uptime.begin
        work = checkpoints.work_after(wall) if stop is not None else self._total_work(uptime)
        progress = min(uptime.progress_at(work), self._parameters.work)
        totals.losses[CHECKPOINTS] += wall - work
        totals.losses[DEGRADED] += work - (progress - self._progress)
        totals.uptime += wall
        self.progress_marks.append((self._now, progress))
        uptime.end = self._now
        stored_index = checkpoints.last_safe_snapshot(wall, work, in_storage=True)
        self._stored_progress = (
            uptime.progress_at(stored_index * checkpoints.interval) if stored_index else uptime.stored_progress
        )
        if stop is None or stop.is_planned:
            next_stop = self._final_checkpoint(progress, stop)
            if next_stop is None:
                return stop
            stop = next_stop
        valid_progress = self._stored_before(stop.valid_until) if stop.valid_until is not None else None
        if valid_progress is not None:
            kept_progress = min(valid_progress, self._stored_progress)
        elif checkpoints.has_peer_copies and stop.is_single_node:
            kept_progress = max(self._stored_progress, self._peer_progress(uptime, wall) or self._progress)
        else:
            kept_progress = self._stored_progress
        totals.losses[LOST_WORK] += progress - kept_progress
        totals.interruptions += 1
        if self._timeline is not None and progress > kept_progress:
            self._timeline.append(
                TimelineInterval(uptime.wall_at(kept_progress, checkpoints), self._now, LOST_WORK, stop.cause)
            )
        self._progress = kept_progress
        self._stored_progress = min(self._stored_progress, kept_progress)
        return stop

    def _peer_progress(self, uptime: _Uptime, wall: Seconds) -> Seconds:
        """Progress of the last snapshot of an uptime of which peers hold a copy; 0: there is none."""
        checkpoints = self._parameters.checkpoint_timeline
        index = checkpoints.last_safe_snapshot(wall, checkpoints.work_after(wall), in_storage=False)
        return uptime.progress_at(index * checkpoints.interval) if index else 0.0

    def _total_work(self, uptime: _Uptime) -> Seconds:
        """The work of an uptime that completes the job."""
        _, segment_work, progress, rate = uptime.segments[-1]
        return segment_work + (self._parameters.work - progress) / rate

    def _final_checkpoint(self, progress: Seconds, stop: JobStop | None) -> JobStop | None:
        """Write a checkpoint before a planned stop; a failure meanwhile is returned, and nothing is saved."""
        begin = self._now
        next_stop = self._spend_phases(
            [(CHECKPOINTS, self._parameters.final_checkpoint_seconds)], "" if stop is None else stop.cause
        )
        self._totals.uptime += self._now - begin
        if next_stop is not None:
            return next_stop
        self._progress = self._stored_progress = progress
        return None

    def _stored_before(self, time: Seconds) -> Seconds:
        """Progress in storage whose snapshot began before a time; later checkpoints are discarded."""
        checkpoints = self._parameters.checkpoint_timeline
        while self._uptimes:
            uptime = self._uptimes[-1]
            if uptime.begin <= time:
                uptime_end = self._now if uptime.end is None else uptime.end
                uptime.end = min(time, uptime_end)
                last_stored = (
                    checkpoints.last_begun_snapshot(uptime.end - uptime.begin)
                    // checkpoints.stored_every
                    * checkpoints.stored_every
                )
                wall = uptime_end - uptime.begin
                checkpoint_index = min(
                    last_stored, checkpoints.last_safe_snapshot(wall, checkpoints.work_after(wall), in_storage=True)
                )
                return (
                    uptime.progress_at(checkpoint_index * checkpoints.interval)
                    if checkpoint_index
                    else uptime.stored_progress
                )
            self._uptimes.pop()
        return 0.0

    def _restart_after(self, stop: JobStop) -> None:
        """From a stop to the next restart, including further failures on the way."""
        next_stop: JobStop | None = stop
        while next_stop is not None:
            stop, next_stop = next_stop, None
            self._remove_nodes(stop)
            phases = [(DETECTION, stop.detection_time.at_z_score(stop.draws[0]))]
            if stop.outage_seconds:
                phases.append((MAINTENANCE, stop.outage_seconds))
            is_complete = self._pool.fill_missing(self._now)
            if not is_complete:
                next_stop = self._spend_phases(phases, stop.cause)
                if next_stop is None:
                    self._pool.fill_missing(self._now)
                    next_stop = self._wait_for_nodes(stop)
                phases = []
            if next_stop is None:
                phases.append((RESTART, self._restart_seconds(stop, had_spares=is_complete)))
                next_stop = self._spend_phases(phases, stop.cause)

    def _remove_nodes(self, stop: JobStop) -> None:
        """Nodes leave for repair; slowdowns on them end."""
        repair_time = stop.repair_time
        for index, node in enumerate(stop.nodes):
            if node not in self._pool.missing:
                self._slow_nodes.pop(node, None)
                repair_seconds = 0.0 if repair_time is None else repair_time.at_z_score(stop.draws[2 + index % 2])
                self._pool.remove_node(node, self._now, repair_seconds)

    def _wait_for_nodes(self, stop: JobStop) -> JobStop | None:
        """Wait until the job can run with the available nodes: all of them, or enough for an elastic job."""
        while self._pool.missing and not self._can_shrink():
            begin, self._is_waiting = self._now, True
            cause = self._wait_until(inf)
            self._is_waiting = False
            self._add_loss(WAITING, begin, self._now - begin, stop.cause)
            next_stop = self._handle_while_down(cause)
            if next_stop is not None:
                return next_stop
            self._pool.fill_missing(self._now)
        return None

    def _can_shrink(self) -> bool:
        return (
            self._reliability.elastic is not ElasticPolicy.WAIT
            and self._parameters.state_rate(len(self._pool.missing), None)[1] > 0.0
        )

    def _restart_seconds(self, stop: JobStop, *, had_spares: bool) -> Seconds:
        """Seconds of a restart. had_spares: whether spares were available at once."""
        keeps_allocation = had_spares and self._reliability.restart.only_failed and not stop.outage_seconds
        seconds, random_durations = self._restart_phases[stop.is_planned, keeps_allocation]
        for draw_index, duration in random_durations:
            seconds += duration.at_z_score(stop.draws[draw_index])
        return seconds

    def _spend_phases(self, phases: list[tuple[str, Seconds]], cause: str) -> JobStop | None:
        """Let the phases pass one after another; return a stop that interrupts them, else None."""
        next_stop, begin, total = None, self._now, 0.0
        for _, seconds in phases:
            total += seconds
        while next_stop is None:
            event_cause = self._run_ahead(begin + total)
            if event_cause is QUEUED:
                event_cause = self._wait_until(begin + total)
            if event_cause is None:
                break
            next_stop = self._handle_while_down(event_cause)
        remaining = total if next_stop is None else self._now - begin
        for loss, seconds in phases:
            phase_seconds = min(seconds, remaining)
            if phase_seconds > 0.0:
                self._add_loss(loss, begin, phase_seconds, cause)
                begin += phase_seconds
                remaining -= phase_seconds
        return next_stop

    def _handle_while_down(self, cause: object) -> JobStop | None:
        """The effect of an event on a job that is down: without steps nothing is slow or corrupt."""
        if isinstance(cause, _DetectedFailure):
            failure = self._reliability.failures[cause.event.failure_index]
            if failure.effect is CORRUPT:
                valid_progress = self._stored_before(cause.onset)
                if valid_progress < self._progress:
                    self._totals.losses[LOST_WORK] += self._progress - valid_progress
                    self._progress = valid_progress
                    self._stored_progress = min(self._stored_progress, valid_progress)
                return self._build_stop(failure, cause.event)
            self._slow_nodes.pop(cause.event.node, None)
            return None
        return (
            cause
            if isinstance(cause, JobStop) and not (cause.is_planned and not cause.outage_seconds and not cause.nodes)
            else None
        )

    # Accounting

    def _add_loss(self, loss: str, begin: Seconds, seconds: Seconds, cause: str) -> None:
        self._totals.losses[loss] += seconds
        if self._timeline is not None:
            self._timeline.append(TimelineInterval(begin, begin + seconds, loss, cause))

    def _add_state_time(self, state: str, begin: Seconds) -> None:
        seconds = self._now - begin
        self._totals.states[state] = self._totals.states.get(state, 0.0) + seconds
        if self._timeline is not None and seconds > 0.0:
            self._timeline.append(TimelineInterval(begin, self._now, state))


def _repeat_interrupt(
    env: simpy.Environment, interrupts: deque[tuple[Seconds, object]], period: Seconds, cause: object
) -> Generator[simpy.Event, None, None]:
    """Interrupt a job again and again."""
    while True:
        yield env.timeout(period)
        interrupts.append((env.now, cause))


RestartPhases = tuple[Seconds, list[tuple[int, DurationDistribution]]]
"""Seconds of the phases of fixed duration, (draw index, duration) of the random ones."""


def _restart_phases(parameters: JobParameters) -> dict[tuple[bool, bool], RestartPhases]:
    """The phases of a restart by whether it is planned and whether it keeps its allocation."""
    restart = parameters.reliability.restart
    phases = _restart_durations(restart, parameters.load_seconds)
    listed = {}
    for is_planned, keeps_allocation in product((False, True), repeat=2):
        skipped = {RestartSkip.PLANNED: is_planned, RestartSkip.ALLOCATION_KEPT: keeps_allocation}
        taken = [(index, duration) for index, duration, skip in phases if not skipped.get(skip)]
        fixed = sum(duration.mean for _, duration in taken if not duration.is_random)
        listed[is_planned, keeps_allocation] = (
            restart.init_per_rank * parameters.domains.gpus + fixed,
            [(index, duration) for index, duration in taken if duration.is_random],
        )
    return listed


def _restart_durations(
    restart: RestartTimes, load_seconds: Seconds
) -> list[tuple[int, DurationDistribution, RestartSkip]]:
    """(draw index, duration, skip rule) of the restart phases that take time."""
    phases = (
        (restart.diagnosis, RestartSkip.PLANNED),
        (restart.drain, RestartSkip.NEVER),
        (restart.schedule, RestartSkip.ALLOCATION_KEPT),
        (restart.image, RestartSkip.ALLOCATION_KEPT),
        (restart.init, RestartSkip.NEVER),
        (restart.load or DurationDistribution.constant(load_seconds), RestartSkip.NEVER),
        (restart.warmup, RestartSkip.NEVER),
    )
    return [(4 + index, duration, skip) for index, (duration, skip) in enumerate(phases) if duration.mean > 0.0]


def mean_restart_seconds(parameters: JobParameters) -> Seconds:
    """What a planned restart takes on average."""
    restart = parameters.reliability.restart
    phases = _restart_durations(restart, parameters.load_seconds)
    random_seconds = sum(phase[1].mean for phase in phases if phase[2] is not RestartSkip.PLANNED)
    return restart.init_per_rank * parameters.domains.gpus + random_seconds
