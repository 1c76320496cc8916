"""Is a measured step time reasonable, and which single cause would explain the gap?

A scenario is simulated unchanged, then with one change of the catalogue (`scenario.changes.catalogue`) at a time:
every continuous change at the strength at which the simulated step time equals the measured one, if there is
one, and every discrete change that makes a step longer, or shorter, as was measured. Causes are candidates, not a
diagnosis: a step time is one number, and several small causes combined, or a configuration that differs from the
file, would explain it as well.

The measured time, and its MFU, are judged by two prediction intervals: half of such steps lie within the 50 %
interval, and a step between it and the 90 % interval is possible, but not what is expected.

Where a discrete change has several sizes, the one closest to the measured time counts. Time outside the step's work
(data loading, logging, a checkpoint) explains any longer step, so it is a cause up to half of the measured time.

Order: causes that explain the gap come first, the most plausible first: in steps of how often such a thing is found
(`Plausibility`) and of how large a continuous change is; then those that explain a fraction of it (or more than all
of it), in steps of the distance from the full gap, the most plausible first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.errors import InputError, format_value
from clustersim.common.units import Dimension, Seconds, format_flops, format_step_time, parse_quantity
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import CATALOGUE, CONTINUOUS_CHANGES
from clustersim.scenario.changes.catalogue.misconfigurations import MAX_ROUTED_RANKS
from clustersim.scenario.changes.catalogue.strengths import MAX_JITTERED_RANKS
from clustersim.scenario.changes.scenario_change import ChangeUse, ContinuousChange, Plausibility, ScenarioChange
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.simulation import simulate
from clustersim.validation.explain_lower_bound import step_time_lower_bound
from clustersim.validation.explain_root_finding import FittedStrength, StepTimeGap, find_strength

NO_GAP: Final = 1e-3  # fraction of the step time: below, there is no gap to explain
FULL_SHARE_TOLERANCE: Final = (
    0.1  # fraction of the gap that a cause with discrete effect may miss and still explain the gap
)
VISIBLE_SHARE: Final = 0.02  # fraction of the gap
MAX_IDLE_SHARE: Final = 0.5  # fraction of the measured time: what waits for longer is another job
_EFFORT_STEPS: Final = (1.25, 2.0, 4.0)  # ratios: beyond each, a continuous change is one step less plausible
_DISTANCE_STEPS: Final = (0.25, 0.5, 1.0)  # fractions of the gap: beyond each, a cause is one step farther
MAX_RATIO: Final = 1000.0  # measured over expected, or its inverse: beyond, the unit is wrong or it is not a step
CAVEAT: Final = (
    "Candidates, not a diagnosis: each is tried alone. Several small ones together, effects that are not modelled, or "
    "a run that is not configured as the file says, explain the gap as well."
)


@dataclass(frozen=True, slots=True)
class CandidateCause:
    """One change of the scenario that may explain the gap.

    description: what is changed; strength: of a continuous change, None: of a discrete one; step_time: simulated
    with the change; gap_share: fraction of the gap that it explains (1: all, above 1: overshoots, below 0: widens it);
    explains: whether gap_share is 1 within FULL_SHARE_TOLERANCE and the change fits in memory if the scenario
    does; effort: size of the change, as the absolute logarithm of a ratio; plausibility: how often it is found.
    """

    name: str
    description: str
    strength: float | None
    step_time: Seconds
    gap_share: float
    explains: bool
    effort: float
    plausibility: Plausibility = Plausibility.POSSIBLE

    @property
    def is_visible(self) -> bool:
        """Whether it closes a fraction of the gap worth mentioning."""
        return self.gap_share >= VISIBLE_SHARE

    @property
    def widens_gap(self) -> bool:
        """Whether it visibly widens the gap."""
        return self.gap_share <= -VISIBLE_SHARE

    @property
    def sentence(self) -> str:
        """The change and its effect, as a sentence."""
        share_text = f"{self.gap_share:.0%} of the gap" if self.is_visible else "no visible part of the gap"
        return f"{self.description}: a step of {format_step_time(self.step_time)}, {share_text}"

    def to_json(self) -> dict[str, Any]:
        """The cause as JSON data."""
        return {
            "name": self.name,
            "sentence": self.sentence,
            "strength": self.strength,
            "step_time_s": self.step_time,
            "share_of_gap": self.gap_share,
            "explains": self.explains,
        }


@dataclass(frozen=True, slots=True)
class GapExplanation:
    """Comparison of a measured step time with the expected one.

    result: simulation of the unchanged scenario; lower_bound: physical lower bound of the step time in seconds
    (see `explain_lower_bound`); causes: most plausible first, empty if there is no gap or the measurement is
    below the lower bound.
    """

    result: SimulationResult
    measured: Seconds
    lower_bound: Seconds
    causes: tuple[CandidateCause, ...]

    @property
    def expected(self) -> Seconds:
        """The simulated step time."""
        return self.result.step_time

    @property
    def relative_difference(self) -> float:
        """Relative difference, measured / expected - 1."""
        return self.measured / self.expected - 1.0

    @property
    def is_inside_interval(self) -> bool:
        """Whether the measurement lies in the prediction interval of the step time."""
        low, high = self.result.step_time_interval
        return low <= self.measured <= high

    @property
    def is_likely(self) -> bool:
        """Whether the measurement lies in the interval that contains half of such steps."""
        low, high = self.result.likely_step_time_interval
        return low <= self.measured <= high

    @property
    def is_below_lower_bound(self) -> bool:
        """Whether the measurement is faster than the accelerator's peak allows."""
        return self.measured < self.lower_bound

    @property
    def verdict(self) -> str:
        """The verdict as a sentence."""
        return (
            f"expected {format_step_time(self.expected)}, measured {format_step_time(self.measured)}: "
            f"{_format_difference(self.relative_difference)}, {self._assessment}"
        )

    @property
    def _assessment(self) -> str:
        if self.is_below_lower_bound:
            return "below the physical lower bound"
        if self.is_likely:
            return "as expected: inside the 50% prediction interval"
        if self.is_inside_interval:
            return "questionable: outside the 50% prediction interval, inside the 90% one"
        return "not to be expected: outside the 90% prediction interval"

    @property
    def interval_rows(self) -> tuple[tuple[str, str, str], ...]:
        """Interval, step times and MFU, each from low to high, of both prediction intervals."""
        intervals = {"50%": self.result.likely_step_time_interval, "90%": self.result.step_time_interval}
        return tuple(
            (
                f"{name} prediction interval",
                f"{format_step_time(low)} to {format_step_time(high)}",
                f"MFU {self.mfu_of(high):.1%} to {self.mfu_of(low):.1%}",
            )
            for name, (low, high) in intervals.items()
        )

    def mfu_of(self, step_time: Seconds) -> float:
        """The leading MFU (`LeadingMfu`) of a step of this time."""
        return self.result.leading_mfu.value * self.expected / step_time

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the causes."""
        if self.is_below_lower_bound:
            return (self._describe_impossible(),)
        if abs(self.relative_difference) <= NO_GAP:
            return ("There is no gap to explain.",)
        no_single_cause = () if any(cause.explains for cause in self.causes) else (self._no_single_cause_text(),)
        return (*no_single_cause, *self._skipped_jitter_notes(), *self._skipped_routing_notes(), CAVEAT)

    def _describe_impossible(self) -> str:
        peak = self.result.peak_flops
        required_peak = format_flops(peak * self.lower_bound / self.measured)
        return (
            f"The busiest rank's matmuls and attention take {format_step_time(self.lower_bound)} at the peak of "
            f"{format_flops(peak)}; {format_step_time(self.measured)} would need {required_peak}. No cause explains "
            "that: the "
            "run is likely another than the file says (fewer layers or tokens in a step, more GPUs, less recomputed, "
            "another number format), or what was timed is not a full step."
        )

    def _no_single_cause_text(self) -> str:
        direction = "longer" if self.relative_difference > 0 else "shorter"
        return f"No single cause within sensible limits makes the step as much {direction} as was measured."

    def _skipped_jitter_notes(self) -> Iterator[str]:
        """A note that jitter is not tried, if too many ranks would differ."""
        ranks = self.result.rank_count
        if self.relative_difference > 0 and ranks > MAX_JITTERED_RANKS:
            yield (
                f"Jitter of every kernel is not tried: {ranks:,} ranks that all differ take long to simulate "
                "(clustersim run with --set 'degradations.jitter=2 %')."
            )

    def _skipped_routing_notes(self) -> Iterator[str]:
        """A note that free choice of experts is not tried, if too many ranks would differ."""
        scenario = self.result.scenario
        is_balanced = scenario.layout.ep > 1 and not scenario.training.expert_load
        if self.relative_difference > 0 and is_balanced and scenario.layout.world_size > MAX_ROUTED_RANKS:
            yield (
                "Experts chosen freely are not tried: clustersim run says how much longer a step is with natural "
                "routing, and --set training.expert_load simulates it."
            )

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON data: seconds, fractions."""
        result = self.result
        return {
            "name": result.scenario.name,
            "expected_s": self.expected,
            "interval_s": list(result.step_time_interval),
            "likely_interval_s": list(result.likely_step_time_interval),
            "interval_basis": result.interval_description,
            "measured_s": self.measured,
            "difference": self.relative_difference,
            "inside_interval": self.is_inside_interval,
            "likely": self.is_likely,
            "lower_bound_s": self.lower_bound,
            "below_lower_bound": self.is_below_lower_bound,
            "mfu_attention": result.leading_mfu.attention_label,
            "mfu_expected": self.mfu_of(self.expected),
            "mfu_measured": self.mfu_of(self.measured),
            "mfu_interval": [self.mfu_of(seconds) for seconds in reversed(result.step_time_interval)],
            "mfu_likely_interval": [self.mfu_of(seconds) for seconds in reversed(result.likely_step_time_interval)],
            "verdict": self.verdict,
            "breakdown_s": result.breakdown.mean_seconds(),
            "causes": [cause.to_json() for cause in self.causes],
            "notes": list(self.notes),
            "warnings": list(result.scenario.warnings),
        }


