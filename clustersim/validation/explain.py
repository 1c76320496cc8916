"""Is a measured step time reasonable, and which single cause would explain the gap?

A scenario is simulated unchanged, then with one change of the catalogue (`scenario.changes.catalogue`) at a time:
every continuous change at the strength at which the simulated step time equals the measured one, if there is
one, and every discrete change that makes a step longer, or shorter, as was measured. Causes are candidates, not a
diagnosis: a step time is one number, and several small causes combined, or a configuration that differs from the
file, would explain it as well.

The measured time, and its MFU, are judged by two prediction intervals: half of such steps lie within the 50 %
interval, and a step between it and the 90 % interval is possible, but not what is expected.

Causes and their order: `explain_causes`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.common.units import Seconds, format_flops, format_step_time
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import CATALOGUE, CONTINUOUS_CHANGES
from clustersim.scenario.changes.catalogue.misconfigurations import MAX_ROUTED_RANKS
from clustersim.scenario.changes.catalogue.strengths import MAX_JITTERED_RANKS
from clustersim.scenario.changes.scenario_change import ContinuousChange, ScenarioChange
from clustersim.simulation import simulate
from clustersim.validation.explain_causes import CandidateCause, find_causes
from clustersim.validation.explain_lower_bound import step_time_lower_bound
from clustersim.validation.explain_measurement import MeasuredMfu
from clustersim.validation.explain_root_finding import StepTimeGap

NO_GAP: Final = 1e-3  # fraction of the step time: below, there is no gap to explain
MAX_RATIO: Final = 1000.0  # measured over expected, or its inverse: beyond, the unit is wrong or it is not a step
CAVEAT: Final = (
    "Candidates, not a diagnosis: each is tried alone. Several small ones together, effects that are not modelled, or "
    "a run that is not configured as the file says, may explain the gap as well."
)


@dataclass(frozen=True, slots=True)
class GapExplanation:
    """Comparison of a measured step time with the expected one.

    result: simulation of the unchanged scenario; lower_bound: physical lower bound of the step time in seconds
    (see `explain_lower_bound`); causes: most plausible first, empty if there is no gap or the measurement is
    below the lower bound; conversion: how the measured time follows from an MFU, empty where a time was measured.
    """

    result: SimulationResult
    measured: Seconds
    lower_bound: Seconds
    causes: tuple[CandidateCause, ...]
    conversion: str = ""

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
            "conversion": self.conversion or None,
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


def explain_gap(
    scenario: Scenario,
    measured: Seconds | MeasuredMfu,
    *,
    continuous: Sequence[ContinuousChange] = CONTINUOUS_CHANGES,
    discrete: Sequence[ScenarioChange] = CATALOGUE,
    outside: bool = True,
) -> GapExplanation:
    """Compare a measured step time (or MFU) with the simulated one, and search the causes of the gap among changes.

    outside: whether time outside the step's work is a cause, too. Some 60 simulations with all causes, at most 16 per
    cause. Raises InputError if the two times differ too
    much to be comparable.
    """
    result = simulate(scenario)
    seconds, conversion = _convert(measured, result)
    _require_comparable(result.step_time, seconds)
    lower_bound = step_time_lower_bound(result)
    gap = StepTimeGap(result.step_time, seconds)
    if seconds < lower_bound or abs(seconds / result.step_time - 1.0) <= NO_GAP:
        return GapExplanation(result, seconds, lower_bound, (), conversion)
    causes = find_causes(result, gap, continuous=continuous, discrete=discrete, outside=outside)
    return GapExplanation(result, seconds, lower_bound, causes, conversion)


def _convert(measured: Seconds | MeasuredMfu, result: SimulationResult) -> tuple[Seconds, str]:
    """The measured step time, and how it follows from an MFU; empty where it is the time that was measured."""
    if isinstance(measured, MeasuredMfu):
        return measured.step_time(result), measured.conversion(result)
    return measured, ""


def _require_comparable(expected: Seconds, measured: Seconds) -> None:
    if not 0.0 < measured < math.inf:
        raise InputError(f"measured {measured!r} s is not a time that a step can take; it is above zero")
    if not 1.0 / MAX_RATIO <= measured / expected <= MAX_RATIO:
        raise InputError(
            f"measured {format_step_time(measured)} against an expected {format_step_time(expected)}: more than "
            f"{MAX_RATIO:,.0f} times apart; give the time of one step, or its MFU, and check its unit"
        )


def _format_difference(difference: float) -> str:
    if abs(difference) <= NO_GAP:
        return "as long as expected"
    return f"{abs(difference):.1%} {'longer' if difference >= 0 else 'shorter'}"
