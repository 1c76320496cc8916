"""What would the step be with one thing changed?

Every case is the scenario with a single change, simulated again; nothing is extrapolated. A case costs
about as much as the scenario itself, so cases that would exceed the total time budget are skipped, with a
note.

A change of links is compared with the scenario without its measured collectives, if it has any: those were
measured on the unchanged links, so the changed ones are modeled, and the difference would mix measurement
and model.
"""

import math
from collections.abc import Iterator
from time import perf_counter
from typing import Final

from clustersim.common.units import Seconds, format_seconds
from clustersim.planning.what_if_cases import WHAT_IF_CASES, SkippedChange
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport
from clustersim.scenario import Scenario
from clustersim.scenario.changes.links import without_measured_collectives
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.scenario.validation_rules.warnings import slow_simulation_warnings
from clustersim.simulation import simulate

TIME_BUDGET: Final[Seconds] = 10.0
_MODELED_NOTE: Final = "collectives are modelled before and after, as measured ones hold for the links as they are"


def run_what_ifs(result: SimulationResult, budget: Seconds = TIME_BUDGET) -> WhatIfReport:
    """Simulate every applicable case within `budget` seconds of wall time in total (inf: no limit)."""
    rate = result.tokens_per_second / result.rank_count
    return WhatIfReport(result.step_time, rate, result.fits_in_memory, tuple(_simulate_cases(result, budget)))


def _simulate_cases(result: SimulationResult, budget: Seconds) -> Iterator[WhatIf]:
    """The results case by case, within the time budget."""
    started = perf_counter()
    baseline_without_measurements = _ModeledBaseline(result)
    for case in (what_if_case for what_if_case in WHAT_IF_CASES if what_if_case.is_applicable(result.scenario)):
        changed = case.change(result)
        if isinstance(changed, SkippedChange):
            yield WhatIf(case.name, case.label, None, changed.reason)
            continue
        label = case.label + changed.label_suffix
        remaining = budget - (perf_counter() - started)
        expected_seconds = case.relative_cost * result.wall_seconds + (
            baseline_without_measurements.pending_seconds if case.models_collectives else 0.0
        )
        if reason := _skip_reason(result.scenario, changed.scenario, expected_seconds, remaining):
            yield WhatIf(case.name, label, None, reason)
            continue
        reference = baseline_without_measurements() if case.models_collectives else result
        note = "" if reference is result else _MODELED_NOTE
        yield WhatIf(case.name, label, _compare(reference, simulate(changed.scenario)), note)


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


def _skip_reason(scenario: Scenario, changed: Scenario, expected_seconds: Seconds, remaining: Seconds) -> str:
    """Why a changed scenario is not simulated: illegal, or over the time budget; empty if it is simulated."""
    violations = find_problems(changed)
    if violations:
        return violations[0]
    if math.isinf(remaining):
        return ""
    new_warnings = [
        warning for warning in slow_simulation_warnings(changed) if warning not in slow_simulation_warnings(scenario)
    ]
    if new_warnings:
        return f"left out, as it takes long: {new_warnings[0]}"
    return "" if expected_seconds <= remaining else _over_budget_note(expected_seconds, remaining)


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
