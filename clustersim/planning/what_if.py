"""What would the step be with one thing changed?

Every case is the scenario with a single change of the catalogue (`scenario.changes.catalogue`), simulated again;
nothing is extrapolated. A case costs about as much as the scenario itself, so cases that would exceed the total
time budget are skipped, with a note.

A change of links is compared with the scenario without its measured collectives, if it has any: those were
measured on the unchanged links, so the changed ones are modeled, and the difference would mix measurement
and model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import numpy as np

from clustersim.common.units import Seconds, format_seconds
from clustersim.results.memory_check import fits_in_memory
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import KERNEL_CATEGORIES, TimeCategory
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport
from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import changes_for
from clustersim.scenario.changes.links import without_measured_collectives
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangedScenario,
    ChangeUse,
    InapplicableChangeError,
    ScenarioChange,
)
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.scenario.validation_rules.warnings import slow_simulation_warnings
from clustersim.simulation import simulate

TIME_BUDGET: Final[Seconds] = 10.0
_ROUNDING: Final = 1e-9  # relative rounding error of sums of times
_MODELED_NOTE: Final = "collectives are modelled before and after, as measured ones hold for the links as they are"


def run_what_ifs(result: SimulationResult, budget: Seconds = TIME_BUDGET) -> WhatIfReport:
    """Simulate every applicable case within `budget` seconds of wall time in total (inf: no limit)."""
    rate = result.tokens_per_second / result.rank_count
    return WhatIfReport(result.step_time, rate, result.fits_in_memory, tuple(_simulate_cases(result, budget)))


def _simulate_cases(result: SimulationResult, budget: Seconds) -> Iterator[WhatIf]:
    """The results case by case, within the time budget."""
    started = perf_counter()
    modeled_baseline = _ModeledBaseline(result)
    baseline = Baseline(result.scenario, _busiest_rank(result), result.breakdown.category_total(TimeCategory.LAUNCH))
    for change in changes_for(ChangeUse.WHAT_IF):
        if change.is_relevant(result.scenario):
            remaining = budget - (perf_counter() - started)
            yield _simulate_case(change, baseline, _Simulations(result, modeled_baseline, remaining))


def _busiest_rank(result: SimulationResult) -> int:
    """The first of the ranks with the most kernel time, excluding those that are slowed already."""
    breakdown = result.breakdown
    kernels = breakdown.seconds[:, [category.index for category in KERNEL_CATEGORIES]].sum(axis=1)
    speeds = result.scenario.degradations.gpu_speeds(result.scenario.cluster.machine_gpu_ids)
    owner = np.searchsorted(breakdown.ranks, breakdown.representative)
    healthy = np.where(speeds == speeds.max(), kernels[owner], -1.0)
    return int(np.argmax(healthy >= (1.0 - _ROUNDING) * healthy.max()))


def _simulate_case(change: ScenarioChange, baseline: Baseline, simulations: "_Simulations") -> WhatIf:
    """One change: its outcome, or why it has none."""
    label = change.label + change.qualifier
    try:
        changed = _preferred_alternative(change, baseline)
    except InapplicableChangeError as error:
        return WhatIf(change.name, label, None, str(error))
    label += changed.detail
    if reason := simulations.skip_reason(change, changed.scenario):
        return WhatIf(change.name, label, None, reason)
    reference = simulations.reference(change)
    note = "" if reference is simulations.result else _MODELED_NOTE
    return WhatIf(change.name, label, _compare(reference, simulate(changed.scenario)), note)


def _preferred_alternative(change: ScenarioChange, baseline: Baseline) -> ChangedScenario:
    """The first changed scenario, or the first that fits; raise InapplicableChangeError where there is none."""
    for changed in change.apply(baseline):
        if not change.requires_fit or fits_in_memory(changed.scenario):
            return changed
    raise InapplicableChangeError("there is no such change here")


class _ModeledBaseline:
    """The result without measured collectives, simulated on first use; pending_seconds: what that would still cost."""

    def __init__(self, result: SimulationResult) -> None:
        self._scenario = without_measured_collectives(result.scenario)
        self._result = result if self._scenario is result.scenario else None
        self.pending_seconds: Seconds = 0.0 if self._result else result.wall_seconds

    def __call__(self) -> SimulationResult:
        if self._result is None:
            self._result, self.pending_seconds = simulate(self._scenario), 0.0
        return self._result


@dataclass(frozen=True, slots=True)
class _Simulations:
    """What is simulated already, and seconds of wall time that are left for more."""

    result: SimulationResult
    modeled_baseline: _ModeledBaseline
    remaining: Seconds

    def reference(self, change: ScenarioChange) -> SimulationResult:
        """What a change is compared with."""
        return self.modeled_baseline() if change.invalidates_measured_collectives else self.result

    def skip_reason(self, change: ScenarioChange, changed: Scenario) -> str:
        """Why a changed scenario is not simulated: illegal, or over the time budget; empty if it is simulated."""
        if violations := find_problems(changed):
            return violations[0]
        if math.isinf(self.remaining):
            return ""
        known_warnings = slow_simulation_warnings(self.result.scenario)
        new_warnings = [warning for warning in slow_simulation_warnings(changed) if warning not in known_warnings]
        if new_warnings:
            return f"left out, as it takes long: {new_warnings[0]}"
        expected_seconds = self._expected_seconds(change)
        return "" if expected_seconds <= self.remaining else _over_budget_note(expected_seconds, self.remaining)

    def _expected_seconds(self, change: ScenarioChange) -> Seconds:
        """Wall time of the simulation, with that of the modelled baseline where it is still missing."""
        pending = self.modeled_baseline.pending_seconds if change.invalidates_measured_collectives else 0.0
        return change.relative_cost * self.result.wall_seconds + pending


def _over_budget_note(expected_seconds: Seconds, remaining: Seconds) -> str:
    budget_note = f"{format_seconds(remaining)} is left" if remaining > 0.0 else "no time is left"
    return f"left out: simulating it takes some {format_seconds(expected_seconds)}, and {budget_note} for what-if"


def _compare(base: SimulationResult, changed: SimulationResult) -> WhatIfOutcome:
    """The changed scenario compared with its baseline."""
    before, after = (simulation_result.scenario.training for simulation_result in (base, changed))
    token_ratio = after.global_batch * after.sequence / (before.global_batch * before.sequence)
    base_seconds, changed_seconds = base.breakdown.mean_seconds(), changed.breakdown.mean_seconds()
    return WhatIfOutcome(
        step_time=changed.step_time,
        baseline_step_time=base.step_time,
        token_ratio=token_ratio,
        tokens_per_s_per_gpu=changed.tokens_per_second / changed.rank_count,
        peak_memory=changed.peak_memory,
        fits_in_memory=changed.fits_in_memory,
        category_changes={
            category: seconds / token_ratio - base_seconds[category] for category, seconds in changed_seconds.items()
        },
    )
