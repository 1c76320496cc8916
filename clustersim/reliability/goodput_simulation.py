"""How long does a run of so many tokens take, on a cluster that breaks, and what does it cost?

Checkpoints come as often, and as many spares stand by, as is said, or as is best: with the least expected time, and
with the most work for all nodes that are paid. Both are found by simulation of fewer runs, in which the same breaks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

from clustersim.common.errors import InputError
from clustersim.common.journal import Journal
from clustersim.common.processes import worker_pool
from clustersim.common.units import Seconds, format_seconds
from clustersim.hardware.failures import ZERO_DURATION, DurationDistribution
from clustersim.reliability.checkpoint_cost import (
    LEAST,
    Storing,
    daly,
    formula,
    in_repair,
    mean_time_to_interruption,
    storing,
    work_of,
    young,
)
from clustersim.reliability.cluster_states import States
from clustersim.reliability.failure_domains import Site, site_of
from clustersim.reliability.job_simulation import Terms
from clustersim.reliability.monte_carlo import Runs, plain
from clustersim.results.goodput import DAY, Change, Checkpointing, Goodput, Point, Run
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.scenario.reliability import CheckpointIntervalRule, ReliabilityModel, RestartTimes
from clustersim.simulation import simulate

RUNS: Final = 1000
MOST_RUNS: Final = 1_000_000
LONGEST: Final = 20.0
"""Times the ideal that a run may take; what is not done then never is, for planning."""
MOST_FAILURES: Final = 50_000
"""Of a run, on average; longer ones are ended there, too."""
NAME: Final = "runs.jsonl"
_EVENTS: Final = 4000.0  # failures that a point of a curve is made of
_FEWEST, _MOST = 4, 16  # runs of a point
_SHORTER: Final = 0.2  # of a run's longest time, for a point of a curve
_OCTAVES: Final = np.arange(-3.0, 3.01, 0.5)  # of intervals around Daly's
_NEAR: Final = 3  # points on either side of the best one
_POOR: Final = 0.8  # of the best goodput: fewer spares are not tried
_SPARES: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_QUICK: Final = 120.0  # seconds of the restart that a what-if supposes
Progress = Callable[[str, int, int], None]


def goodput(  # noqa: PLR0913 - one job, said in full
    scenario: Scenario,
    runs: int = RUNS,
    seed: int = 0,
    *,
    workers: int = 1,
    store: Path | None = None,
    curves: bool = True,
    progress: Progress | None = None,
) -> Goodput:
    """Simulate a job over the tokens of its run (`economics.tokens`), as often as asked.

    workers: processes; store: a folder in which runs are kept as they come, to go on from there; curves: whether other
    intervals, spares and what-ifs are tried, too. Ctrl-C ends it with the runs that are there. Raises InputError where
    no tokens are said, for a store of another calculation, and for what the scenario cannot be.
    """
    started = perf_counter()
    _require(runs, seed, workers)
    work_of(scenario, 1.0)  # before anything is simulated
    told = {"scenario": scenario.to_mapping(), "seed": seed}
    path = None if store is None else store / NAME
    with Journal.open_or_resume(path, "calculation", told, scenario.files) as kept, worker_pool(workers) as pool:
        task = _Task(scenario, seed, pool, workers, progress or _silent)
        found = task.run(runs, kept, curves=curves)
    return replace(found, wall=perf_counter() - started)


def _require(runs: int, seed: int, workers: int) -> None:
    for name, value, least, most in (
        ("runs", runs, 1, MOST_RUNS),
        ("seed", seed, 0, 2**63 - 1),
        ("workers", workers, 1, 4096),
    ):
        if not least <= value <= most:
            raise InputError(f"{name}: {value} is not from {least} to {most:,}")


@dataclass
class _Task:
    """One calculation."""

    scenario: Scenario
    seed: int
    pool: Executor
    workers: int
    tell: Progress
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def result(self) -> SimulationResult:
        """The healthy step."""
        return simulate(self.scenario)

    @cached_property
    def work(self) -> Seconds:
        """Seconds of the healthy job."""
        return work_of(self.scenario, self.result.step_time)[0]

    @cached_property
    def states(self) -> States:
        return States(self.scenario, self.result)

    @cached_property
    def site(self) -> Site:
        return site_of(self.scenario)

    @cached_property
    def storing(self) -> Storing:
        return storing(self.scenario)

    @cached_property
    def runs(self) -> Runs:
        def pace(missing: int, slower: Any) -> tuple[str, float]:
            self.tell("simulating states of the cluster", len(self.states.seconds), 0)
            return self.states(missing, slower)

        return Runs(self.pool, self.workers, pace, self.seed)

    @property
    def said(self) -> ReliabilityModel:
        return self.scenario.reliability

    def run(self, many: int, kept: Journal, *, curves: bool) -> Goodput:
        """All of it."""
        between = mean_time_to_interruption(self.said, self.site)
        first = formula(self.said, self.storing, between, self.work)
        nodes, spares = self._spares(first, curves=curves)
        reliability = replace(self.said, spares=replace(self.said.spares, shared_nodes=nodes))
        interval, intervals = self._interval(reliability, between, first, curves=curves)
        terms = self._terms(reliability, self.storing, interval)
        made, complete = self._make(terms, many, kept)
        changes = self._changes(terms, between, interval) if curves and complete else []
        self._warn(made, interval, between)
        economics = self.result.economics
        price = economics.price_per_gpu_hour
        power, still = economics.power, economics.idle_power
        return Goodput(
            tokens=work_of(self.scenario, self.result.step_time)[1],
            ideal=self.work,
            step_time=self.result.step_time,
            step_band=self.result.step_time_interval,
            gpus=self.site.gpus,
            nodes=self.site.nodes,
            spare_nodes=nodes + self.said.spares.nodes_per_rack * self.site.counts.racks,
            runs=made,
            seed=self.seed,
            preset=self.said.preset,
            description=self.said.description,
            spread=self.said.rate_geometric_std,
            mean_time=between,
            checkpoint=self._checkpointing(terms, between),
            step_times=dict(self.states.seconds),
            timeline=self.runs.timeline(terms, 0),
            intervals=intervals,
            spares=spares,
            changes=changes,
            price=None if price is None else price.amount,
            currency="" if price is None else price.currency,
            missing=(*economics.without_price, *economics.without_power),
            watts=None if power is None or still is None else (power, still),
            warnings=tuple(self.warnings),
            complete=complete,
            sources=self.said.sources,
        )

    def _terms(self, reliability: ReliabilityModel, storing: Storing, interval: Seconds) -> Terms:
        return Terms(
            reliability=reliability,
            site=self.site,
            saving=storing.saving(interval),
            work=self.work,
            load=storing.read,
            stop=storing.stop,
            pace=self.states,
            most=min(LONGEST * self.work, MOST_FAILURES * mean_time_to_interruption(reliability, self.site)),
        )

    # What is best

    def _spares(self, interval: Seconds, *, curves: bool) -> tuple[int, list[Point]]:
        """How many nodes stand by, and the curve of it; no more are tried than let nobody wait."""
        asked = self.said.spares.shared_nodes
        if asked is not None and asked > self.site.nodes:
            raise InputError(
                f"{self.scenario.name}: reliability.spares.nodes: {asked:,} are more than the {self.site.nodes:,} "
                "nodes of the job"
            )
        if asked is not None and not curves:
            return asked, []
        points: list[Point] = []
        for nodes in self._tried(asked):
            self.tell("trying numbers of spares", len(points), 0)
            said = replace(self.said, spares=replace(self.said.spares, shared_nodes=nodes))
            made = self._few(self._terms(said, self.storing, interval))
            part = _part(made) * self.site.nodes / (self.site.nodes + nodes)
            points.insert(0, Point(nodes, part, _days(made)))
            if part < _POOR * max(point.goodput for point in points) and (asked is None or nodes <= asked):
                break  # with fewer it is worse, and takes long
        best = max(points, key=lambda point: (point.goodput, -point.value))
        return int(best.value) if asked is None else asked, points

    def _tried(self, asked: int | None) -> list[int]:
        """Numbers of spares, from more than ever are in repair at a time down; what is asked for among them."""
        broken = in_repair(self.said, self.site) * self.said.rate_geometric_std**2
        enough = broken + 4.0 * math.sqrt(broken)
        below = [item for item in _SPARES if item < enough and item <= self.site.nodes]
        above = [element for element in _SPARES if enough <= element <= self.site.nodes][:1]
        return sorted({*below, *above, *([] if asked is None else [asked])}, reverse=True)

    def _interval(
        self, said: ReliabilityModel, between: Seconds, first: Seconds, *, curves: bool
    ) -> tuple[Seconds, list[Point]]:
        """How often checkpoints come, and the curve of it."""
        asked = self.said.checkpoint.interval
        best = asked is CheckpointIntervalRule.OPTIMAL
        if math.isinf(between) or not (best or curves):
            return first, []
        middle = min(first, daly(max(self.storing.cost, LEAST), between)) if best else first
        points = []
        for number, octave in enumerate(_OCTAVES):
            self.tell("trying intervals between checkpoints", number, len(_OCTAVES))
            interval = float(middle * 2.0**octave)
            made = self._few(self._terms(said, self.storing, interval))
            points.append(Point(interval, _part(made), _days(made)))
        return (_lowest(points) if best else first), points

    def _few(self, terms: Terms) -> list[Run]:
        """As many runs as have enough failures to tell apart what is tried."""
        between = mean_time_to_interruption(terms.reliability, self.site)
        expected = self.work / between if between > 0.0 else math.inf
        many = _MOST if expected == 0.0 else int(min(_MOST, max(_FEWEST, math.ceil(_EVENTS / expected))))
        most = min(_SHORTER * terms.most, 2.0 * _EVENTS / many * between)
        return self.runs.of(replace(terms, most=max(most, terms.work if expected < _EVENTS else 0.0)), range(many))

    def _changes(self, terms: Terms, between: Seconds, interval: Seconds) -> list[Change]:
        """What-ifs: the same runs with one thing changed, and the interval in proportion to Daly's if it was free."""
        before = _days(self._few(terms))
        found = []
        for number, (words, said) in enumerate(_what_ifs(terms.reliability)):
            self.tell("asking what if", number, 4)
            changed = storing(replace(self.scenario, reliability=said))
            now = mean_time_to_interruption(said, self.site)
            then = interval
            if isinstance(said.checkpoint.interval, CheckpointIntervalRule) and not math.isinf(between):
                then *= daly(max(changed.cost, LEAST), now) / daly(max(self.storing.cost, LEAST), between)
            found.append(Change(words, _days(self._few(self._terms(said, changed, then))), before))
        return found

    # All runs

    def _make(self, terms: Terms, many: int, kept: Journal) -> tuple[list[Run], bool]:
        """The runs, those that are kept already among them; whether all are there."""
        made = {run.number: run for run in (Run(**entry["run"]) for entry in kept.entries if "run" in entry)}
        made = {number: run for number, run in made.items() if number < many}

        def done(run: Run) -> None:
            made[run.number] = run
            kept.append({"run": plain(run)})
            self.tell("simulating runs", len(made), many)

        complete = True
        try:
            self.runs.of(terms, [number for number in range(many) if number not in made], done)
        except KeyboardInterrupt:
            complete = False
            self.pool.shutdown(wait=False, cancel_futures=True)
            if not made:
                raise
        return [made[number] for number in sorted(made)], complete

    def _checkpointing(self, terms: Terms, between: Seconds) -> Checkpointing:
        cost = self.storing.cost
        return Checkpointing(
            size=self.storing.size,
            block=self.storing.block,
            drain=self.storing.drain,
            load=self.storing.read,
            interval=terms.saving.compute,
            young=young(cost, between),
            daly=daly(cost, between) if not math.isinf(between) else between,
        )

    def _warn(self, made: Sequence[Run], interval: Seconds, between: Seconds) -> None:
        late = sum(not run.finished for run in made)
        if late:
            self.warnings.append(
                f"{late} of {len(made)} runs did not reach their tokens within {LONGEST:g} times the ideal or "
                f"{MOST_FAILURES:,} failures; they count as if they had ended then"
            )
        if interval > between:
            self.warnings.append(
                f"checkpoints come every {format_seconds(interval)}, and something breaks every "
                f"{format_seconds(between)}: most work is lost; shorten reliability.checkpoint.interval"
            )
        least = self.storing.drain / self.storing.stored_every
        if interval < least:
            self.warnings.append(
                f"storage takes a checkpoint in {format_seconds(least)} at the soonest; so often they come"
            )
        if not self.result.fits_in_memory:
            self.warnings.append("the job does not fit in memory: it would not run at all")
        if self.said.rate_geometric_std > 1.0 and any(failure.is_rate_uncertain for failure in self.said.failures):
            self.warnings.append(
                f"rates are those of preset {self.said.preset}, of other clusters than yours: each run draws them "
                f"anew, up to {self.said.rate_geometric_std:g} times more or less in two of three; reliability.failures says yours"
            )


