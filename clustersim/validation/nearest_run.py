"""Which published run is most like a scenario, and how far was its prediction off?

Distance is the variance that the uncertainty model (`uncertainty.prediction_interval`) assigns to the log
error for another accelerator, for each category that only one of the two has (software, strategy, format),
and for each doubling between their quantities (GPUs, tokens, degrees, parameters). Candidates are runs
whose step is fully specified and that have the scenario's stratum (dense or MoE, high or low precision).
A run of the scenario's own job (`uncertainty.reference_runs`) is the nearest, whatever its quality.

Building scenarios of all cases is slow, so candidates are preselected by their columns, then compared
exactly.
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
from clustersim.uncertainty.reference_runs import reference_run
from clustersim.uncertainty.step_features import accelerator_names, step_categories, step_quantities
from clustersim.validation.case_scenario import case_uncertainty_model
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.steps import build_scenario, compare_step, read_steps

_CANDIDATE_COUNT: Final = 24  # candidates whose scenarios are built
_PARAMETERS_KEY: Final = "parameters"
_COLUMN_BY_QUANTITY: Final[Mapping[str, str]] = {"GPUs": "n_gpus", "tokens": "seq", "tp": "tp", "cp": "cp", "pp": "pp"}
_DOUBLINGS_BY_DIMENSION: Final[Mapping[str, int]] = {
    "layers": 1,
    "hidden": 2,
}  # doublings of parameters per doubling of the dimension


@dataclass(frozen=True, slots=True)
class _RunFeatures:
    """Features of a scenario for the distance between runs. quantities: by name, such as `GPUs` or `tokens`."""

    accelerators: frozenset[str]
    categories: frozenset[str]
    quantities: Mapping[str, float]

    @classmethod
    def from_scenario(cls, scenario: Scenario) -> "_RunFeatures":
        quantities = {**step_quantities(scenario), _PARAMETERS_KEY: parameter_count(scenario.model)}
        return cls(accelerator_names(scenario), step_categories(scenario), quantities)

    def distance(self, other: "_RunFeatures", model: UncertaintyModel) -> float:
        """Variance of the log error between the two runs; 0 if no feature differs."""
        loadings = {
            BaseComponent.ACCELERATOR: float(self.accelerators != other.accelerators),
            BaseComponent.CATEGORY: float(len(self.categories ^ other.categories)),
            BaseComponent.DOUBLING: sum(
                _doublings(self.quantities[name], other.quantities[name]) for name in self.quantities
            ),
        }
        return sum(loading * model.deviations[term] ** 2 for term, loading in loadings.items())

    def differences(self, other: "_RunFeatures") -> Iterator[str]:
        """What the other run has and this one does not, and the reverse, as phrases; largest differences first."""
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
    """The most similar published run, with its measured and predicted step time; None if its stratum has no run."""
    is_low_precision = scenario.training.recipe.matmul_formats.low_precision is not None
    model_name = uncertainty_model_name(moe=bool(scenario.model.distinct_moes), low_precision=is_low_precision)
    model, features = load_uncertainty_model(model_name), _RunFeatures.from_scenario(scenario)
    candidate_features = [
        (case, _RunFeatures.from_scenario(case_scenario))
        for case, case_scenario in _build_scenarios(_candidates(scenario, features, model_name))
    ]
    if not candidate_features:
        return None
    case, case_features = min(candidate_features, key=lambda candidate: features.distance(candidate[1], model))
    comparison = None if slow_simulation_warnings(build_scenario(case)) else compare_step(case)
    return NearestRun(
        source=case.text("source"),
        locator=case.text("locator"),
        description=f"{case.text('model')} on {case.positive_int('n_gpus'):,} × {case.text('gpu')}",
        differences=tuple(features.differences(case_features)),
        measured_step_time=case.positive_float("step_time_s"),
        predicted_step_time=None if comparison is None else comparison.predicted,
    )


def _candidates(scenario: Scenario, features: _RunFeatures, model_name: str) -> list[ValidationCase]:
    """The run of the scenario's own job if one was published, else those that are nearest by their columns."""
    cases, reference = read_steps(), reference_run(scenario)
    if reference is not None:
        return [case for case in cases if case.text("case_id") == reference.case_id]
    model = load_uncertainty_model(model_name)
    candidates = [case for case in cases if case_uncertainty_model(case) == model_name]
    return sorted(candidates, key=lambda case: _column_distance(case, scenario, features, model))[:_CANDIDATE_COUNT]


def _build_scenarios(cases: list[ValidationCase]) -> Iterator[tuple[ValidationCase, Scenario]]:
    """The cases that scenarios can express, with their scenarios."""
    for case in cases:
        try:
            yield case, build_scenario(case)
        except CannotPredictError:
            continue


def _column_distance(
    case: ValidationCase, scenario: Scenario, features: _RunFeatures, model: UncertaintyModel
) -> float:
    """Approximation of `distance` from the columns alone; infinite if they are not stated."""
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
    """Whether the others have another value of its type, such as `framework nemo` for `framework megatron`."""
    category_type = category.split()[0]
    return any(
        other_category.split()[0] == category_type and " " in other_category for other_category in other_categories
    )
