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
from clustersim.planning.layouts.bounds import Least
from clustersim.planning.layouts.extrapolation import NEAR, Extended
from clustersim.reliability.checkpoint_cost import work_of
from clustersim.reliability.run_estimate import Estimate, estimate, least_days
from clustersim.results.economics import Economics, Gpus
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario.resolved import ResolvedScenario

_DAY: Final = 86400.0


class Objective(Enum):
    """Of what a search wants as little as possible."""

    STEP_TIME = "step-time"  # seconds
    TOKENS_PER_GPU = "tokens-per-gpu"  # GPU seconds for a token
    COST = "cost"  # of a trillion tokens, in the currency of prices
    ENERGY = "energy"  # joules for a trillion tokens
    DAYS = "days"  # of the run, with what breaks
    RUN_COST = "run-cost"  # of the run, with what breaks and spares, in the currency of prices

    def least(self, setup: ResolvedScenario, least: Least) -> float:
        """The least score of what takes so long at least."""
        if self is Objective.STEP_TIME:
            return least.seconds
        if self.of_run:
            days = least_days(setup, least.seconds)
            return days if self is Objective.DAYS or days == 0.0 else days * _a_day(economics_of(setup, least))
        return self._of(economics_of(setup, least))

    def score(self, result: SimulationResult | Extended) -> float:
        """What a simulated scenario is measured by."""
        if self is Objective.STEP_TIME:
            return result.step_time
        if self.of_run:
            return self.score_of_run(result, estimate(result.scenario, result.step_time))
        return self._of(result.economics)

    def score_of_run(self, result: SimulationResult | Extended, run: Estimate) -> float:
        """What a simulated scenario is measured by, whose run is known."""
        if self is Objective.DAYS:
            return run.days
        return run.days * _a_day(result.economics) * (run.nodes + run.spare_nodes) / run.nodes

    @property
    def of_run(self) -> bool:
        """Whether it is about the whole run, with what breaks."""
        return self in (Objective.DAYS, Objective.RUN_COST)

    def near(self, setup: ResolvedScenario) -> bool:
        """Whether estimates of a step (`steady`) tell it to `margin`.

        A whole run is not known from them. Those who wait for a slow GPU settle later than the step does.
        """
        unequal = bool(setup.degradations.slow_gpus) or len(setup.cluster.accelerator_kinds()[0]) > 1
        return not (self.of_run or (self is Objective.ENERGY and unequal))

    @property
    def margin(self) -> float:
        """The part by which the score of an estimate may be too much.

        What GPUs do settles later than how long they take, where weight gradients are put off: of 950 random layouts
        energy was 2.0 % too much at most.
        """
        return 0.03 if self is Objective.ENERGY else NEAR

    def require(self, setup: ResolvedScenario) -> None:
        """Raise InputError where prices or powers are not known."""
        found = economics_of(setup, Least(1.0))
        prices = {Objective.COST, Objective.RUN_COST}
        missing = found.without_price if self in prices else found.without_power if self is Objective.ENERGY else ()
        if missing:
            raise InputError(f"objective {self.value}: {missing[0]}")
        if self.of_run:
            work_of(setup, 1.0)

    def _of(self, found: Economics) -> float:
        match self:
            case Objective.COST:
                return found.cost_per_trillion_tokens or 0.0
            case Objective.ENERGY:
                return found.energy_per_trillion_tokens or 0.0
        return found.step_time * found.number / found.tokens


def _a_day(found: Economics) -> float:
    """What a day of the job costs; nothing where no price is known."""
    cost = found.cost_per_step
    return 0.0 if cost is None else cost / found.step_time * _DAY


def economics_of(setup: ResolvedScenario, least: Least) -> Economics:
    """What a step costs and takes at least."""
    said, training = setup.economics, setup.training
    tokens = float(training.global_batch * training.sequence)
    return Economics(
        tuple(_gpus(setup, least)), least.seconds, tokens, said.pue, said.carbon_intensity, said.training_tokens
    )


def _gpus(setup: ResolvedScenario, least: Least) -> Iterator[Gpus]:
    """The job's GPUs by accelerator; of several kinds it is not known which compute how much of the mean."""
    accelerators, kind = setup.cluster.accelerator_kinds()
    products, streaming = (least.products, least.streaming) if len(accelerators) == 1 else (0.0, 0.0)
    seconds = {
        GpuActivity.MATMUL: products,
        GpuActivity.MEMORY_BOUND: streaming,
        GpuActivity.COMMUNICATING: 0.0,
        GpuActivity.WAITING: least.seconds - products - streaming,
    }
    for number, accelerator in enumerate(accelerators):
        ranks = int(np.count_nonzero(kind[: setup.layout.world_size] == number))
        if ranks:
            quote, draw = (
                setup.economics.gpu_hour_quote(accelerator, setup.cluster.name),
                setup.economics.power_draw(accelerator),
            )
            yield Gpus(accelerator.name, ranks, seconds, quote, draw)


def objective_named(name: str) -> Objective:
    """The objective of that name; raise InputError that names the nearest."""
    legal = [objective.value for objective in Objective]
    if name not in legal:
        raise InputError(f"objective: {name!r} is unknown; {suggest_nearest(name, legal)}")
    return Objective(name)
