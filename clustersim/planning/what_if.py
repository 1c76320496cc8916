"""What would make the step shorter, and what would it be with one thing changed?

Every case is the scenario with a single change of the catalogue (`scenario.changes.catalogue`), simulated again;
nothing is extrapolated. First come remedies, changes of the scenario's own settings, ordered by what they can win:
the losses that they address. Those that can win less than a negligible share of the step are not tried. Then come
hypothetical changes: other links, kernels and GPUs, another batch. At last the best remedies are tried together.

How many are tried is limited by work, never by time, so that every machine tries the same: a simulation costs as many
units as the unchanged scenario's trace has events, and at least `_MIN_COST`.

A change of links is compared with the scenario without its measured collectives, if it has any: those were
measured on the unchanged links, so the changed ones are modeled, and the difference would mix measurement
and model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np

from clustersim.common.errors import InputError
from clustersim.common.units import format_bytes
from clustersim.parallel.mesh import PIPELINE
from clustersim.results.memory_check import peak_memory_use, required_headroom
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import KERNEL_CATEGORIES
from clustersim.results.time_losses import MIN_LOSS_SHARE, StepLosses, bubble_seconds
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport
from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import changes_for
from clustersim.scenario.changes.links import without_measured_collectives
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    InapplicableChangeError,
    ScenarioChange,
)
from clustersim.scenario.changes.step_losses import StepLoss
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.scenario.validation_rules.warnings import slow_simulation_warnings
from clustersim.simulation import simulate

WORK_BUDGET: Final = 400_000.0
"""Trace events of the remedies that are simulated, and again of the hypothetical changes: some ten seconds."""
_MIN_COST: Final = 10_000.0  # trace events that take about as long as the rest of a small simulation
_WAITING_LOSSES: Final = frozenset({StepLoss.BUBBLE, StepLoss.IMBALANCE, StepLoss.WAIT})
_MAX_COMBINED: Final = 3  # changes that are tried together
_ROUNDING: Final = 1e-9  # relative rounding error of sums of times
_MODELED_NOTE: Final = "collectives are modelled before and after, as measured ones hold for the links as they are"


def run_what_ifs(result: SimulationResult, budget: float = WORK_BUDGET) -> WhatIfReport:
    """Simulate remedies and hypothetical changes. budget: of trace events, for each of the two (inf: no limit)."""
    baseline = _baseline(result)
    simulations = _Simulations(result, _ModeledBaseline(result), budget)
    remedies = [case for _, case in sorted(_try_remedies(baseline, simulations), key=lambda entry: entry[0])]
    combined = _combine(remedies, simulations)
    hypothetical = _try_hypothetical_changes(baseline, replace(simulations, remaining=budget))
    return WhatIfReport(
        step_time=result.step_time,
        tokens_per_s_per_gpu=result.tokens_per_second / result.rank_count,
        fits_in_memory=result.fits_in_memory,
        fit_probability=result.fit_probability,
        cases=(*remedies, *hypothetical),
        combined=combined,
    )


def _baseline(result: SimulationResult) -> Baseline:
    bubbles = bubble_seconds(result.breakdown, result.scenario.layout.rank_coordinates(PIPELINE))
    work_seconds = tuple((result.step_time - bubbles).tolist())
    return Baseline(result.scenario, _busiest_rank(result), work_seconds)


def _busiest_rank(result: SimulationResult) -> int:
    """The first of the ranks with the most kernel time, excluding those that are slowed already."""
    breakdown = result.breakdown
    kernels = breakdown.seconds[:, [category.index for category in KERNEL_CATEGORIES]].sum(axis=1)
    speeds = result.scenario.degradations.gpu_speeds(result.scenario.cluster.machine_gpu_ids)
    owner = np.searchsorted(breakdown.ranks, breakdown.representative)
    healthy = np.where(speeds == speeds.max(), kernels[owner], -1.0)
    return int(np.argmax(healthy >= (1.0 - _ROUNDING) * healthy.max()))


def possible_gain(change: ScenarioChange, losses: StepLosses) -> float:
    """The share of a step that a change may win at most: of the losses that it addresses.

    Matmuls in another format have another peak, so all of their time counts. Ranks that work less are waited for
    less: where work gets shorter, waiting is taken to get shorter in proportion.
    """
    waiting = sum(losses.seconds[loss] for loss in _WAITING_LOSSES)
    work = sum(losses.seconds[loss] for loss in change.addresses - _WAITING_LOSSES)
    if change.subject is ChangeSubject.PRECISION:
        work += losses.ideal
    addressed_waiting = sum(losses.seconds[loss] for loss in change.addresses & _WAITING_LOSSES)
    work_share = work / (losses.step_time - waiting)
    return min(1.0, work_share + (1.0 - work_share) * addressed_waiting / losses.step_time)


def _try_remedies(baseline: Baseline, simulations: "_Simulations") -> Iterator[tuple[tuple[bool, int], WhatIf]]:
    """Remedies with the key of their order: simulated ones first, those that can win most before others."""
    losses = simulations.result.losses
    remedies = [change for change in changes_for(ChangeUse.REMEDY) if change.is_relevant(baseline.scenario)]
    gains = {change.name: possible_gain(change, losses) for change in remedies}
    by_gain = sorted(remedies, key=lambda change: -gains[change.name])  # stable: else in the catalogue's order
    for position, change in enumerate(by_gain):
        gain = gains[change.name]
        if gain < MIN_LOSS_SHARE:
            reason = f"not tried: it can win {gain:.1%} of the step at most"
            case = WhatIf(change.name, change.label, None, reason, change.addresses)
        else:
            case = _simulate_case(change, baseline, simulations)
        yield (case.outcome is None, position), case


def _try_hypothetical_changes(baseline: Baseline, simulations: "_Simulations") -> Iterator[WhatIf]:
    for change in changes_for(ChangeUse.WHAT_IF):
        if change.is_relevant(baseline.scenario):
            yield _simulate_case(change, baseline, simulations)


def _simulate_case(change: ScenarioChange, baseline: Baseline, simulations: "_Simulations") -> WhatIf:
    """One change: its outcome, or why it has none."""
    label = change.label
    try:
        changed = _preferred_alternative(change, baseline, simulations.result)
    except InapplicableChangeError as error:
        return WhatIf(change.name, label, None, str(error), change.addresses)
    label += changed.detail
    if reason := simulations.skip_reason(change, changed.scenario):
        return WhatIf(change.name, label, None, reason, change.addresses, changed.overrides)
    reference = simulations.reference(change)
    note = "" if reference is simulations.result else _MODELED_NOTE
    outcome = _compare(reference, simulate(changed.scenario))
    return WhatIf(
        change.name,
        label,
        outcome,
        note,
        change.addresses,
        changed.overrides,
        changes_numerics=change.subject is ChangeSubject.PRECISION,
    )


def _preferred_alternative(change: ScenarioChange, baseline: Baseline, result: SimulationResult) -> ChangedScenario:
    """The first changed scenario, or the first that fits, where the present one does.

    Raises InapplicableChangeError where there is none.
    """
    unsafe = False
    for changed in change.apply(baseline):
        if not change.requires_fit or _is_safe(changed.scenario, result):
            return changed
        unsafe = True
    left = format_bytes(result.memory_capacity - result.peak_memory)
    raise InapplicableChangeError(
        f"it does not leave the headroom that errors of predicted memory ask for; {left} are left now"
        if unsafe
        else "there is no such change here"
    )


def _is_safe(changed: Scenario, result: SimulationResult) -> bool:
    """Whether a changed scenario leaves the headroom that a search asks for, or needs no more memory than the present.

    Where the present one does not fit, any change may be tried.
    """
    use = peak_memory_use(changed)
    needs_no_more = use.fits and use.needed <= result.peak_memory * (1.0 + _ROUNDING)
    return not result.fits_in_memory or needs_no_more or use.leaves_headroom(required_headroom(changed, None))


def _combine(remedies: Sequence[WhatIf], simulations: "_Simulations") -> WhatIf | None:
    """The best set of improvements: the best two of them, then a third, as long as the step gets shorter and fits.

    Improvements that set the same keys exclude each other, and so do sets that are illegal or do not fit. Number
    formats are left as they are: whether a model converges in others is not for a simulator to say.
    """
    improvements = sorted(
        (case for case in remedies if case.is_improvement and not case.changes_numerics),
        key=lambda case: case.outcome.slowdown_ratio if case.outcome else 0.0,
    )
    best: WhatIf | None = None
    members: tuple[WhatIf, ...] = tuple(improvements[:1])
    for candidate in improvements[1:]:
        if len(members) == _MAX_COMBINED or not _are_compatible((*members, candidate)):
            continue
        case = _simulate_together((*members, candidate), simulations)
        previous = best or members[0]
        if case is not None and _is_shorter(case, previous):
            best, members = case, (*members, candidate)
    return best


def _are_compatible(cases: Sequence[WhatIf]) -> bool:
    """Whether no two of them set the same key, or one that contains the other's."""
    keys = [[override.partition("=")[0].split(".") for override in case.overrides] for case in cases]
    return not any(
        first[: len(second)] == second[: len(first)]
        for one, other in combinations(keys, 2)
        for first in one
        for second in other
    )


