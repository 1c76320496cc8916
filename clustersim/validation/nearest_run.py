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
from clustersim.validation.case_scenario import experience_of
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.steps import compare_step, read_steps, scenario_of

_MADE: Final = 24  # rows of which scenarios are made
_PARAMETERS: Final = "parameters"
_COLUMNS: Final[Mapping[str, str]] = {"GPUs": "n_gpus", "tokens": "seq", "tp": "tp", "cp": "cp", "pp": "pp"}
_SHAPE: Final[Mapping[str, int]] = {"layers": 1, "hidden": 2}  # by how many doublings of parameters each doubles


@dataclass(frozen=True, slots=True)
class _Like:
    """What a scenario is like. amounts: by what they count."""

    accelerators: frozenset[str]
    kinds: frozenset[str]
    amounts: Mapping[str, float]

    @classmethod
    def of(cls, scenario: Scenario) -> "_Like":
        amounts = {**step_quantities(scenario), _PARAMETERS: parameter_count(scenario.model)}
        return cls(accelerator_names(scenario), step_categories(scenario), amounts)

    def distance(self, other: "_Like", experience: UncertaintyModel) -> float:
        """Variance of the logarithm that is between both; 0 for what is told apart by nothing."""
        loads = {
            BaseComponent.ACCELERATOR: float(self.accelerators != other.accelerators),
            BaseComponent.KIND: float(len(self.kinds ^ other.kinds)),
            BaseComponent.DOUBLING: sum(_doublings(self.amounts[name], other.amounts[name]) for name in self.amounts),
        }
        return sum(load * experience.deviations[term] ** 2 for term, load in loads.items())

    def differences(self, other: "_Like") -> Iterator[str]:
        """What the other has and this one has not, and the reverse, in words."""
        if self.accelerators != other.accelerators:
            yield " and ".join(sorted(other.accelerators))
        far = sorted(self.amounts, key=lambda name: -_doublings(self.amounts[name], other.amounts[name]))
        for name in far:
            if _doublings(self.amounts[name], other.amounts[name]) > 0.1:
                yield _amount(name, other.amounts[name], self.amounts[name])
        yield from sorted(other.kinds - self.kinds)
        yield from (f"no {kind}" for kind in sorted(self.kinds - other.kinds) if not _replaced(kind, other.kinds))


def nearest_run(scenario: Scenario) -> NearestRun | None:
    """The published run that is most like a scenario, beside its prediction; None where none is of its kind."""
    narrow = scenario.training.recipe.matmul_formats.low_precision is not None
    kind = uncertainty_model_name(moe=bool(scenario.model.distinct_moes), low_precision=narrow)
    experience, here = load_uncertainty_model(kind), _Like.of(scenario)
    rows = [case for case in read_steps() if experience_of(case) == kind]
    rows.sort(key=lambda case: _by_columns(case, scenario, here, experience))
    made = [(case, _Like.of(found)) for case, found in _scenarios(rows[:_MADE])]
    if not made:
        return None
    case, like = min(made, key=lambda each: here.distance(each[1], experience))
    compared = None if slow_simulation_warnings(scenario_of(case)) else compare_step(case)
    return NearestRun(
        source=case.text("source"),
        locator=case.text("locator"),
        words=f"{case.text('model')} on {case.whole('n_gpus'):,} × {case.text('gpu')}",
        differs=tuple(here.differences(like)),
        measured=case.number("step_time_s"),
        predicted=None if compared is None else compared.predicted,
    )


def _scenarios(cases: list[Case]) -> Iterator[tuple[Case, Scenario]]:
    """Those that scenarios can say."""
    for case in cases:
        try:
            yield case, scenario_of(case)
        except CannotPredictError:
            continue


def _by_columns(case: Case, scenario: Scenario, here: _Like, experience: UncertaintyModel) -> float:
    """What `distance` finds of the columns alone; infinite where they do not say it."""
    try:
        found = [_doublings(case.whole(column, 1), here.amounts[name]) for name, column in _COLUMNS.items()]
        shape = {"layers": scenario.model.layer_count, "hidden": scenario.model.hidden}
        found += [times * _doublings(case.whole(column), shape[column]) for column, times in _SHAPE.items()]
    except CannotPredictError:
        return math.inf
    other = not any(name.startswith(case.text("gpu")) for name in here.accelerators)
    loads = {BaseComponent.ACCELERATOR: float(other), BaseComponent.DOUBLING: sum(found)}
    return sum(load * experience.deviations[term] ** 2 for term, load in loads.items())


def _doublings(one: float, other: float) -> float:
    return abs(math.log2(one / other))


def _amount(name: str, there: float, here: float) -> str:
    if name == _PARAMETERS:
        return f"{there / 1e9:.3g}B parameters (here {here / 1e9:.3g}B)"
    if name == "GPUs":
        return f"{there:,} GPUs (here {here:,})"
    if name == "tokens":
        return f"sequences of {there:,} tokens (here {here:,})"
    return f"{name} {there:,} (here {here:,})"


def _replaced(kind: str, others: frozenset[str]) -> bool:
    """Whether the others have something else of the same sort, as `framework nemo` for `framework megatron`."""
    sort = kind.split()[0]
    return any(other.split()[0] == sort and " " in other for other in others)
