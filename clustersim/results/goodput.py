"""Goodput of a training run over weeks, under failures.

Definitions. Ideal: the healthy step time times the steps of the run. Goodput: ideal over wall time, the
fraction of its time in which a job makes lasting progress at full speed. ETTR (effective training time
ratio): the time in which steps that count ran, including slowed ones, over wall time. Neither counts
spares: `goodput_with_spares` is goodput times the job's nodes over all nodes reserved for it. Losses are
seconds of the job, which sum with the ideal to the mean wall time, except those of spares, which are
additional. Days and costs are given twice: of the simulated runs, which differ in their failures alone, and
with the prediction interval of the step (`uncertainty.scaled_durations`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from clustersim.common.units import JOULES_PER_KWH, Bytes, Joules, Seconds
from clustersim.hardware.prices import PriceQuote
from clustersim.results.economics import quote_to_json
from clustersim.uncertainty.scaled_durations import scaled_percentiles

SECONDS_PER_DAY: Final = 86400.0
_SECONDS_PER_HOUR: Final = 3600.0
PERCENTILES: Final = (5, 10, 50, 90, 95)
INTERVAL: Final = ("p5", "p95")
"""The percentiles between which 90 % of the runs lie, as of the step's prediction interval."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Outcome of one simulated run, in seconds.

    number: index of the run; work: progress in seconds of the healthy job; losses: sum with the work to `wall`;
    states: wall time by cluster state; failures: count by failed component; interruptions: unplanned stops; up:
    wall time in which the job was up; nodes: node-seconds in the job, idle and in repair.
    """

    number: int
    wall: Seconds
    work: Seconds
    finished: bool
    losses: Mapping[str, Seconds]
    states: Mapping[str, Seconds]
    failures: Mapping[str, int]
    interruptions: int
    up: Seconds
    nodes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TimelineInterval:
    """An interval of one run's timeline.

    label: a loss, or the cluster state in which the job ran; cause: what failed.
    """

    begin: Seconds
    end: Seconds
    label: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One point of a sweep: a parameter value, and the mean result of a few runs with it, to compare points with."""

    value: float
    goodput: float
    days: float


@dataclass(frozen=True, slots=True)
class RunChange:
    """Days by which one change makes a run longer (below 0: shorter).

    The median over the first `runs` of the result's own runs, each simulated again with the change and the same
    failures.
    """

    description: str
    days: float
    runs: int


@dataclass(frozen=True, slots=True)
class CheckpointTimes:
    """Checkpoint costs in seconds.

    size: bytes; blocking, drain, load: of each checkpoint; interval: as simulated; young, daly: optimal
    intervals by Young's and Daly's formulas.
    """

    size: Bytes
    blocking: Seconds
    drain: Seconds
    load: Seconds
    interval: Seconds
    young: Seconds
    daly: Seconds