def _is_shorter(case: WhatIf, previous: WhatIf) -> bool:
    outcome, before = case.outcome, previous.outcome
    if outcome is None or before is None or not outcome.fits_in_memory:
        return False
    return outcome.slowdown_ratio < before.slowdown_ratio - MIN_LOSS_SHARE


def _simulate_together(cases: Sequence[WhatIf], simulations: "_Simulations") -> WhatIf | None:
    """Several changes applied together; None where that is illegal, does not fit, or exceeds the budget."""
    overrides = tuple(override for case in cases for override in case.overrides)
    try:
        changed = simulations.result.scenario.with_overrides(*overrides, suggest=False)
    except InputError:
        return None
    if not _is_safe(changed, simulations.result) or not simulations.spend(1.0):
        return None
    return WhatIf(
        "combined",
        "; ".join(case.description for case in cases),
        _compare(simulations.result, simulate(changed)),
        addresses=frozenset().union(*(case.addresses for case in cases)),
        overrides=overrides,
    )


class _ModeledBaseline:
    """The result without measured collectives, simulated on first use."""

    def __init__(self, result: SimulationResult) -> None:
        self._scenario = without_measured_collectives(result.scenario)
        self._result = result if self._scenario is result.scenario else None

    def __call__(self) -> SimulationResult:
        if self._result is None:
            self._result = simulate(self._scenario)
        return self._result


