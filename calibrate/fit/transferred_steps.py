"""How far are steps from what is predicted, by constants that none of their kind was fitted to?

The constants of steps are fitted to dense ones in BF16 alone. Mixtures of experts, and steps in formats with scales,
are predicted by those of all dense steps, and left out by those of the others than their own source's; accelerators and
hosts without any keep what their files say. The pace of products in formats with scales is fitted to dense steps in
such formats (`low_precision_steps`), and is left out likewise.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from calibrate.fit.out_of_sample import LeftOut
from calibrate.fit.step_table import SIBLINGS
from clustersim.common.units import Seconds
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.model_file import DENSE_STEPS
from clustersim.uncertainty.step_features import StepFeatures, extract_step_features
from clustersim.validation.case_scenario import experience_of
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.steps import predicted_seconds, scenario_of


@dataclass(frozen=True, slots=True)
class Paces:
    """Rates of arithmetic within a step relative to single kernels, by accelerator. narrow: in formats with scales."""

    sustained: Mapping[str, float] = field(default_factory=dict)
    narrow: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unfitted:
    """One step of a kind of experience. seen, unseen: predicted over measured, less one, by all constants, left out."""

    case_id: str
    source: str
    kind: str
    seen: float
    unseen: float
    facts: StepFeatures

    @property
    def left_out(self) -> LeftOut:
        """The step as a row of a table."""
        return LeftOut(self.case_id, self.source, -float(np.log1p(self.unseen)), self.facts)


def judge_unfitted(
    cases: Sequence[Case], found: Paces, without: Mapping[str, Paces], pool: Executor
) -> dict[str, list[Unfitted]]:
    """By kind, those of quality A and B that can be predicted; without: the constants that have not seen a source."""
    unfitted = [case for case in cases if experience_of(case) not in (None, DENSE_STEPS)]
    judged = pool.map(partial(judge_step, found=found, without=without), unfitted)
    by_kind: dict[str, list[Unfitted]] = {}
    for item in judged:
        if item is not None:
            by_kind.setdefault(item.kind, []).append(item)
    return by_kind


def judge_step(case: Case, found: Paces, without: Mapping[str, Paces]) -> Unfitted | None:
    """One step; None where it cannot be predicted."""
    kind = experience_of(case)
    try:
        scenario, measured = scenario_of(case), case.number("step_time_s")
    except CannotPredictError:
        return None
    source = case.text("source")
    seen, unseen = (_seconds(scenario, paces) / measured - 1.0 for paces in (found, without.get(source, found)))
    facts = extract_step_features(scenario, simulate(scenario).breakdown.launch_share)
    return None if kind is None else Unfitted(case.text("case_id"), source, kind, seen, unseen, facts)


def _seconds(scenario: Scenario, paces: Paces) -> Seconds:
    accelerator = scenario.cluster.accelerator
    own, name = accelerator.derating, SIBLINGS.get(accelerator.name, accelerator.name)
    sustained, narrow = paces.sustained.get(name, own.sustained_ratio), paces.narrow.get(name, own.low_precision_ratio)
    changed = replace(accelerator, derating=replace(own, sustained_ratio=sustained, low_precision_ratio=narrow))
    return predicted_seconds(simulate(replace(scenario, cluster=replace(scenario.cluster, accelerator=changed))))
