"""Transfer test: errors of classes of steps that the constants were not fitted to.

The constants of steps are fitted to dense ones in BF16 only. MoE steps and steps in block-scaled formats are
predicted with the constants of all dense steps, and for the out-of-sample error with those of all publishers
but their own; accelerators and hosts without fitted constants keep the values of their files. The rate of
matmuls in block-scaled formats is fitted to dense steps in such formats (`low_precision_steps`), and is held
out likewise.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from calibrate.fit.out_of_sample import OutOfSampleStep
from calibrate.fit.step_table import SAME_CHIP
from calibrate.fit.unstated_software import UnstatedSoftware, features_of
from clustersim.common.units import Seconds
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.model_file import DENSE_STEPS
from clustersim.uncertainty.step_features import StepFeatures
from clustersim.validation.case_scenario import case_uncertainty_model
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.steps import build_scenario, predicted_step_seconds


@dataclass(frozen=True, slots=True)
class SustainedRates:
    """In-training rates relative to isolated kernels, by accelerator. low_precision: in block-scaled formats."""

    sustained: Mapping[str, float] = field(default_factory=dict)
    low_precision: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TransferredStep:
    """One step of a class with an uncertainty model of its own.

    in_sample_error, out_of_sample_error: predicted over measured minus 1, with constants of all sources, and of
    all but its publisher's; unstated: the prediction without its software, None: it states none.
    """

    case_id: str
    source: str
    model_name: str
    in_sample_error: float
    out_of_sample_error: float
    features: StepFeatures
    unstated: UnstatedSoftware | None

    @property
    def out_of_sample(self) -> Iterator[OutOfSampleStep]:
        """The rows of the table of out-of-sample errors."""
        log_error = -float(np.log1p(self.out_of_sample_error))
        return OutOfSampleStep.predictions(self.case_id, self.source, log_error, self.features, self.unstated)


def evaluate_transferred(
    cases: Sequence[ValidationCase], rates: SustainedRates, held_out_rates: Mapping[str, SustainedRates], pool: Executor
) -> dict[str, list[TransferredStep]]:
    """Steps of quality A and B that can be predicted, by class.

    held_out_rates: by source, the constants fitted without its publisher.
    """
    transferred = [case for case in cases if case_uncertainty_model(case) not in (None, DENSE_STEPS)]
    evaluated = pool.map(partial(evaluate_step, rates=rates, held_out_rates=held_out_rates), transferred)
    by_kind: dict[str, list[TransferredStep]] = {}
    for step in evaluated:
        if step is not None:
            by_kind.setdefault(step.model_name, []).append(step)
    return by_kind


def evaluate_step(
    case: ValidationCase, rates: SustainedRates, held_out_rates: Mapping[str, SustainedRates]
) -> TransferredStep | None:
    """Evaluate one step; None if it cannot be predicted."""
    model_name = case_uncertainty_model(case)
    try:
        scenario, measured = build_scenario(case), case.positive_float("step_time_s")
    except CannotPredictError:
        return None
    source = case.text("source")
    in_sample_error, out_of_sample_error = (
        _step_seconds(scenario, candidate_rates) / measured - 1.0
        for candidate_rates in (rates, held_out_rates.get(source, rates))
    )
    if model_name is None:
        return None
    result = simulate(scenario)
    errors, unstated = (in_sample_error, out_of_sample_error), UnstatedSoftware.predict(case, result)
    return TransferredStep(case.text("case_id"), source, model_name, *errors, features_of(result), unstated)


def _step_seconds(scenario: Scenario, rates: SustainedRates) -> Seconds:
    accelerator = scenario.cluster.accelerator
    derating, name = accelerator.derating, SAME_CHIP.get(accelerator.name, accelerator.name)
    sustained, low_precision = (
        rates.sustained.get(name, derating.sustained_ratio),
        rates.low_precision.get(name, derating.low_precision_ratio),
    )
    changed = replace(
        accelerator, derating=replace(derating, sustained_ratio=sustained, low_precision_ratio=low_precision)
    )
    return predicted_step_seconds(simulate(replace(scenario, cluster=replace(scenario.cluster, accelerator=changed))))