def parse_step_time(text: str) -> Seconds:
    """Parse a step time such as `4.2 s` or `850ms`; raises InputError unless it is a time above zero."""
    hint = "write a number above zero and its unit, such as '4.2 s' or '850 ms'"
    try:
        seconds = parse_quantity(text, Dimension.TIME)
    except InputError:
        raise InputError(f"{format_value(text)} is not the time of a step; {hint}") from None
    if not 0.0 < seconds < math.inf:
        raise InputError(f"{format_value(text)} is not a time that a step can take; {hint}")
    return seconds


def explain_gap(
    scenario: Scenario,
    measured: Seconds,
    *,
    continuous: Sequence[ContinuousChange] = CONTINUOUS_CHANGES,
    discrete: Sequence[ScenarioChange] = CATALOGUE,
    outside: bool = True,
) -> GapExplanation:
    """Compare a measured step time with the simulated one, and search the causes of the gap among changes.

    outside: whether time outside the step's work is a cause, too. Some 60 simulations with all causes, at most 16 per
    cause. Raises InputError if the two times differ too
    much to be comparable.
    """
    result = simulate(scenario)
    _require_comparable(result.step_time, measured)
    lower_bound = step_time_lower_bound(result)
    gap = StepTimeGap(result.step_time, measured)
    if measured < lower_bound or abs(measured / result.step_time - 1.0) <= NO_GAP:
        return GapExplanation(result, measured, lower_bound, ())
    candidates = [*_discrete_causes(result, gap, discrete), *_continuous_causes(scenario, gap, continuous)]
    candidates += _idle_cause(gap) if outside else ()
    return GapExplanation(result, measured, lower_bound, tuple(sorted(candidates, key=_plausibility_key)))