def _what_ifs(said: ReliabilityModel) -> Iterator[tuple[str, ReliabilityModel]]:
    """What may be otherwise, in words."""
    storage = said.checkpoint
    faster = replace(
        storage,
        bandwidth=2.0 * storage.bandwidth,
        read_bandwidth=2.0 * storage.read_bandwidth,
        bandwidth_per_node=None if storage.bandwidth_per_node is None else 2.0 * storage.bandwidth_per_node,
    )
    yield "half the failures", replace(said, rate_factor=0.5 * said.rate_factor)
    yield "twice the storage bandwidth", replace(said, checkpoint=faster)
    quick = RestartTimes(schedule=DurationDistribution.constant(_QUICK), load=ZERO_DURATION)
    yield "every restart in 2 minutes", replace(said, restart=quick)
    at_once = tuple(replace(failure, detection_time=ZERO_DURATION) for failure in said.failures)
    yield "failures noticed at once", replace(said, failures=at_once)


def _part(made: Sequence[Run]) -> float:
    return sum(run.work for run in made) / sum(run.wall for run in made)


def _days(made: Sequence[Run]) -> float:
    return sum(run.wall for run in made) / len(made) / DAY


def _lowest(points: Sequence[Point]) -> Seconds:
    """The interval with the least expected days, of the curve c + a/interval + b x interval through the points near it.

    Of so many checkpoints, and of half an interval lost with each failure: to first order that is what they cost.
    """
    place = min(range(len(points)), key=lambda each: points[each].days)
    near = points[max(0, place - _NEAR) : place + _NEAR + 1]
    at = np.array([point.value for point in near])
    (each, lost, _), *_ = np.linalg.lstsq(
        np.stack((1.0 / at, at, np.ones(len(at))), 1), [p.days for p in near], rcond=None
    )
    if each <= 0.0 or lost <= 0.0:
        return points[place].value
    return float(min(at[-1], max(at[0], math.sqrt(each / lost))))


def _silent(_what: str, _done: int, _of: int) -> None:
    """Nobody is told."""
