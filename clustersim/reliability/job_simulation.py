"""What becomes of a job over weeks? A simpy process that works, saves, breaks, restarts and waits.

Work is counted in seconds of the healthy job. While it is up its work follows from closed forms (`saving`), so a run
has as many events as things break. Whatever breaks while the job is down lengthens that.
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
from clustersim.reliability.checkpoint_timeline import Saving
from clustersim.reliability.failure_domains import Site
from clustersim.reliability.failure_events import Event
from clustersim.reliability.node_pool import Pool
from clustersim.results.goodput import Piece, Run
from clustersim.scenario.reliability import ElasticPolicy, ReliabilityModel, RestartTimes

Process = Generator[Any, Any, Any]
NOTHING: Final = "nothing"
"""A cause that changes nothing."""


CHECKPOINTS, LOST_WORK, DETECTION, RESTART = "checkpoints", "lost_work", "detection", "restart"
WAITING, MAINTENANCE, DEGRADED = "waiting", "maintenance", "degraded"
LOSSES: Final = (CHECKPOINTS, LOST_WORK, DETECTION, RESTART, WAITING, MAINTENANCE, DEGRADED)
"""What a job's time goes into beside work that counts, as answers call it."""

HEALTHY: Final = "healthy"


class Skipped(Enum):
    """Which restarts do without a part. PLANNED: those that were planned; KEPT: those of failed nodes alone."""

    NEVER = 0
    PLANNED = 1
    KEPT = 2


Pace = Callable[[int, FailureSlowdown | None], tuple[str, float]]
"""The name of a state of the cluster with so many nodes missing and something slow, and work per second in it: of the
healthy job's; 0 where it cannot run. The number of nodes is 0 where all are there."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job does whatever breaks. work: seconds of the healthy job; load: of a checkpoint; most: of a run.

    stop: for how long a checkpoint blocks behind which the job is ended.
    """

    reliability: ReliabilityModel
    site: Site
    saving: Saving
    work: Seconds
    load: Seconds
    stop: Seconds
    pace: Pace
    most: Seconds


@dataclass(slots=True)
class _Sums:
    """What is added up while a job runs, as in `analysis.goodput.Run`."""

    work: Seconds = 0.0
    losses: dict[str, Seconds] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))
    states: dict[str, Seconds] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    interruptions: int = 0
    up: Seconds = 0.0


class Stop(NamedTuple):
    """Why a job ends. nodes: what is lost with it; planned: behind a checkpoint; back_to: when work began to be wrong.

    lasts: for how long all is down on purpose; draws: of its lengths.
    """

    cause: str
    detection: DurationDistribution
    draws: Sequence[float]
    nodes: tuple[int, ...] = ()
    repair: DurationDistribution | None = None
    planned: bool = False
    back_to: Seconds | None = None
    lasts: Seconds = 0.0

    @property
    def alone(self) -> bool:
        """Whether it took so little that peers have a copy."""
        return len(self.nodes) < 2


@dataclass(frozen=True, slots=True)
class _Noticed:
    """What went on unnoticed is found. began: when it did."""

    event: Event
    began: Seconds


@dataclass(slots=True)
class _Up:
    """The job since a restart. segments: wall time since then, work and progress when the state changed, and its pace.

    stored: progress in storage from before.
    """

    begin: Seconds
    stored: Seconds
    segments: list[tuple[Seconds, Seconds, Seconds, float]]
    until: Seconds | None = None

    def progress(self, work: Seconds) -> Seconds:
        """Of so much work since the restart."""
        _, done, progress, pace = next(segment for segment in reversed(self.segments) if segment[1] <= work)
        return progress + (work - done) * pace

    def wall_at(self, progress: Seconds, saving: Saving) -> Seconds:
        """The wall time at which so much was done; the restart where that was before it."""
        _, done, had, pace = next(
            (segment for segment in reversed(self.segments) if segment[2] <= progress), self.segments[0]
        )
        return self.begin + saving.wall(max(0.0, done + (progress - had) / pace))


