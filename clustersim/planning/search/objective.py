"""What is the best layout: the fastest, the one with most tokens from each GPU, the cheapest, or that of least energy?

Each is a score of which less is better, and a bound from below where only the least time of a step is known.
"""

from enum import Enum

from clustersim.errors import InputError, nearest
from clustersim.result import Result
from clustersim.scenario import Scenario
from clustersim.units import Seconds


class Objective(Enum):
    """Of what a search wants as little as possible."""

    STEP_TIME = "step-time"
    TOKENS_PER_GPU = "tokens-per-gpu"

    def least(self, scenario: Scenario, seconds: Seconds) -> float:
        """The least score of a scenario whose step takes so long at least."""
        if self is Objective.STEP_TIME:
            return seconds
        training = scenario.training
        return seconds * scenario.layout.world / (training.global_batch * training.sequence)

    def score(self, result: Result) -> float:
        """What a simulated scenario is measured by."""
        return self.least(result.scenario, result.step_time)


def objective_named(name: str) -> Objective:
    """The objective of that name; raise InputError that names the nearest."""
    legal = [each.value for each in Objective]
    if name not in legal:
        raise InputError(f"objective: {name!r} is unknown; {nearest(name, legal)}")
    return Objective(name)
