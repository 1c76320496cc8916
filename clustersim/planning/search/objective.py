"""What is the best layout: the fastest, the one with most tokens from each GPU, the cheapest, or that of least energy?

Each is a score of which less is better, and a bound from below where only the least of a step is known: GPUs that wait
for whatever is not known draw least.
"""

from collections.abc import Iterator
from enum import Enum

import numpy as np

from clustersim.analysis.economics import Economics, Gpus
from clustersim.errors import InputError, nearest
from clustersim.hardware.power import Activity
from clustersim.planning.search.bounds import Least
from clustersim.result import Result
from clustersim.scenario.setup import Setup


class Objective(Enum):
    """Of what a search wants as little as possible."""

    STEP_TIME = "step-time"  # seconds
    TOKENS_PER_GPU = "tokens-per-gpu"  # GPU seconds for a token
    COST = "cost"  # of a trillion tokens, in the currency of prices
    ENERGY = "energy"  # joules for a trillion tokens

    def least(self, setup: Setup, least: Least) -> float:
        """The least score of what takes so long at least."""
        if self is Objective.STEP_TIME:
            return least.seconds
        return self._of(economics_of(setup, least))

    def score(self, result: Result) -> float:
        """What a simulated scenario is measured by."""
        return result.step_time if self is Objective.STEP_TIME else self._of(result.economics)

    def require(self, setup: Setup) -> None:
        """Raise InputError where prices or powers are not known."""
        found = economics_of(setup, Least(1.0))
        missing = {Objective.COST: found.without_price, Objective.ENERGY: found.without_power}.get(self, ())
        if missing:
            raise InputError(f"objective {self.value}: {missing[0]}")

    def _of(self, found: Economics) -> float:
        match self:
            case Objective.COST:
                return found.cost_per_trillion_tokens or 0.0
            case Objective.ENERGY:
                return found.energy_per_trillion_tokens or 0.0
        return found.step_time * found.number / found.tokens


def economics_of(setup: Setup, least: Least) -> Economics:
    """What a step costs and takes at least."""
    said, training = setup.economics, setup.training
    tokens = float(training.global_batch * training.sequence)
    return Economics(tuple(_gpus(setup, least)), least.seconds, tokens, said.pue, said.carbon, said.tokens)


def _gpus(setup: Setup, least: Least) -> Iterator[Gpus]:
    """The job's GPUs by accelerator."""
    seconds = {
        Activity.PRODUCTS: least.products,
        Activity.STREAMING: least.streaming,
        Activity.COMMUNICATING: 0.0,
        Activity.WAITING: least.seconds - least.products - least.streaming,
    }
    accelerators, kind = setup.cluster.kinds()
    for number, accelerator in enumerate(accelerators):
        ranks = int(np.count_nonzero(kind[: setup.layout.world] == number))
        if ranks:
            quote, draw = setup.economics.quote(accelerator, setup.cluster.name), setup.economics.draw(accelerator)
            yield Gpus(accelerator.name, ranks, seconds, quote, draw)


def objective_named(name: str) -> Objective:
    """The objective of that name; raise InputError that names the nearest."""
    legal = [each.value for each in Objective]
    if name not in legal:
        raise InputError(f"objective: {name!r} is unknown; {nearest(name, legal)}")
    return Objective(name)