class Job:
    """One run. marks: whenever it ended, the time and the work that was done by then, of which some may be lost."""

    def __init__(self, terms: Terms, events: Iterator[Event], record: list[Piece] | None = None) -> None:
        self._terms, self._events, self._record = terms, events, record
        self._said = terms.reliability
        self._env = simpy.Environment()
        self._sums = _Sums()
        self._pool = Pool(self._env, terms.site, self._said.spares, self._said.repair_slots, self._come_back)
        self._slow: dict[int, tuple[FailureSlowdown, float]] = {}
        self._ups: list[_Up] = []
        self._progress = self._stored = 0.0
        parts = _lengths(self._said.restart, terms.load)
        self._lengths = [item for item in parts if item[1].is_random or item[2] is not Skipped.NEVER]
        self._always = self._said.restart.init_per_rank * terms.site.gpus
        self._always += sum(element[1].mean for element in parts if element not in self._lengths)
        self._regrows = self._waits = False
        self.marks: list[tuple[Seconds, Seconds]] = []
        self._next = next(events, None)
        self._process = self._env.process(self._run())
        if self._said.maintenance is not None:
            self._env.process(self._maintain(self._said.maintenance.period, self._said.maintenance.duration))

    def run(self, number: int = 0) -> Run:
        """Run it to its end, or for as long as it may take. number: of the run, by which it is known."""
        self._env.run(until=self._env.any_of([self._process, self._env.timeout(self._terms.most)]))
        sums, wall, finished = self._sums, float(self._env.now), not self._process.is_alive
        if not finished:  # what was under way is lost
            sums.losses[LOST_WORK] += wall - sums.work - sum(sums.losses.values())
        return Run(
            number=number,
            wall=wall,
            work=sums.work,
            finished=finished,
            losses=sums.losses,
            states=sums.states,
            failures=dict(sums.failures),
            interruptions=sums.interruptions,
            up=sums.up,
            nodes=self._pool.seconds(),
        )

    # What happens

    def _until(self, end: Seconds) -> Process:
        """Let time go by; what comes before its end is returned: what ends the job, or is noticed, or begins."""
        env, event = self._env, self._next
        first = event is not None and event.time < end
        ends = event.time if event is not None and first else end
        try:
            yield env.timeout(max(0.0, ends - env.now)) if ends < inf else env.event()
        except simpy.Interrupt as interrupt:
            return interrupt.cause
        if not first or event is None:
            return None
        self._next = next(self._events, None)
        if event.node in self._pool.missing:
            return NOTHING  # nothing is there that could break
        failure = self._said.failures[event.failure]
        self._sums.failures[failure.name] += 1
        unnoticed = failure.effect is FailureEffect.SLOW or failure.effect is FailureEffect.CORRUPT
        return event if unnoticed else self._stop(failure, event)

    def _stop(self, failure: FailureMode, event: Event, back_to: Seconds | None = None) -> Stop:
        nodes = self._terms.site.taken(failure.failure_domain, event.node)
        planned = failure.effect is FailureEffect.PLANNED or failure.effect is FailureEffect.SLOW
        return Stop(failure.name, failure.detection_time, event.draws, nodes, failure.repair_time, planned, back_to)

    def _maintain(self, every: Seconds, lasts: Seconds) -> Process:
        while True:
            yield self._env.timeout(every)
            if not self._process.is_alive:
                return
            self._process.interrupt(
                Stop("maintenance", DurationDistribution.constant(0.0), (), planned=True, lasts=lasts)
            )

    def _come_back(self) -> None:
        """A node is repaired: a job that waits looks again, one that runs without it takes it if more replicas run."""
        if not self._process.is_alive:
            return
        if self._waits:
            self._process.interrupt(NOTHING)
        elif self._regrows and self._pace_now()[1] > self._ups[-1].segments[-1][3]:
            self._regrows = False
            self._process.interrupt(Stop("nodes are back", DurationDistribution.constant(0.0), (), planned=True))

    # Up and down

    def _run(self) -> Process:
        while True:
            stop = yield from self._up()
            if stop is None:
                return
            yield from self._down(stop)

    def _pace_now(self) -> tuple[str, float]:
        if not self._slow and not self._pool.missing:
            return HEALTHY, 1.0
        slowest = min(self._slow.values(), key=lambda each: each[1], default=None)
        return self._terms.pace(len(self._pool.missing), None if slowest is None else slowest[0])

    def _up(self) -> Process:
        """Work until all is done (None), or something ends it."""
        env, saving = self._env, self._terms.saving
        state, pace = self._pace_now()
        up = _Up(env.now, self._stored, [(0.0, 0.0, self._progress, pace)])
        self._ups.append(up)
        self._regrows = bool(self._pool.missing)
        since = env.now
        while True:
            _, done, progress, pace = up.segments[-1]
            cause = yield from self._until(up.begin + saving.wall(done + (self._terms.work - progress) / pace))
            stop = None if cause is None else self._meets(cause)
            if stop is not None or cause is None:
                self._stay(state, since)
                return (yield from self._ends(up, stop))
            changed, pace_then = self._pace_now()
            if (changed, pace_then) != (state, pace):
                self._stay(state, since)
                work = saving.work(env.now - up.begin)
                up.segments.append((env.now - up.begin, work, up.progress(work), pace_then))
                state, since = changed, env.now

    def _meets(self, cause: object) -> Stop | None:
        """What something does to a job that is up: None if it goes on."""
        if isinstance(cause, Stop):
            return cause
        if isinstance(cause, _Noticed):
            return self._notice(cause)
        if isinstance(cause, Event):
            self._begin(cause)
        return None

    def _begin(self, event: Event) -> None:
        """A part is slow, or numbers are wrong, from now on."""
        failure = self._said.failures[event.failure]
        if failure.slowdown is not None:
            self._slow[event.node] = (failure.slowdown, self._terms.pace(0, failure.slowdown)[1])
        self._env.process(self._find(_Noticed(event, self._env.now), failure.discovery_time.at_z_score(event.draws[1])))

    def _find(self, noticed: _Noticed, after: Seconds) -> Process:
        yield self._env.timeout(after)
        if self._process.is_alive:
            self._process.interrupt(noticed)

    def _notice(self, found: _Noticed) -> Stop | None:
        """A slow node is replaced, or lives with it no longer; wrong numbers are gone back behind."""
        failure, node = self._said.failures[found.event.failure], found.event.node
        if failure.effect is FailureEffect.CORRUPT:
            return self._stop(failure, found.event, back_to=found.began)
        if self._slow.pop(node, None) is None or not self._said.replaces_slow_nodes:
            return None
        return self._stop(failure, found.event)

    def _ends(self, up: _Up, stop: Stop | None) -> Process:
        """The job ends: count what it did, and what of it is safe; a checkpoint comes first where that was planned."""
        env, saving, sums = self._env, self._terms.saving, self._sums
        wall = env.now - up.begin
        work = saving.work(wall) if stop is not None else self._all_of(up)
        progress = min(up.progress(work), self._terms.work)
        sums.losses[CHECKPOINTS] += wall - work
        sums.losses[DEGRADED] += work - (progress - self._progress)
        sums.up += wall
        self.marks.append((env.now, progress))
        up.until = env.now
        stored = saving.safe(wall, stored=True)
        self._stored = up.progress(stored * saving.compute) if stored else up.stored
        copied = saving.safe(wall, stored=False) if saving.peers else 0
        safe = max(self._stored, up.progress(copied * saving.compute) if copied else self._progress * saving.peers)
        if stop is None or stop.planned:
            later = yield from self._save(progress, stop)
            if later is None:
                return stop
            stop = later
        before = self._safe_before(stop.back_to) if stop.back_to is not None else None
        keeps = min(before, self._stored) if before is not None else safe if stop.alone else self._stored
        sums.losses[LOST_WORK] += progress - keeps
        sums.interruptions += 1
        if self._record is not None and progress > keeps:
            self._record.append(Piece(up.wall_at(keeps, saving), env.now, LOST_WORK, stop.cause))
        self._progress = keeps
        self._stored = min(self._stored, keeps)
        self._settle()
        return stop

    def _all_of(self, up: _Up) -> Seconds:
        """The work of a job that was done to its end."""
        _, done, progress, pace = up.segments[-1]
        return done + (self._terms.work - progress) / pace

    def _save(self, progress: Seconds, stop: Stop | None) -> Process:
        """A checkpoint before a planned end; what breaks meanwhile is returned, and nothing is saved."""
        began = self._env.now
        later = yield from self._spend([(CHECKPOINTS, self._terms.stop)], "" if stop is None else stop.cause)
        self._sums.up += self._env.now - began
        if later is not None:
            return later
        self._progress = self._stored = progress
        self._settle()
        return None

    def _settle(self) -> None:
        self._sums.work = self._progress

    def _safe_before(self, time: Seconds) -> Seconds:
        """Progress in storage whose snapshot began before a time; what came later is forgotten."""
        saving = self._terms.saving
        while self._ups:
            up = self._ups[-1]
            if up.begin <= time:
                ended = self._env.now if up.until is None else up.until
                up.until = min(time, ended)
                begun = saving.begun(up.until - up.begin) // saving.stored_every * saving.stored_every
                number = min(begun, saving.safe(ended - up.begin, stored=True))
                return up.progress(number * saving.compute) if number else up.stored
            self._ups.pop()
        return 0.0

    def _down(self, stop: Stop) -> Process:
        """From the end of the job to its next beginning, whatever else breaks."""
        later: Stop | None = stop
        while later is not None:
            stop, later = later, None
            self._lose(stop)
            parts = [(DETECTION, stop.detection.at_z_score(_draw(stop, 0))), (MAINTENANCE, stop.lasts)]
            at_hand = self._pool.fill()
            if not at_hand:
                later = yield from self._spend(parts, stop.cause)
                if later is None:
                    self._pool.fill()
                    later = yield from self._wait(stop)
                parts = []
            if later is None:
                parts.append((RESTART, self._restart(stop, at_hand=at_hand)))
                later = yield from self._spend(parts, stop.cause)

    def _lose(self, stop: Stop) -> None:
        """Nodes leave for repair; what is slow on them goes with them."""
        repair = stop.repair
        for number, node in enumerate(stop.nodes):
            if node not in self._pool.missing:
                self._slow.pop(node, None)
                self._pool.lose(node, 0.0 if repair is None else repair.at_z_score(_draw(stop, 2 + number % 2)))

    def _wait(self, stop: Stop) -> Process:
        """Wait until the job can run with the nodes that there are: with all, or with as many as it can do with."""
        while self._pool.missing and not self._can_shrink():
            began, self._waits = self._env.now, True
            cause = yield from self._until(inf)
            self._waits = False
            self._spent(WAITING, began, self._env.now - began, stop.cause)
            later = self._meets_down(cause)
            if later is not None:
                return later
            self._pool.fill()
        return None

    def _can_shrink(self) -> bool:
        return self._said.elastic is not ElasticPolicy.WAIT and self._terms.pace(len(self._pool.missing), None)[1] > 0.0

    def _restart(self, stop: Stop, *, at_hand: bool) -> Seconds:
        """How long the job takes to begin again. at_hand: whether spares were there at once."""
        kept = self._said.restart.only_failed and at_hand and not stop.lasts
        seconds = self._always
        for number, length, skipped in self._lengths:
            if not (skipped is Skipped.PLANNED and stop.planned) and not (skipped is Skipped.KEPT and kept):
                seconds += length.at_z_score(_draw(stop, 4 + number))
        return seconds

    def _spend(self, parts: list[tuple[str, Seconds]], cause: str) -> Process:
        """Let time go by for some things, one behind the other; what ends that is returned, None if nothing does."""
        env, later = self._env, None
        began, whole = env.now, sum([seconds for _, seconds in parts])
        while later is None and (met := (yield from self._until(began + whole))) is not None:
            later = self._meets_down(met)
        left = whole if later is None else env.now - began
        for loss, seconds in parts:
            took = min(seconds, left)
            if took > 0.0:
                self._spent(loss, began, took, cause)
                began += took
                left -= took
        return later

    def _meets_down(self, cause: object) -> Stop | None:
        """What something does to a job that is down already: what runs no step is neither slow nor wrong."""
        if isinstance(cause, _Noticed):
            failure = self._said.failures[cause.event.failure]
            if failure.effect is FailureEffect.CORRUPT:
                back = self._safe_before(cause.began)
                if back < self._progress:
                    self._sums.losses[LOST_WORK] += self._progress - back
                    self._progress = back
                    self._stored = min(self._stored, back)
                    self._settle()
                return self._stop(failure, cause.event)
            self._slow.pop(cause.event.node, None)
            return None
        return (
            cause if isinstance(cause, Stop) and not (cause.planned and not cause.lasts and not cause.nodes) else None
        )

    # What is counted

    def _spent(self, loss: str, began: Seconds, took: Seconds, cause: str) -> None:
        self._sums.losses[loss] += took
        if self._record is not None:
            self._record.append(Piece(began, began + took, loss, cause))

    def _stay(self, state: str, since: Seconds) -> None:
        took = self._env.now - since
        self._sums.states[state] = self._sums.states.get(state, 0.0) + took
        if self._record is not None and took > 0.0:
            self._record.append(Piece(since, self._env.now, state))


def _lengths(said: RestartTimes, load: Seconds) -> list[tuple[int, DurationDistribution, Skipped]]:
    """What a restart takes, with the number of its draw, and when it is not needed; without what takes no time."""
    parts = (
        (said.diagnosis, Skipped.PLANNED),
        (said.drain, Skipped.NEVER),
        (said.schedule, Skipped.KEPT),
        (said.image, Skipped.KEPT),
        (said.init, Skipped.NEVER),
        (said.load or DurationDistribution.constant(load), Skipped.NEVER),
        (said.warmup, Skipped.NEVER),
    )
    return [(number, length, skipped) for number, (length, skipped) in enumerate(parts) if length.mean > 0.0]


def _draw(stop: Stop, number: int) -> float:
    """A standard normal number of what broke; the middle where nothing was drawn."""
    return stop.draws[number] if stop.draws else 0.0
