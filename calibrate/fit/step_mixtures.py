"""How far are steps of mixtures of experts from what is predicted, by constants that no mixture was fitted to?

The constants of steps are fitted to dense ones alone. A mixture is predicted by those of all dense steps, and left out
by those of the others than its own source's; accelerators and hosts without any keep what their files say.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from calibrate.fit.left_out import LeftOut
from calibrate.fit.step_table import SIBLINGS
from clustersim.experience.facts import Facts, facts_of
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.units import Seconds
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.settings import is_mixture
from clustersim.validation.steps import predicted_seconds, scenario_of

Sustained = Mapping[str, float]
"""Rates of arithmetic within a step relative to single kernels, by accelerator."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """One step. seen, unseen: predicted over measured, less one, by constants of all dense steps, and left out."""

    case_id: str
    source: str
    seen: float
    unseen: float
    facts: Facts

    @property
    def left_out(self) -> LeftOut:
        """The step as a row of a table."""
        return LeftOut(self.case_id, self.source, -float(np.log1p(self.unseen)), self.facts)


def judge_mixtures(
    cases: Sequence[Case], found: Sustained, without: Mapping[str, Sustained], pool: Executor
) -> list[Mixture]:
    """Mixtures of quality A and B that can be predicted; without: the constants that have not seen a source."""
    mixtures = [case for case in cases if is_mixture(case)]
    judged = pool.map(partial(judge_mixture, found=found, without=without), mixtures)
    return [each for each in judged if each is not None]


def judge_mixture(case: Case, found: Sustained, without: Mapping[str, Sustained]) -> Mixture | None:
    """One step; None where it cannot be predicted."""
    try:
        scenario, measured = scenario_of(case), case.number("step_time_s")
    except CannotPredictError:
        return None
    source = case.text("source")
    seen, unseen = (_seconds(scenario, each) / measured - 1.0 for each in (found, without.get(source, found)))
    facts = facts_of(scenario, simulate(scenario).breakdown)
    return Mixture(case.text("case_id"), source, seen, unseen, facts)


def _seconds(scenario: Scenario, sustained: Sustained) -> Seconds:
    accelerator = scenario.cluster.accelerator
    own = accelerator.in_training
    rate = sustained.get(SIBLINGS.get(accelerator.name, accelerator.name), own.sustained)
    changed = replace(accelerator, in_training=replace(own, sustained=rate))
    return predicted_seconds(simulate(replace(scenario, cluster=replace(scenario.cluster, accelerator=changed))))
