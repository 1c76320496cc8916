"""How long does a run of a number of tokens take on a cluster with failures, and what does it cost?

Checkpoint interval and spares are as configured, or optimal: the interval with the least expected time, and
the spares with the most work per paid node. Both optima are found by simulating fewer runs with common
random numbers.
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

from clustersim.build import require_common_step
from clustersim.common.errors import InputError, MemoryFitError
from clustersim.common.journal import Journal
from clustersim.common.processes import worker_pool
from clustersim.common.units import Seconds, format_bytes, format_probability, format_seconds
from clustersim.reliability.checkpoint_cost import (
    MIN_CHECKPOINT_COST,
    CheckpointCost,
    build_checkpoint_cost,
    checkpoint_interval,
    daly_interval,
    mean_nodes_in_repair,
    mean_time_to_interruption,
    total_work,
    young_interval,
)
from clustersim.reliability.cluster_states import ClusterStates
from clustersim.reliability.failure_domains import FailureDomains, build_failure_domains
from clustersim.reliability.job_simulation import JobParameters
from clustersim.reliability.monte_carlo import MonteCarloRuns, run_to_dict
from clustersim.results.goodput import (
    SECONDS_PER_DAY,
    CheckpointTimes,
    GoodputResult,
    RunChange,
    SweepPoint,
    TrainingRun,
)
from clustersim.results.memory_check import check
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import changes_for
from clustersim.scenario.changes.scenario_change import Baseline, ChangeUse
from clustersim.scenario.reliability import CheckpointIntervalRule, ReliabilityModel
from clustersim.simulation import simulate

DEFAULT_RUNS: Final = 1000
MAX_RUNS: Final = 1_000_000
MAX_SLOWDOWN: Final = 20.0
"""Maximum wall time of a run over its ideal; what is not done then counts as never done."""
MAX_FAILURES: Final = 50_000
"""Mean number of failures after which a run is ended as well."""
JOURNAL_NAME: Final = "runs.jsonl"
_FAILURES_PER_POINT: Final = 4000.0  # failures simulated per point of a curve
_MIN_POINT_RUNS, _MAX_POINT_RUNS = 4, 16  # runs per point
_POINT_WALL_FRACTION: Final = 0.2  # fraction of a run's maximum wall time, for a point of a curve
_INTERVAL_OCTAVES: Final = np.arange(-3.0, 3.01, 0.5)  # log2 of intervals relative to Daly's
_FIT_NEIGHBORS: Final = 3  # fitted points on either side of the best one
_POOR_GOODPUT_RATIO: Final = 0.8  # relative to the best goodput; below it fewer spares are not tried
_MAX_WHAT_IF_RUNS: Final = 200  # a median to a fifth of a standard deviation
_SPARE_COUNTS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
Progress = Callable[[str, int, int], None]


def simulate_goodput(  # noqa: PLR0913 - one job, said in full
    scenario: Scenario,
    runs: int = DEFAULT_RUNS,
    seed: int = 0,
    *,
    workers: int = 1,
    store: Path | None = None,
    curves: bool = True,
    progress: Progress | None = None,
) -> GoodputResult:
    """Simulate a job over the tokens of its run (`economics.tokens`), in Monte Carlo runs.

    workers: processes; store: folder of the journal, to resume from; curves: whether other intervals, spares
    and what-ifs are simulated as well. Ctrl-C ends it with the runs so far. Raises InputError where the tokens
    are missing, for a store of another calculation, and for an invalid scenario; MemoryFitError where the job does
    not fit in memory.
    """
    started = perf_counter()
    _require_in_range(runs, seed, workers)
    require_common_step(scenario)
    total_work(scenario, 1.0)  # fails early, before anything is simulated
    _require_memory_fit(scenario)
    identity = {"scenario": scenario.to_mapping(), "seed": seed}
    path = None if store is None else store / JOURNAL_NAME
    with Journal.open_or_resume(path, "calculation", identity, scenario.files) as journal, worker_pool(workers) as pool:
        task = _GoodputCalculation(scenario, seed, pool, workers, progress or _ignore_progress)
        result = task.run(runs, journal, curves=curves)
    return replace(result, wall_seconds=perf_counter() - started)


def _require_in_range(runs: int, seed: int, workers: int) -> None:
    for name, value, min_value, max_value in (
        ("runs", runs, 1, MAX_RUNS),
        ("seed", seed, 0, 2**63 - 1),
        ("workers", workers, 1, 4096),
    ):
        if not min_value <= value <= max_value:
            raise InputError(f"{name}: {value} is not from {min_value} to {max_value:,}")


def _require_memory_fit(scenario: Scenario) -> None:
    report = check(scenario)
    if report.fits:
        return
    host = "" if report.host is None or report.host.fits else f"; {'; '.join(report.host.problems)}"
    raise MemoryFitError(
        f"{scenario.name}: does not fit in memory, so it has neither a duration nor a cost: "
        f"{format_bytes(report.peak_memory_bytes)} of {format_bytes(report.memory_capacity_bytes)} on the peak-memory "
        f"GPU{host}{''.join(f'; {suggestion.description}' for suggestion in report.suggestions)}"
    )


@dataclass
class _GoodputCalculation:
    """One calculation."""

    scenario: Scenario
    seed: int
    pool: Executor
    workers: int
    report_progress: Progress
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def healthy_result(self) -> SimulationResult:
        """The simulation result of the healthy step."""
        return simulate(self.scenario)

    @cached_property
    def healthy_work(self) -> Seconds:
        """Seconds of the run without failures."""
        return total_work(self.scenario, self.healthy_result.step_time)[0]

    @cached_property
    def cluster_states(self) -> ClusterStates:
        return ClusterStates(self.scenario, self.healthy_result)

    @cached_property
    def domains(self) -> FailureDomains:
        return build_failure_domains(self.scenario)

    @cached_property
    def checkpoint_cost(self) -> CheckpointCost:
        return build_checkpoint_cost(self.scenario)

    @cached_property
    def monte_carlo(self) -> MonteCarloRuns:
        def state_rate(missing: int, slowdown: Any) -> tuple[str, float]:
            self.report_progress("simulating states of the cluster", len(self.cluster_states.step_times), 0)
            return self.cluster_states(missing, slowdown)

        return MonteCarloRuns(self.pool, self.workers, state_rate, self.seed)

    @property
    def reliability(self) -> ReliabilityModel:
        return self.scenario.reliability

    def run(self, run_count: int, journal: Journal, *, curves: bool) -> GoodputResult:
        """Run the full calculation."""
        mtti = mean_time_to_interruption(self.reliability, self.domains)
        formula_interval = checkpoint_interval(self.reliability, self.checkpoint_cost, mtti, self.healthy_work)
        spare_nodes, spares = self._choose_spares(formula_interval, curves=curves)
        reliability = replace(self.reliability, spares=replace(self.reliability.spares, shared_nodes=spare_nodes))
        interval, intervals = self._choose_interval(reliability, mtti, formula_interval, curves=curves)
        parameters = self._job_parameters(reliability, self.checkpoint_cost, interval)
        runs, complete = self._simulate_runs(parameters, run_count, journal)
        changes: list[RunChange] = []
        if curves and complete:
            try:
                changes = self._simulate_what_ifs(parameters, mtti, interval, runs[:_MAX_WHAT_IF_RUNS])
            except KeyboardInterrupt:
                complete = self._stop()
        self._add_warnings(runs, interval, mtti)
        economics = self.healthy_result.economics
        power, idle_power = economics.power, economics.idle_power
        return GoodputResult(
            tokens=total_work(self.scenario, self.healthy_result.step_time)[1],
            ideal_seconds=self.healthy_work,
            step_time=self.healthy_result.step_time,
            step_time_interval=self.healthy_result.step_time_interval,
            gpus=self.domains.gpus,
            nodes=self.domains.nodes,
            spare_nodes=spare_nodes + self.reliability.spares.nodes_per_rack * self.domains.counts.racks,
            runs=runs,
            seed=self.seed,
            preset=self.reliability.preset,
            description=self.reliability.description,
            rate_spread=self.reliability.rate_geometric_std,
            expected_mttf=mtti,
            checkpoint=self._checkpoint_summary(parameters, mtti),
            step_times=dict(self.cluster_states.step_times),
            timeline=self.monte_carlo.timeline(parameters, 0),
            interval_sweep=intervals,
            spares_sweep=spares,
            changes=changes,
            price_quotes=economics.price_quotes,
            missing=(*economics.missing_prices, *economics.missing_power),
            watts=None if power is None or idle_power is None else (power, idle_power),
            warnings=tuple(self.warnings),
            complete=complete,
            sources=self.reliability.sources,
        )

    def _job_parameters(
        self, reliability: ReliabilityModel, checkpoint_cost: CheckpointCost, interval: Seconds
    ) -> JobParameters:
        return JobParameters(
            reliability=reliability,
            domains=self.domains,
            checkpoint_timeline=checkpoint_cost.build_timeline(interval),
            work=self.healthy_work,
            load_seconds=checkpoint_cost.read_seconds,
            final_checkpoint_seconds=checkpoint_cost.synchronous_seconds,
            state_rate=self.cluster_states,
            max_wall=min(
                MAX_SLOWDOWN * self.healthy_work, MAX_FAILURES * mean_time_to_interruption(reliability, self.domains)
            ),
        )

    # Optimization

    def _choose_spares(self, interval: Seconds, *, curves: bool) -> tuple[int, list[SweepPoint]]:
        """The number of spare nodes and its curve; counts start where no job would ever wait."""
        configured = self.reliability.spares.shared_nodes
        if configured is not None and configured > self.domains.nodes:
            raise InputError(
                f"{self.scenario.name}: reliability.spares.nodes: {configured:,} are more than the "
                f"{self.domains.nodes:,} "
                "nodes of the job"
            )
        if configured is not None and not curves:
            return configured, []
        points: list[SweepPoint] = []
        for nodes in self._spare_candidates(configured):
            self.report_progress("trying numbers of spares", len(points), 0)
            reliability = replace(self.reliability, spares=replace(self.reliability.spares, shared_nodes=nodes))
            runs = self._simulate_point(self._job_parameters(reliability, self.checkpoint_cost, interval))
            paid_goodput = _mean_goodput(runs) * self.domains.nodes / (self.domains.nodes + nodes)
            points.insert(0, SweepPoint(nodes, paid_goodput, _mean_days(runs)))
            if paid_goodput < _POOR_GOODPUT_RATIO * max(point.goodput for point in points) and (
                configured is None or nodes <= configured
            ):
                break  # fewer spares are worse and slow to simulate
        best = max(points, key=lambda point: (point.goodput, -point.value))
        return int(best.value) if configured is None else configured, points

    def _spare_candidates(self, configured: int | None) -> list[int]:
        """Spare counts to try, descending from more than are ever in repair at a time, including the configured one."""
        mean_in_repair = mean_nodes_in_repair(self.reliability, self.domains) * self.reliability.rate_geometric_std**2
        sufficient = mean_in_repair + 4.0 * math.sqrt(mean_in_repair)
        below = [count for count in _SPARE_COUNTS if count < sufficient and count <= self.domains.nodes]
        above = [count for count in _SPARE_COUNTS if sufficient <= count <= self.domains.nodes][:1]
        return sorted({*below, *above, *([] if configured is None else [configured])}, reverse=True)

    def _choose_interval(
        self, reliability: ReliabilityModel, mtti: Seconds, formula_interval: Seconds, *, curves: bool
    ) -> tuple[Seconds, list[SweepPoint]]:
        """The checkpoint interval and its curve."""
        configured = self.reliability.checkpoint.interval
        is_optimal = configured is CheckpointIntervalRule.OPTIMAL
        if math.isinf(mtti) or not (is_optimal or curves):
            return formula_interval, []
        center = (
            min(formula_interval, daly_interval(max(self.checkpoint_cost.delay_seconds, MIN_CHECKPOINT_COST), mtti))
            if is_optimal
            else formula_interval
        )
        points = []
        for index, octave in enumerate(_INTERVAL_OCTAVES):
            self.report_progress("trying intervals between checkpoints", index, len(_INTERVAL_OCTAVES))
            interval = float(center * 2.0**octave)
            runs = self._simulate_point(self._job_parameters(reliability, self.checkpoint_cost, interval))
            points.append(SweepPoint(interval, _mean_goodput(runs), _mean_days(runs)))
        return (_fit_optimal_interval(points) if is_optimal else formula_interval), points

    def _simulate_point(self, parameters: JobParameters) -> list[TrainingRun]:
        """Simulate enough runs, with enough failures, to resolve the points of a curve."""
        mtti = mean_time_to_interruption(parameters.reliability, self.domains)
        expected_failures = self.healthy_work / mtti if mtti > 0.0 else math.inf
        run_count = (
            _MAX_POINT_RUNS
            if expected_failures == 0.0
            else int(min(_MAX_POINT_RUNS, max(_MIN_POINT_RUNS, math.ceil(_FAILURES_PER_POINT / expected_failures))))
        )
        max_wall = min(_POINT_WALL_FRACTION * parameters.max_wall, 2.0 * _FAILURES_PER_POINT / run_count * mtti)
        return self.monte_carlo.simulate_runs(
            replace(
                parameters, max_wall=max(max_wall, parameters.work if expected_failures < _FAILURES_PER_POINT else 0.0)
            ),
            range(run_count),
        )

    def _simulate_what_ifs(
        self, parameters: JobParameters, mtti: Seconds, interval: Seconds, runs: Sequence[TrainingRun]
    ) -> list[RunChange]:
        """What-ifs: these runs again with one change; an automatic interval scales in proportion to Daly's."""
        changes = []
        baseline = Baseline(replace(self.scenario, reliability=parameters.reliability))
        run_changes = changes_for(ChangeUse.GOODPUT)
        for index, change in enumerate(run_changes):
            self.report_progress("asking what if", index, len(run_changes))
            changed = next(change.apply(baseline)).scenario
            reliability, changed_cost = changed.reliability, build_checkpoint_cost(changed)
            changed_mtti = mean_time_to_interruption(reliability, self.domains)
            changed_interval = interval
            if isinstance(reliability.checkpoint.interval, CheckpointIntervalRule) and not math.isinf(mtti):
                changed_interval *= daly_interval(
                    max(changed_cost.delay_seconds, MIN_CHECKPOINT_COST), changed_mtti
                ) / daly_interval(max(self.checkpoint_cost.delay_seconds, MIN_CHECKPOINT_COST), mtti)
            changed_runs = self.monte_carlo.simulate_runs(
                self._job_parameters(reliability, changed_cost, changed_interval), [run.number for run in runs]
            )
            differences = [after.wall - before.wall for after, before in zip(changed_runs, runs, strict=True)]
            changes.append(RunChange(change.label, float(np.median(differences)) / SECONDS_PER_DAY, len(runs)))
        return changes

    # Monte Carlo runs

    def _simulate_runs(
        self, parameters: JobParameters, run_count: int, journal: Journal
    ) -> tuple[list[TrainingRun], bool]:
        """The runs, including those in the journal; and whether all are done."""
        runs = {run.number: run for run in (TrainingRun(**entry["run"]) for entry in journal.entries if "run" in entry)}
        runs = {run_index: run for run_index, run in runs.items() if run_index < run_count}

        def record_run(run: TrainingRun) -> None:
            runs[run.number] = run
            journal.append({"run": run_to_dict(run)})
            self.report_progress("simulating runs", len(runs), run_count)

        complete = True
        try:
            self.monte_carlo.simulate_runs(
                parameters, [run_index for run_index in range(run_count) if run_index not in runs], record_run
            )
        except KeyboardInterrupt:
            complete = self._stop()
            if not runs:
                raise
        return [runs[run_index] for run_index in sorted(runs)], complete

    def _stop(self) -> bool:
        """Cancel what is left; the calculation is not complete (False)."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        return False

    def _checkpoint_summary(self, parameters: JobParameters, mtti: Seconds) -> CheckpointTimes:
        cost = self.checkpoint_cost.delay_seconds
        return CheckpointTimes(
            size=self.checkpoint_cost.checkpoint_bytes,
            blocking=self.checkpoint_cost.block_seconds,
            drain=self.checkpoint_cost.drain_seconds,
            load=self.checkpoint_cost.read_seconds,
            interval=parameters.checkpoint_timeline.interval,
            young=young_interval(cost, mtti),
            daly=daly_interval(cost, mtti) if not math.isinf(mtti) else mtti,
        )

    def _add_warnings(self, runs: Sequence[TrainingRun], interval: Seconds, mtti: Seconds) -> None:
        self.warnings += (*self.scenario.warnings, *self._unsure_fit())
        unfinished = sum(not run.finished for run in runs)
        if unfinished:
            self.warnings.append(
                f"{unfinished} of {len(runs)} runs did not reach their tokens within {MAX_SLOWDOWN:g} times the "
                "ideal or "
                f"{MAX_FAILURES:,} failures; they count as if they had ended then"
            )
        if interval > mtti:
            self.warnings.append(
                f"checkpoints come every {format_seconds(interval)}, and something breaks every "
                f"{format_seconds(mtti)}: most work is lost; shorten reliability.checkpoint.interval"
            )
        min_interval = self.checkpoint_cost.drain_seconds / self.checkpoint_cost.stored_every
        if interval < min_interval:
            self.warnings.append(
                f"storage takes a checkpoint in {format_seconds(min_interval)} at the soonest; so often they come"
            )
        if self.reliability.rate_geometric_std > 1.0 and any(
            failure.is_rate_uncertain for failure in self.reliability.failures
        ):
            self.warnings.append(
                f"rates are those of preset {self.reliability.preset}, of other clusters than yours: each run draws "
                "them "
                f"anew, up to {self.reliability.rate_geometric_std:g} times more or less in two of three; "
                "reliability.failures says yours"
            )

    def _unsure_fit(self) -> Iterator[str]:
        """A note that the job may not fit in memory, with what would."""
        result = self.healthy_result
        if suggestions := result.oom_suggestions:
            yield (
                f"the job fits in memory with a probability of {format_probability(result.fit_probability)} only, and "
                f"has neither a duration nor a cost if it does not; {suggestions[0].description}"
            )


def _mean_goodput(runs: Sequence[TrainingRun]) -> float:
    return sum(run.work for run in runs) / sum(run.wall for run in runs)


def _mean_days(runs: Sequence[TrainingRun]) -> float:
    return sum(run.wall for run in runs) / len(runs) / SECONDS_PER_DAY


def _fit_optimal_interval(points: Sequence[SweepPoint]) -> Seconds:
    """The interval with the least expected days: a fit of c + a/interval + b x interval near the minimum.

    That is the first-order cost: a checkpoint per interval, and half an interval lost per failure.
    """
    index = min(range(len(points)), key=lambda checkpoint_term: points[checkpoint_term].days)
    neighbors = points[max(0, index - _FIT_NEIGHBORS) : index + _FIT_NEIGHBORS + 1]
    intervals = np.array([point.value for point in neighbors])
    (checkpoint_term, lost_work_term, _), *_ = np.linalg.lstsq(
        np.stack((1.0 / intervals, intervals, np.ones(len(intervals))), 1), [p.days for p in neighbors], rcond=None
    )
    if checkpoint_term <= 0.0 or lost_work_term <= 0.0:
        return points[index].value
    return float(min(intervals[-1], max(intervals[0], math.sqrt(checkpoint_term / lost_work_term))))


def _ignore_progress(_label: str, _done: int, _total: int) -> None:
    """Ignore progress."""