def _require_comparable(expected: Seconds, measured: Seconds) -> None:
    if not 0.0 < measured < math.inf:
        raise InputError(f"measured {measured!r} s is not a time that a step can take; it is above zero")
    if not 1.0 / MAX_RATIO <= measured / expected <= MAX_RATIO:
        raise InputError(
            f"measured {format_step_time(measured)} against an expected {format_step_time(expected)}: more than "
            f"{MAX_RATIO:,.0f} times apart; give the time of one step, and check its unit"
        )


def _plausibility_key(cause: CandidateCause) -> tuple[bool, int, int, float]:
    """Sort key: causes that explain the gap by plausibility and effort, then the others by distance from it."""
    distance, prior = abs(cause.gap_share - 1.0), cause.plausibility.value
    if cause.explains:
        return False, prior + _steps_beyond(math.exp(cause.effort), _EFFORT_STEPS), 0, cause.effort
    return True, _steps_beyond(distance, _DISTANCE_STEPS), prior, distance


def _steps_beyond(value: float, limits: Sequence[float]) -> int:
    return sum(value > limit for limit in limits)


def _idle_cause(gap: StepTimeGap) -> Iterator[CandidateCause]:
    """Time in which all GPUs wait for something outside the step's work: it takes the whole gap."""
    idle = gap.measured - gap.expected
    if 0.0 < idle <= MAX_IDLE_SHARE * gap.measured:
        description = f"GPUs wait {format_step_time(idle)} of each step for data, logging, or a checkpoint"
        effort = math.log(gap.measured / gap.expected)
        yield CandidateCause("idle", description, idle, gap.measured, 1.0, explains=True, effort=effort)


