"""What is the best layout: the fastest, the one with most tokens from each GPU, the cheapest, or that of least energy?

Or, of a whole run with all that breaks, that of the fewest days or the least money. Each is a score of which less is
better, and a bound from below where only the least of a step is known: GPUs that wait for whatever is not known draw
least, and a run takes its steps at least.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Final

import numpy as np

from clustersim.common.errors import InputError, suggest_nearest
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
    """Of what a search wants as little as possible."""

    STEP_TIME = "step-time"  # seconds
    TOKENS_PER_GPU = "tokens-per-gpu"  # GPU seconds for a token
    COST = "cost"  # of a trillion tokens, in the currency of prices
    ENERGY = "energy"  # joules for a trillion tokens
    DAYS = "days"  # of the run, with what breaks
    RUN_COST = "run-cost"  # of the run, with what breaks and spares, in the currency of prices

    def lower_bound(self, resolved: ResolvedScenario, step_bound: StepLowerBound) -> float:
        """The least score of what takes so long at least."""
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
        """What a simulated scenario is measured by."""
        if self is Objective.STEP_TIME:
            return result.step_time
        if self.is_run_objective:
            return self.run_score(result, estimate_run(result.scenario, result.step_time))
        return self._economic_score(result.economics)

    def run_score(self, result: SimulationResult | ExtrapolatedStep, run: RunEstimate) -> float:
        """What a simulated scenario is measured by, whose run is known."""
        if self is Objective.DAYS:
            return run.days
        return run.days * _cost_per_day(result.economics) * (run.nodes + run.spare_nodes) / run.nodes

    @property
    def is_run_objective(self) -> bool:
        """Whether it is about the whole run, with what breaks."""
        return self in (Objective.DAYS, Objective.RUN_COST)

    def allows_estimates(self, resolved: ResolvedScenario) -> bool:
        """Whether estimates of a step (`steady`) tell it to `estimate_margin`.

        A whole run is not known from them. Those who wait for a slow GPU settle later than the step does.
        """
        has_unequal_gpus = bool(resolved.degradations.slow_gpus) or len(resolved.cluster.accelerator_kinds()[0]) > 1
        return not (self.is_run_objective or (self is Objective.ENERGY and has_unequal_gpus))

    @property
    def estimate_margin(self) -> float:
        """The part by which the score of an estimate may be too much.

        What GPUs do settles later than how long they take, where weight gradients are put off: of 950 random layouts
        energy was 2.0 % too much at most.
        """
        return 0.03 if self is Objective.ENERGY else MAX_OVERESTIMATE

    def require_data(self, resolved: ResolvedScenario) -> None:
        """Raise InputError where prices or powers are not known."""
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


def _cost_per_day(economics: Economics) -> float:
    """What a day of the job costs; nothing where no price is known."""
    cost = economics.cost_per_step
    return 0.0 if cost is None else cost / economics.step_time * _SECONDS_PER_DAY


def minimum_economics(resolved: ResolvedScenario, step_bound: StepLowerBound) -> Economics:
    """What a step costs and takes at least."""
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
    """The job's GPUs by accelerator; of several kinds it is not known which compute how much of the mean."""
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
            yield GpuGroup(accelerator.name, ranks, seconds, quote, draw)


def parse_objective(name: str) -> Objective:
    """The objective of that name; raise InputError that names the nearest."""
    names = [objective.value for objective in Objective]
    if name not in names:
        raise InputError(f"objective: {name!r} is unknown; {suggest_nearest(name, names)}")
    return Objective(name)
