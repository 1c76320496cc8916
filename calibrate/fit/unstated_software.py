"""How much does a prediction change where the scenario does not say which software ran?

A user who does not name a framework gets `framework: pytorch` and its kernels. Every published step is predicted
that way, too: as its row says but for its software. The errors of these predictions tell how uncertain a step is
whose software is not stated.
"""

import math
from dataclasses import dataclass
from typing import Self

from clustersim.results.simulation_result import SimulationResult
from clustersim.simulation import simulate
from clustersim.uncertainty.step_features import StepFeatures, extract_step_features
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.steps import build_scenario, predicted_step_seconds


@dataclass(frozen=True, slots=True)
class UnstatedSoftware:
    """log_ratio: logarithm of the predicted time without over that with the software stated; features: without."""

    log_ratio: float
    features: StepFeatures

    @classmethod
    def predict(cls, case: ValidationCase, stated: SimulationResult) -> Self | None:
        """The prediction of a case, by packaged constants.

        stated: that with its software. None where it states none, or where the row needs it to be expressed.
        """
        if not stated.scenario.names_framework:
            return None
        try:
            result = simulate(build_scenario(case, states_software=False))
        except CannotPredictError:
            return None
        return cls(math.log(predicted_step_seconds(result) / predicted_step_seconds(stated)), features_of(result))


def features_of(result: SimulationResult) -> StepFeatures:
    """Features of a simulated step."""
    return extract_step_features(result.scenario, result.breakdown.launch_share)
