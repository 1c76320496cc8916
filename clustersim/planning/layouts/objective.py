"""What is the best layout: lowest step time, most tokens per GPU, lowest cost, or lowest energy?

Or, for a whole run with failures, fewest days or lowest cost. Each objective is a score to minimize, with a
lower bound given only a lower bound of the step: GPUs wait (drawing the least power) for whatever is
unknown, and a run takes at least its steps.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Final

import numpy as np

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.units import Seconds
from clustersim.hardware.power import GpuActivity
from clustersim.planning.layouts.bounds import StepLowerBound
from clustersim.planning.layouts.extrapolation import MAX_OVERESTIMATE, ExtrapolatedStep
from clustersim.reliability.checkpoint_cost import total_work
from clustersim.reliability.run_estimate import RunEstimate, days_lower_bound, estimate_run
from clustersim.results.economics import Economics, GpuGroup
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario.resolved import ResolvedScenario

_SECONDS_PER_DAY: Final = 86400.0


class Objective(Enum):
    """The score that a search minimizes."""

    STEP_TIME = "step-time"  # seconds
    TOKENS_PER_GPU = "tokens-per-gpu"  # GPU seconds per token
    COST = "cost"  # of a trillion tokens, in the currency of the prices
    ENERGY = "energy"  # joules for a trillion tokens
    DAYS = "days"  # of the run, including failures
    RUN_COST = "run-cost"  # of the run, including failures and spares, in the currency of the prices

    def lower_bound(self, resolved: ResolvedScenario, step_bound: StepLowerBound) -> float:
        """Lower bound of the score, given that of the step."""
        if self is Objective.STEP_TIME:
            return step_bound.seconds
        if self.is_run_objective:
            days = days_lower_bound(resolved, step_bound.seconds)
            return (
                days
                if self is Objective.DAYS or days == 0.0
                else days * _cost_per_day(minimum_economics(resolved, step_bound))
            )
        return self._economic_score(minimum_economics(resolved, step_bound))

    def score(self, result: SimulationResult | ExtrapolatedStep) -> float:
        """The score of a simulated scenario."""
        if self is Objective.STEP_TIME:
            return result.step_time
        if self.is_run_objective:
            return self.run_score(result, estimate_run(result.scenario, result.step_time))
        return self._economic_score(result.economics)

    def run_score(self, result: SimulationResult | ExtrapolatedStep, run: RunEstimate) -> float:
        """The score of a simulated scenario whose run estimate is known."""
        if self is Objective.DAYS:
            return run.days
        return run.days * _cost_per_day(result.economics) * (run.nodes + run.spare_nodes) / run.nodes

    def local_score(self, resolved: ResolvedScenario, step_time: Seconds, cost: float | None) -> float:
        """The score of local training. step_time: of a global batch; cost: of a trillion tokens, with egress."""
        if self is Objective.COST:
            return cost or 0.0
        tokens = resolved.training.global_batch * resolved.training.sequence
        return step_time * resolved.cluster.gpu_count / tokens if self is Objective.TOKENS_PER_GPU else step_time

    @property
    def is_run_objective(self) -> bool:
        """Whether it is about the whole run, including failures."""
        return self in (Objective.DAYS, Objective.RUN_COST)

    def allows_estimates(self, resolved: ResolvedScenario) -> bool:
        """Whether extrapolated steps (`extrapolation`) estimate the score within `estimate_margin`.

        Not for whole runs, nor for energy with unequal GPUs: waiting for a slow GPU settles later than the step time.
        """
        has_unequal_gpus = bool(resolved.degradations.slow_gpus) or len(resolved.cluster.accelerator_kinds()[0]) > 1
        return not (self.is_run_objective or (self is Objective.ENERGY and has_unequal_gpus))

    @property
    def estimate_margin(self) -> float:
        """The relative error by which the score of an estimate may be too high.

        Energy settles later than step time where weight gradients are deferred: over 950 random layouts it was at
        most 2.0 % too high.
        """
        return 0.03 if self is Objective.ENERGY else MAX_OVERESTIMATE

    def require_data(self, resolved: ResolvedScenario) -> None:
        """Raise InputError where required prices or powers are unknown, or local training has no such score."""
        if resolved.diloco is not None and self not in _LOCAL_OBJECTIVES:
            names = ", ".join(objective.value for objective in _LOCAL_OBJECTIVES)
            raise InputError(
                f"objective {self.value}: is not known of local training (diloco), which has {names}; "
                "`clustersim diloco --days 30` counts failures"
            )
        economics = minimum_economics(resolved, StepLowerBound(1.0))
        prices = {Objective.COST, Objective.RUN_COST}
        missing = (
            economics.missing_prices if self in prices else economics.missing_power if self is Objective.ENERGY else ()
        )
        if missing:
            raise InputError(f"objective {self.value}: {missing[0]}")
        if self.is_run_objective:
            total_work(resolved, 1.0)

    def _economic_score(self, economics: Economics) -> float:
        match self:
            case Objective.COST:
                return economics.cost_per_trillion_tokens or 0.0
            case Objective.ENERGY:
                return economics.energy_per_trillion_tokens or 0.0
        return economics.step_time * economics.gpu_count / economics.tokens


_LOCAL_OBJECTIVES: Final = (Objective.STEP_TIME, Objective.TOKENS_PER_GPU, Objective.COST)


def _cost_per_day(economics: Economics) -> float:
    """Cost of the job per day; 0 without a price."""
    cost = economics.cost_per_step
    return 0.0 if cost is None else cost / economics.step_time * _SECONDS_PER_DAY


def minimum_economics(resolved: ResolvedScenario, step_bound: StepLowerBound) -> Economics:
    """Minimum cost and energy of a step."""
    prices, training = resolved.economics, resolved.training
    tokens = float(training.global_batch * training.sequence)
    return Economics(
        tuple(_gpus_by_accelerator(resolved, step_bound)),
        step_bound.seconds,
        tokens,
        prices.pue,
        prices.carbon_intensity,
        prices.training_tokens,
    )


def _gpus_by_accelerator(resolved: ResolvedScenario, step_bound: StepLowerBound) -> Iterator[GpuGroup]:
    """The job's GPUs by accelerator; with several types the split of the mean compute time is unknown."""
    accelerators, accelerator_index = resolved.cluster.accelerator_kinds()
    matmul_seconds, memory_bound_seconds = (
        (step_bound.matmul_seconds, step_bound.memory_bound_seconds) if len(accelerators) == 1 else (0.0, 0.0)
    )
    seconds = {
        GpuActivity.MATMUL: matmul_seconds,
        GpuActivity.MEMORY_BOUND: memory_bound_seconds,
        GpuActivity.COMMUNICATING: 0.0,
        GpuActivity.WAITING: step_bound.seconds - matmul_seconds - memory_bound_seconds,
    }
    for index, accelerator in enumerate(accelerators):
        ranks = int(np.count_nonzero(accelerator_index[: resolved.layout.world_size] == index))
        if ranks:
            quote, draw = (
                resolved.economics.gpu_hour_quote(accelerator, resolved.cluster.name),
                resolved.economics.power_draw(accelerator),
            )
            yield GpuGroup(accelerator.name, ranks, seconds, quote, draw, unknown=accelerator.unknown)


def parse_objective(name: str) -> Objective:
    """The objective of this name; raise InputError that suggests the nearest."""
    names = [objective.value for objective in Objective]
    if name not in names:
        raise InputError(f"objective: {name!r} is unknown; {suggest_nearest(name, names)}")
    return Objective(name)
