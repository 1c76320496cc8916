"""Which published run is most like a scenario, and how far was its prediction off?

Near is by the terms of the band (`uncertainty.prediction_interval`): what the logarithm of the error varies by for another accelerator,
for each kind that only one of both has (software, strategy, format), for each doubling from one amount to the other
(GPUs, tokens, degrees, parameters). Only runs of the scenario's kind (dense or with experts, with scales or without) of
which all that a step depends on is known are looked at.

Making scenarios of all rows takes long, so those that are near by their columns are made, and told apart exactly.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from clustersim.model.transformer import parameter_count
from clustersim.results.nearest_run import NearestRun
from clustersim.scenario import Scenario
from clustersim.scenario.validation_rules.warnings import slow_simulation_warnings
from clustersim.uncertainty.model_file import load_uncertainty_model, uncertainty_model_name
from clustersim.uncertainty.prediction_interval import BaseComponent, UncertaintyModel
from clustersim.uncertainty.step_features import accelerator_names, step_categories, step_quantities
from clustersim.validation.case_scenario import case_uncertainty_model
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.steps import build_scenario, compare_step, read_steps

_CANDIDATE_COUNT: Final = 24  # rows of which scenarios are made
_PARAMETERS_KEY: Final = "parameters"
_COLUMN_BY_QUANTITY: Final[Mapping[str, str]] = {"GPUs": "n_gpus", "tokens": "seq", "tp": "tp", "cp": "cp", "pp": "pp"}
_DOUBLINGS_BY_DIMENSION: Final[Mapping[str, int]] = {
    "layers": 1,
    "hidden": 2,
}  # by how many doublings of parameters each doubles


@dataclass(frozen=True, slots=True)
class _RunFeatures:
    """What a scenario is like. amounts: by what they count."""

    accelerators: frozenset[str]
    categories: frozenset[str]
    quantities: Mapping[str, float]

    @classmethod
    def from_scenario(cls, scenario: Scenario) -> "_RunFeatures":
        quantities = {**step_quantities(scenario), _PARAMETERS_KEY: parameter_count(scenario.model)}
        return cls(accelerator_names(scenario), step_categories(scenario), quantities)

    def distance(self, other: "_RunFeatures", model: UncertaintyModel) -> float:
        """Variance of the logarithm that is between both; 0 for what is told apart by nothing."""
        loadings = {
            BaseComponent.ACCELERATOR: float(self.accelerators != other.accelerators),
            BaseComponent.KIND: float(len(self.categories ^ other.categories)),
            BaseComponent.DOUBLING: sum(
                _doublings(self.quantities[name], other.quantities[name]) for name in self.quantities
            ),
        }
        return sum(loading * model.deviations[term] ** 2 for term, loading in loadings.items())

    def differences(self, other: "_RunFeatures") -> Iterator[str]:
        """What the other has and this one has not, and the reverse, in words."""
        if self.accelerators != other.accelerators:
            yield " and ".join(sorted(other.accelerators))
        by_distance = sorted(
            self.quantities, key=lambda name: -_doublings(self.quantities[name], other.quantities[name])
        )
        for name in by_distance:
            if _doublings(self.quantities[name], other.quantities[name]) > 0.1:
                yield _describe_quantity(name, other.quantities[name], self.quantities[name])
        yield from sorted(other.categories - self.categories)
        yield from (
            f"no {category}"
            for category in sorted(self.categories - other.categories)
            if not _has_alternative(category, other.categories)
        )


def nearest_run(scenario: Scenario) -> NearestRun | None:
    """The published run that is most like a scenario, beside its prediction; None where none is of its kind."""
    is_low_precision = scenario.training.recipe.matmul_formats.low_precision is not None
    model_name = uncertainty_model_name(moe=bool(scenario.model.distinct_moes), low_precision=is_low_precision)
    model, features = load_uncertainty_model(model_name), _RunFeatures.from_scenario(scenario)
    candidates = [case for case in read_steps() if case_uncertainty_model(case) == model_name]
    candidates.sort(key=lambda case: _column_distance(case, scenario, features, model))
    candidate_features = [
        (case, _RunFeatures.from_scenario(case_scenario))
        for case, case_scenario in _build_scenarios(candidates[:_CANDIDATE_COUNT])
    ]
    if not candidate_features:
        return None
    case, case_features = min(candidate_features, key=lambda each: features.distance(each[1], model))
    comparison = None if slow_simulation_warnings(build_scenario(case)) else compare_step(case)
    return NearestRun(
        source=case.text("source"),
        locator=case.text("locator"),
        description=f"{case.text('model')} on {case.positive_int('n_gpus'):,} × {case.text('gpu')}",
        differences=tuple(features.differences(case_features)),
        measured_step_time=case.positive_float("step_time_s"),
        predicted_step_time=None if comparison is None else comparison.predicted,
    )


def _build_scenarios(cases: list[ValidationCase]) -> Iterator[tuple[ValidationCase, Scenario]]:
    """Those that scenarios can say."""
    for case in cases:
        try:
            yield case, build_scenario(case)
        except CannotPredictError:
            continue


def _column_distance(
    case: ValidationCase, scenario: Scenario, features: _RunFeatures, model: UncertaintyModel
) -> float:
    """What `distance` finds of the columns alone; infinite where they do not say it."""
    try:
        distances = [
            _doublings(case.positive_int(column, 1), features.quantities[name])
            for name, column in _COLUMN_BY_QUANTITY.items()
        ]
        dimensions = {"layers": scenario.model.layer_count, "hidden": scenario.model.hidden}
        distances += [
            doublings * _doublings(case.positive_int(column), dimensions[column])
            for column, doublings in _DOUBLINGS_BY_DIMENSION.items()
        ]
    except CannotPredictError:
        return math.inf
    other_accelerator = not any(name.startswith(case.text("gpu")) for name in features.accelerators)
    loadings = {BaseComponent.ACCELERATOR: float(other_accelerator), BaseComponent.DOUBLING: sum(distances)}
    return sum(loading * model.deviations[term] ** 2 for term, loading in loadings.items())


def _doublings(one: float, other: float) -> float:
    return abs(math.log2(one / other))


def _describe_quantity(name: str, theirs: float, ours: float) -> str:
    if name == _PARAMETERS_KEY:
        return f"{theirs / 1e9:.3g}B parameters (here {ours / 1e9:.3g}B)"
    if name == "GPUs":
        return f"{theirs:,} GPUs (here {ours:,})"
    if name == "tokens":
        return f"sequences of {theirs:,} tokens (here {ours:,})"
    return f"{name} {theirs:,} (here {ours:,})"


def _has_alternative(category: str, other_categories: frozenset[str]) -> bool:
    """Whether the others have something else of the same sort, as `framework nemo` for `framework megatron`."""
    category_type = category.split()[0]
    return any(
        other_category.split()[0] == category_type and " " in other_category for other_category in other_categories
    )