@dataclass(slots=True)
class _Simulations:
    """What is simulated already, and the trace events that are left for more."""

    result: SimulationResult
    modeled_baseline: _ModeledBaseline
    remaining: float

    def reference(self, change: ScenarioChange) -> SimulationResult:
        """What a change is compared with."""
        return self.modeled_baseline() if change.invalidates_measured_collectives else self.result

    def spend(self, relative_cost: float) -> bool:
        """Spend the budget on a simulation; False: it is spent. relative_cost: to that of the unchanged scenario."""
        cost = relative_cost * max(_MIN_COST, len(self.result.trace.start))
        if cost > self.remaining:
            return False
        self.remaining -= cost
        return True

    def skip_reason(self, change: ScenarioChange, changed: Scenario) -> str:
        """Why a changed scenario is not simulated: illegal, or over the budget; empty if it is simulated."""
        if violations := find_problems(changed):
            return violations[0]
        if self.remaining < np.inf:
            known_warnings = slow_simulation_warnings(self.result.scenario)
            new_warnings = [warning for warning in slow_simulation_warnings(changed) if warning not in known_warnings]
            if new_warnings:
                return f"not tried, as it takes long: {new_warnings[0]}"
        relative_cost = change.relative_cost(self.result.scenario)
        if self.spend(relative_cost):
            return ""
        return f"not tried: as costly as {relative_cost:,.0f} of the others, which exceeds the budget of simulations"


def _compare(base: SimulationResult, changed: SimulationResult) -> WhatIfOutcome:
    """The changed scenario compared with its baseline."""
    before, after = (simulation_result.scenario.training for simulation_result in (base, changed))
    token_ratio = after.global_batch * after.sequence / (before.global_batch * before.sequence)
    base_losses, changed_losses = base.losses, changed.losses
    return WhatIfOutcome(
        step_time=changed.step_time,
        baseline_step_time=base.step_time,
        token_ratio=token_ratio,
        tokens_per_s_per_gpu=changed.tokens_per_second / changed.rank_count,
        peak_memory=changed.peak_memory,
        fits_in_memory=changed.fits_in_memory,
        fit_probability=changed.fit_probability,
        ideal_change=changed_losses.ideal / token_ratio - base_losses.ideal,
        loss_changes={
            loss: seconds / token_ratio - base_losses.seconds[loss] for loss, seconds in changed_losses.seconds.items()
        },
    )
