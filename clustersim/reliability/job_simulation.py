"""What happens to a job over weeks? A simpy process that works, checkpoints, fails, restarts and waits.

Work is measured in seconds of the healthy job. While the job is up its work follows in closed form
(`checkpoint_timeline`), so a run has as many events as failures. Failures while the job is down lengthen
the outage.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, Final, NamedTuple

import simpy

from clustersim.common.units import Seconds
from clustersim.hardware.failures import DurationDistribution, FailureEffect, FailureMode, FailureSlowdown
from clustersim.reliability.checkpoint_timeline import CheckpointTimeline
from clustersim.reliability.failure_domains import FailureDomains
from clustersim.reliability.failure_events import FailureEvent
from clustersim.reliability.node_pool import NodePool
from clustersim.results.goodput import TimelineInterval, TrainingRun
from clustersim.scenario.reliability import ElasticPolicy, ReliabilityModel, RestartTimes

Process = Generator[Any, Any, Any]
NO_EFFECT: Final = "nothing"
"""An interrupt cause without effect."""


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

    work: Seconds = 0.0
    losses: dict[str, Seconds] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))
    states: dict[str, Seconds] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    interruptions: int = 0
    uptime: Seconds = 0.0


class JobStop(NamedTuple):
    """Why a job stops.

    nodes: lost with it; is_planned: a checkpoint is written first; valid_until: time from which on results are
    corrupt; outage_seconds: duration of an intended outage; draws: z-scores of its random durations.
    """

    cause: str
    detection_time: DurationDistribution
    draws: Sequence[float]
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
        _, segment_work, progress, rate = next(segment for segment in reversed(self.segments) if segment[1] <= work)
        return progress + (work - segment_work) * rate

    def wall_at(self, progress: Seconds, checkpoints: CheckpointTimeline) -> Seconds:
        """The simulation time at which this progress was reached; that of the restart if it was before."""
        _, segment_work, segment_progress, rate = next(
            (segment for segment in reversed(self.segments) if segment[2] <= progress), self.segments[0]
        )
        return self.begin + checkpoints.wall_time_of(max(0.0, segment_work + (progress - segment_progress) / rate))


class JobSimulation:
    """One run. progress_marks: (time, progress) at each end of an uptime, of which some progress may then be lost."""

    def __init__(
        self, parameters: JobParameters, events: Iterator[FailureEvent], timeline: list[TimelineInterval] | None = None
    ) -> None:
        self._parameters, self._events, self._timeline = parameters, events, timeline
        self._reliability = parameters.reliability
        self._env = simpy.Environment()
        self._totals = _RunTotals()
        self._pool = NodePool(
            self._env,
            parameters.domains,
            self._reliability.spares,
            self._reliability.repair_slots,
            self._on_node_repaired,
        )
        self._slow_nodes: dict[int, tuple[FailureSlowdown, float]] = {}
        self._uptimes: list[_Uptime] = []
        self._progress = self._stored_progress = 0.0
        phases = _restart_durations(self._reliability.restart, parameters.load_seconds)
        self._random_durations = [phase for phase in phases if phase[1].is_random or phase[2] is not RestartSkip.NEVER]
        self._fixed_restart_seconds = self._reliability.restart.init_per_rank * parameters.domains.gpus
        self._fixed_restart_seconds += sum(phase[1].mean for phase in phases if phase not in self._random_durations)
        self._can_regrow = self._is_waiting = False
        self.progress_marks: list[tuple[Seconds, Seconds]] = []
        self._next_event = next(events, None)
        self._process = self._env.process(self._alternate_up_down())
        if self._reliability.maintenance is not None:
            self._env.process(
                self._schedule_maintenance(self._reliability.maintenance.period, self._reliability.maintenance.duration)
            )

    def run(self, run_index: int = 0) -> TrainingRun:
        """Simulate until the work is done or the wall time limit is reached. run_index: stored in the result."""
        self._env.run(until=self._env.any_of([self._process, self._env.timeout(self._parameters.max_wall)]))
        totals, wall, finished = self._totals, float(self._env.now), not self._process.is_alive
        if not finished:  # unfinished work is lost
            totals.losses[LOST_WORK] += wall - totals.work - sum(totals.losses.values())
        return TrainingRun(
            number=run_index,
            wall=wall,
            work=totals.work,
            finished=finished,
            losses=totals.losses,
            states=totals.states,
            failures=dict(totals.failures),
            interruptions=totals.interruptions,
            up=totals.uptime,
            nodes=self._pool.node_seconds(),
        )

    # Events

    def _wait_until(self, end: Seconds) -> Process:
        """Let time pass until `end`; return what interrupts it (a stop, a detection or a silent failure), else None."""
        env, event = self._env, self._next_event
        event_is_next = event is not None and event.time < end
        wake_time = event.time if event is not None and event_is_next else end
        try:
            yield env.timeout(max(0.0, wake_time - env.now)) if wake_time < inf else env.event()
        except simpy.Interrupt as interrupt:
            return interrupt.cause
        if not event_is_next or event is None:
            return None
        self._next_event = next(self._events, None)
        if event.node in self._pool.missing:
            return NO_EFFECT  # the node is absent and cannot fail
        failure = self._reliability.failures[event.failure_index]
        self._totals.failures[failure.name] += 1
        is_silent = failure.effect is FailureEffect.SLOW or failure.effect is FailureEffect.CORRUPT
        return event if is_silent else self._build_stop(failure, event)

    def _build_stop(self, failure: FailureMode, event: FailureEvent, valid_until: Seconds | None = None) -> JobStop:
        nodes = self._parameters.domains.lost_nodes(failure.failure_domain, event.node)
        is_planned = failure.effect is FailureEffect.PLANNED or failure.effect is FailureEffect.SLOW
        return JobStop(
            failure.name, failure.detection_time, event.draws, nodes, failure.repair_time, is_planned, valid_until
        )

    def _schedule_maintenance(self, period: Seconds, duration: Seconds) -> Process:
        while True:
            yield self._env.timeout(period)
            if not self._process.is_alive:
                return
            self._process.interrupt(
                JobStop("maintenance", DurationDistribution.constant(0.0), (), is_planned=True, outage_seconds=duration)
            )

    def _on_node_repaired(self) -> None:
        """A node is repaired: a waiting job checks again, a shrunk job restarts if it can run more replicas."""
        if not self._process.is_alive:
            return
        if self._is_waiting:
            self._process.interrupt(NO_EFFECT)
        elif self._can_regrow and self._current_rate()[1] > self._uptimes[-1].segments[-1][3]:
            self._can_regrow = False
            self._process.interrupt(JobStop("nodes are back", DurationDistribution.constant(0.0), (), is_planned=True))

    # Up and down

    def _alternate_up_down(self) -> Process:
        while True:
            stop = yield from self._run_until_stop()
            if stop is None:
                return
            yield from self._restart_after(stop)

    def _current_rate(self) -> tuple[str, float]:
        if not self._slow_nodes and not self._pool.missing:
            return HEALTHY, 1.0
        slowest = min(self._slow_nodes.values(), key=lambda slow_node: slow_node[1], default=None)
        return self._parameters.state_rate(len(self._pool.missing), None if slowest is None else slowest[0])

    def _run_until_stop(self) -> Process:
        """Work until all is done (returns None), or something stops the job."""
        env, checkpoints = self._env, self._parameters.checkpoint_timeline
        state, rate = self._current_rate()
        uptime = _Uptime(env.now, self._stored_progress, [(0.0, 0.0, self._progress, rate)])
        self._uptimes.append(uptime)
        self._can_regrow = bool(self._pool.missing)
        state_begin = env.now
        while True:
            _, segment_work, progress, rate = uptime.segments[-1]
            cause = yield from self._wait_until(
                uptime.begin + checkpoints.wall_time_of(segment_work + (self._parameters.work - progress) / rate)
            )
            stop = None if cause is None else self._handle_while_up(cause)
            if stop is not None or cause is None:
                self._add_state_time(state, state_begin)
                return (yield from self._end_uptime(uptime, stop))
            new_state, new_rate = self._current_rate()
            if (new_state, new_rate) != (state, rate):
                self._add_state_time(state, state_begin)
                work = checkpoints.work_after(env.now - uptime.begin)
                uptime.segments.append((env.now - uptime.begin, work, uptime.progress_at(work), new_rate))
                state, state_begin = new_state, env.now

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
        self._env.process(
            self._detect_after(
                _DetectedFailure(event, self._env.now), failure.discovery_time.at_z_score(event.draws[1])
            )
        )

    def _detect_after(self, detected: _DetectedFailure, delay: Seconds) -> Process:
        yield self._env.timeout(delay)
        if self._process.is_alive:
            self._process.interrupt(detected)

    def _handle_detection(self, detected: _DetectedFailure) -> JobStop | None:
        """A slow node is replaced, or tolerated; corrupt results are rolled back."""
        failure, node = self._reliability.failures[detected.event.failure_index], detected.event.node
        if failure.effect is FailureEffect.CORRUPT:
            return self._build_stop(failure, detected.event, valid_until=detected.onset)
        if self._slow_nodes.pop(node, None) is None or not self._reliability.replaces_slow_nodes:
            return None
        return self._build_stop(failure, detected.event)

    def _end_uptime(self, uptime: _Uptime, stop: JobStop | None) -> Process:
        """End an uptime: account for its work and what of it is safe; a planned stop writes a checkpoint first."""
        env, checkpoints, totals = self._env, self._parameters.checkpoint_timeline, self._totals
        wall = env.now - uptime.begin
        work = checkpoints.work_after(wall) if stop is not None else self._total_work(uptime)
        progress = min(uptime.progress_at(work), self._parameters.work)
        totals.losses[CHECKPOINTS] += wall - work
        totals.losses[DEGRADED] += work - (progress - self._progress)
        totals.uptime += wall
        self.progress_marks.append((env.now, progress))
        uptime.end = env.now
        stored_index = checkpoints.last_safe_snapshot(wall, in_storage=True)
        self._stored_progress = (
            uptime.progress_at(stored_index * checkpoints.interval) if stored_index else uptime.stored_progress
        )
        peer_index = checkpoints.last_safe_snapshot(wall, in_storage=False) if checkpoints.has_peer_copies else 0
        safe_progress = max(
            self._stored_progress,
            uptime.progress_at(peer_index * checkpoints.interval)
            if peer_index
            else self._progress * checkpoints.has_peer_copies,
        )
        if stop is None or stop.is_planned:
            next_stop = yield from self._final_checkpoint(progress, stop)
            if next_stop is None:
                return stop
            stop = next_stop
        valid_progress = self._stored_before(stop.valid_until) if stop.valid_until is not None else None
        kept_progress = (
            min(valid_progress, self._stored_progress)
            if valid_progress is not None
            else safe_progress
            if stop.is_single_node
            else self._stored_progress
        )
        totals.losses[LOST_WORK] += progress - kept_progress
        totals.interruptions += 1
        if self._timeline is not None and progress > kept_progress:
            self._timeline.append(
                TimelineInterval(uptime.wall_at(kept_progress, checkpoints), env.now, LOST_WORK, stop.cause)
            )
        self._progress = kept_progress
        self._stored_progress = min(self._stored_progress, kept_progress)
        self._commit_work()
        return stop

    def _total_work(self, uptime: _Uptime) -> Seconds:
        """The work of an uptime that completes the job."""
        _, segment_work, progress, rate = uptime.segments[-1]
        return segment_work + (self._parameters.work - progress) / rate

    def _final_checkpoint(self, progress: Seconds, stop: JobStop | None) -> Process:
        """Write a checkpoint before a planned stop; a failure meanwhile is returned, and nothing is saved."""
        begin = self._env.now
        next_stop = yield from self._spend_phases(
            [(CHECKPOINTS, self._parameters.final_checkpoint_seconds)], "" if stop is None else stop.cause
        )
        self._totals.uptime += self._env.now - begin
        if next_stop is not None:
            return next_stop
        self._progress = self._stored_progress = progress
        self._commit_work()
        return None

    def _commit_work(self) -> None:
        self._totals.work = self._progress

    def _stored_before(self, time: Seconds) -> Seconds:
        """Progress in storage whose snapshot began before a time; later checkpoints are discarded."""
        checkpoints = self._parameters.checkpoint_timeline
        while self._uptimes:
            uptime = self._uptimes[-1]
            if uptime.begin <= time:
                uptime_end = self._env.now if uptime.end is None else uptime.end
                uptime.end = min(time, uptime_end)
                last_stored = (
                    checkpoints.last_begun_snapshot(uptime.end - uptime.begin)
                    // checkpoints.stored_every
                    * checkpoints.stored_every
                )
                checkpoint_index = min(
                    last_stored, checkpoints.last_safe_snapshot(uptime_end - uptime.begin, in_storage=True)
                )
                return (
                    uptime.progress_at(checkpoint_index * checkpoints.interval)
                    if checkpoint_index
                    else uptime.stored_progress
                )
            self._uptimes.pop()
        return 0.0

    def _restart_after(self, stop: JobStop) -> Process:
        """From a stop to the next restart, including further failures on the way."""
        next_stop: JobStop | None = stop
        while next_stop is not None:
            stop, next_stop = next_stop, None
            self._remove_nodes(stop)
            phases = [
                (DETECTION, stop.detection_time.at_z_score(_z_score(stop, 0))),
                (MAINTENANCE, stop.outage_seconds),
            ]
            is_complete = self._pool.fill_missing()
            if not is_complete:
                next_stop = yield from self._spend_phases(phases, stop.cause)
                if next_stop is None:
                    self._pool.fill_missing()
                    next_stop = yield from self._wait_for_nodes(stop)
                phases = []
            if next_stop is None:
                phases.append((RESTART, self._restart_seconds(stop, had_spares=is_complete)))
                next_stop = yield from self._spend_phases(phases, stop.cause)

    def _remove_nodes(self, stop: JobStop) -> None:
        """Nodes leave for repair; slowdowns on them end."""
        repair_time = stop.repair_time
        for index, node in enumerate(stop.nodes):
            if node not in self._pool.missing:
                self._slow_nodes.pop(node, None)
                self._pool.remove_node(
                    node, 0.0 if repair_time is None else repair_time.at_z_score(_z_score(stop, 2 + index % 2))
                )

    def _wait_for_nodes(self, stop: JobStop) -> Process:
        """Wait until the job can run with the available nodes: all of them, or enough for an elastic job."""
        while self._pool.missing and not self._can_shrink():
            begin, self._is_waiting = self._env.now, True
            cause = yield from self._wait_until(inf)
            self._is_waiting = False
            self._add_loss(WAITING, begin, self._env.now - begin, stop.cause)
            next_stop = self._handle_while_down(cause)
            if next_stop is not None:
                return next_stop
            self._pool.fill_missing()
        return None

    def _can_shrink(self) -> bool:
        return (
            self._reliability.elastic is not ElasticPolicy.WAIT
            and self._parameters.state_rate(len(self._pool.missing), None)[1] > 0.0
        )

    def _restart_seconds(self, stop: JobStop, *, had_spares: bool) -> Seconds:
        """Seconds of a restart. had_spares: whether spares were available at once."""
        keeps_allocation = self._reliability.restart.only_failed and had_spares and not stop.outage_seconds
        seconds = self._fixed_restart_seconds
        for draw_index, duration, skip in self._random_durations:
            if not (skip is RestartSkip.PLANNED and stop.is_planned) and not (
                skip is RestartSkip.ALLOCATION_KEPT and keeps_allocation
            ):
                seconds += duration.at_z_score(_z_score(stop, 4 + draw_index))
        return seconds

    def _spend_phases(self, phases: list[tuple[str, Seconds]], cause: str) -> Process:
        """Let the phases pass one after another; return a stop that interrupts them, else None."""
        env, next_stop = self._env, None
        begin, total = env.now, sum([seconds for _, seconds in phases])
        while next_stop is None and (event_cause := (yield from self._wait_until(begin + total))) is not None:
            next_stop = self._handle_while_down(event_cause)
        remaining = total if next_stop is None else env.now - begin
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
            if failure.effect is FailureEffect.CORRUPT:
                valid_progress = self._stored_before(cause.onset)
                if valid_progress < self._progress:
                    self._totals.losses[LOST_WORK] += self._progress - valid_progress
                    self._progress = valid_progress
                    self._stored_progress = min(self._stored_progress, valid_progress)
                    self._commit_work()
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
        seconds = self._env.now - begin
        self._totals.states[state] = self._totals.states.get(state, 0.0) + seconds
        if self._timeline is not None and seconds > 0.0:
            self._timeline.append(TimelineInterval(begin, self._env.now, state))


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
    return [(draw_index, duration, skip) for draw_index, (duration, skip) in enumerate(phases) if duration.mean > 0.0]


def mean_restart_seconds(parameters: JobParameters) -> Seconds:
    """What a planned restart takes on average."""
    restart = parameters.reliability.restart
    phases = _restart_durations(restart, parameters.load_seconds)
    random_seconds = sum(phase[1].mean for phase in phases if phase[2] is not RestartSkip.PLANNED)
    return restart.init_per_rank * parameters.domains.gpus + random_seconds


def _z_score(stop: JobStop, index: int) -> float:
    """A standard normal draw of the failure; 0 where there are none."""
    return stop.draws[index] if stop.draws else 0.0