@dataclass(frozen=True, slots=True)
class GoodputResult:
    """A job over the tokens of its run, in many simulated runs with random failures.

    tokens: of the run; ideal_seconds: healthy step time times steps; step_times: by state, of those that were
    simulated; expected_mttf: mean time between unplanned stops by the failure rates; price_quotes: of a GPU hour, the
    contract's first, empty: unknown; watts: of the job while up and while down, including nodes and facility, None:
    unknown; missing: sentences on what is unknown of both. interval_sweep, spares_sweep: curves; timeline: of the
    first run; rate_spread: uncertainty factor of the failure rates; complete: whether all runs were simulated.
    """

    tokens: float
    ideal_seconds: Seconds
    step_time: Seconds
    step_time_interval: tuple[Seconds, Seconds]
    gpus: int
    nodes: int
    spare_nodes: int
    runs: Sequence[TrainingRun]
    seed: int
    preset: str
    description: str
    rate_spread: float
    expected_mttf: Seconds
    checkpoint: CheckpointTimes
    step_times: Mapping[str, Seconds]
    timeline: Sequence[TimelineInterval] = ()
    interval_sweep: Sequence[SweepPoint] = ()
    spares_sweep: Sequence[SweepPoint] = ()
    changes: Sequence[RunChange] = ()
    price_quotes: Sequence[PriceQuote] = ()
    missing: Sequence[str] = ()
    watts: tuple[float, float] | None = None
    warnings: Sequence[str] = ()
    wall_seconds: Seconds = 0.0
    complete: bool = True
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def finished_count(self) -> int:
        """Number of runs that reached their tokens."""
        return sum(run.finished for run in self.runs)

    def mean_over_runs(self, values: Sequence[float]) -> float:
        """Mean over runs."""
        return float(np.mean(values))

    @property
    def days(self) -> dict[str, float]:
        """Days to reach the tokens, with the step as predicted: percentiles and mean over runs."""
        days = [run.wall / SECONDS_PER_DAY for run in self.runs]
        return {**_percentile_names(np.percentile(days, PERCENTILES).tolist()), "mean": float(np.mean(days))}

    @property
    def days_with_step_error(self) -> dict[str, float]:
        """Days to reach the tokens, if the step errs as its prediction interval says: percentiles."""
        days = [run.wall / SECONDS_PER_DAY for run in self.runs]
        low, high = (end / self.step_time for end in self.step_time_interval)
        return _percentile_names(scaled_percentiles(days, (low, high), PERCENTILES))

    @property
    def goodput(self) -> float:
        """Ideal over wall time: total work over total wall time of all runs."""
        return sum(run.work for run in self.runs) / sum(run.wall for run in self.runs)

    @property
    def ettr(self) -> float:
        """Time in which steps that count ran, at whatever speed, over wall time."""
        effective_seconds = sum(run.work + run.losses["degraded"] for run in self.runs)
        return effective_seconds / sum(run.wall for run in self.runs)

    @property
    def goodput_with_spares(self) -> float:
        """Goodput relative to all nodes reserved for the job, including spares."""
        return self.goodput * self.nodes / (self.nodes + self.spare_nodes)

    @property
    def loss_seconds(self) -> dict[str, Seconds]:
        """Seconds of a run by cause, averaged over runs; spares are included, as seconds of the full job."""
        names = dict.fromkeys(name for run in self.runs for name in run.losses)
        losses = {name: self.mean_over_runs([run.losses[name] for run in self.runs]) for name in names}
        return {
            **losses,
            "spares": self.mean_over_runs([run.wall for run in self.runs]) * self.spare_nodes / self.nodes,
        }

    @property
    def failures(self) -> dict[str, float]:
        """Number of failures in a run by component, most frequent first; mean over runs."""
        names = sorted({name for run in self.runs for name in run.failures})
        counts = {name: self.mean_over_runs([run.failures.get(name, 0) for run in self.runs]) for name in names}
        return dict(sorted(counts.items(), key=lambda cause_count: (-cause_count[1], cause_count[0])))

    @property
    def interruption_count(self) -> float:
        """Unplanned stops per run, mean over runs."""
        return self.mean_over_runs([run.interruptions for run in self.runs])

    @property
    def mttf(self) -> Seconds | None:
        """Mean up time per unplanned stop in seconds; None without any."""
        interruption_count = sum(run.interruptions for run in self.runs)
        return sum(run.up for run in self.runs) / interruption_count if interruption_count else None

    @property
    def state_shares(self) -> dict[str, tuple[Seconds | None, float]]:
        """Step time and share of the wall time by cluster state; the remainder is down time."""
        wall = sum(run.wall for run in self.runs)
        names = dict.fromkeys(name for run in self.runs for name in run.states)
        shares = {name: sum(run.states.get(name, 0.0) for run in self.runs) / wall for name in names}
        ordered = sorted(shares.items(), key=lambda state_share: (-state_share[1], state_share[0]))
        return {name: (self.step_times.get(name), share) for name, share in ordered}

    def cost_of(self, days: Mapping[str, float], quote: PriceQuote) -> dict[str, float]:
        """Cost of all GPUs reserved for the job over some days, in the currency of the price."""
        gpus = self.gpus * (self.nodes + self.spare_nodes) / self.nodes
        cost_per_day = gpus * quote.price.amount * SECONDS_PER_DAY / _SECONDS_PER_HOUR
        return {name: cost_per_day * value for name, value in days.items()}

    @property
    def energy(self) -> Joules | None:
        """Joules of the job, up and down, and of spares (as of a job that is down); None where power is unknown."""
        if self.watts is None:
            return None
        running_watts, idle_watts = self.watts
        spare_watts = idle_watts * self.spare_nodes / self.nodes
        up = self.mean_over_runs([run.up for run in self.runs])
        wall = self.mean_over_runs([run.wall for run in self.runs])
        return up * running_watts + (wall - up) * idle_watts + wall * spare_watts

    def to_json(self) -> dict[str, Any]:
        """The result as plain data."""
        energy = self.energy
        return {
            "goodput": self.goodput,
            "ettr": self.ettr,
            "goodput_with_spares": self.goodput_with_spares,
            "days": self.days,
            "days_with_step_error": self.days_with_step_error,
            "ideal_days": self.ideal_seconds / SECONDS_PER_DAY,
            "tokens": self.tokens,
            "runs": len(self.runs),
            "finished": self.finished_count,
            "seed": self.seed,
            "step_time_s": self.step_time,
            "step_time_interval_s": list(self.step_time_interval),
            "failures": {"mean": sum(self.failures.values()), "by_component": self.failures},
            "interruptions": self.interruption_count,
            "mttf_s": self.mttf,
            "loss_s": self.loss_seconds,
            "states": {
                name: {"step_time_s": step, "share": share} for name, (step, share) in self.state_shares.items()
            },
            "checkpoint_interval_s": self.checkpoint.interval,
            "young_s": _finite_or_none(self.checkpoint.young),
            "daly_s": _finite_or_none(self.checkpoint.daly),
            "checkpoint": {
                "bytes": self.checkpoint.size,
                "block_s": self.checkpoint.blocking,
                "drain_s": self.checkpoint.drain,
                "load_s": self.checkpoint.load,
            },
            "cost": {quote.kind.value: self._cost_to_json(quote) for quote in self.price_quotes},
            "energy_mwh": None if energy is None else energy / JOULES_PER_KWH / 1e3,
            "nodes": self.nodes,
            "spare_nodes": self.spare_nodes,
            "preset": self.preset,
            "spread": self.rate_spread,
            "intervals": [_point_to_dict(sweep_point) for sweep_point in self.interval_sweep],
            "spares": [_point_to_dict(point) for point in self.spares_sweep],
            "what_if": [
                {
                    "change": change.description,
                    "days": self.days["p50"] + change.days,
                    "days_before": self.days["p50"],
                    "difference": change.days,
                    "runs": change.runs,
                }
                for change in self.changes
            ],
            "missing": list(self.missing),
            "warnings": list(self.warnings),
            "complete": self.complete,
            "wall_s": self.wall_seconds,
        }

    def _cost_to_json(self, quote: PriceQuote) -> dict[str, Any]:
        return {
            **quote_to_json(quote),
            **self.cost_of(self.days, quote),
            "with_step_error": self.cost_of(self.days_with_step_error, quote),
        }


def _percentile_names(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percentile}": value for percentile, value in zip(PERCENTILES, values, strict=True)}


def _finite_or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _point_to_dict(point: SweepPoint) -> dict[str, float]:
    return {"value": point.value, "goodput": point.goodput, "days": point.days}