def _discrete_causes(
    result: SimulationResult, gap: StepTimeGap, changes: Sequence[ScenarioChange]
) -> Iterator[CandidateCause]:
    """Every change in the direction of the gap that leaves the scenario legal; it has no strength and no effort."""
    for change in changes:
        if _use_of(gap) in change.uses:
            causes = list(_alternative_causes(change, result, gap))
            if causes:
                yield min(causes, key=lambda cause: abs(cause.gap_share - 1.0))


def _alternative_causes(change: ScenarioChange, result: SimulationResult, gap: StepTimeGap) -> Iterator[CandidateCause]:
    """A change at each of its sizes, up to the first that explains all of the gap; of a shorter step the first."""
    for changed in change.alternatives(result.scenario):
        if not find_problems(changed.scenario):
            cause = _discrete_cause(change, change.label + changed.detail, simulate(changed.scenario), result, gap)
            yield cause
            if cause.gap_share >= 1.0:
                return
        if not gap.is_slower:
            return


def _use_of(gap: StepTimeGap) -> ChangeUse:
    return ChangeUse.LONGER_STEP if gap.is_slower else ChangeUse.SHORTER_STEP


def _discrete_cause(
    change: ScenarioChange, label: str, changed_result: SimulationResult, result: SimulationResult, gap: StepTimeGap
) -> CandidateCause:
    fits_in_memory, gap_share = (
        changed_result.fits_in_memory or not result.fits_in_memory,
        gap.explained_share(changed_result.step_time),
    )
    return CandidateCause(
        change.name,
        label + ("" if fits_in_memory else ", but would not fit in memory"),
        None,
        changed_result.step_time,
        gap_share,
        fits_in_memory and abs(gap_share - 1.0) <= FULL_SHARE_TOLERANCE,
        0.0,
        change.plausibility,
    )


def _continuous_causes(
    scenario: Scenario, gap: StepTimeGap, changes: Sequence[ContinuousChange]
) -> Iterator[CandidateCause]:
    """Every continuous change, at the strength that explains the gap, or at its limit."""
    for change in changes:
        strength_range = change.strength_range(scenario, _use_of(gap))
        if strength_range is not None:
            step_time = _StepTimeByStrength(scenario, change)
            fitted = find_strength(step_time, gap, neutral=strength_range.neutral, limit=strength_range.limit)
            yield _continuous_cause(change, fitted, gap, change.effort(strength_range, fitted.strength))


@dataclass(frozen=True, slots=True)
class _StepTimeByStrength:
    """Simulated step time of a scenario as a function of the strength of a change."""

    scenario: Scenario
    change: ContinuousChange

    def __call__(self, strength: float) -> Seconds:
        """Simulate."""
        return simulate(self.change.apply(self.scenario, strength)).step_time


def _continuous_cause(
    change: ContinuousChange, fitted: FittedStrength, gap: StepTimeGap, effort: float
) -> CandidateCause:
    gap_share = gap.explained_share(fitted.step_time)
    has_checks = bool(change.checks) and gap.is_slower and gap_share >= VISIBLE_SHARE
    label = change.describe(fitted.strength) + (f" ({change.checks})" if has_checks else "")
    description = label if fitted.explains_gap else f"even with {label}"
    explains = fitted.explains_gap and abs(gap_share - 1.0) <= FULL_SHARE_TOLERANCE
    return CandidateCause(
        change.name, description, fitted.strength, fitted.step_time, gap_share, explains, effort, change.plausibility
    )


def _format_difference(difference: float) -> str:
    if abs(difference) <= NO_GAP:
        return "as long as expected"
    return f"{abs(difference):.1%} {'longer' if difference >= 0 else 'shorter'}"
