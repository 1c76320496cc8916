"""Is a measured step time reasonable, and which single cause would explain the gap?

A scenario is simulated as it stands, then again with one thing changed at a time: with every cause of the shelf
(`explain_continuous`) at the strength at which the step takes what was measured, if there is one, and with every habit of a
framework (`explain_switches`) put the other way. Causes are candidates, not a diagnosis: a step time is one number, and
several small causes together, or another configuration than the file says, explain it as well.

Order: what explains the gap comes first, what needs the smallest change before what needs a larger one; then what
explains a part of it (or more than all of it), the closest first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.errors import InputError, format_value
from clustersim.common.units import Dimension, Seconds, format_flops, format_step_time, parse_quantity
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.validation.explain_continuous import CONTINUOUS, MOST_JITTERED, Continuous
from clustersim.validation.explain_lower_bound import floor_of
from clustersim.validation.explain_root_finding import Found, Gap, find_strength
from clustersim.validation.explain_switches import SWITCHES, Switch

NO_GAP: Final = 1e-3  # of the step: below, there is nothing to explain
ALL: Final = 0.1  # part of the gap by which a switch (or a step time that jumps) may miss it and still explain it
VISIBLE: Final = 0.02  # part of the gap
MOST_TIMES: Final = 1000.0  # as long as expected, or as short: another unit, or not a step at all
HONESTY: Final = (
    "Candidates, not a diagnosis: each is tried alone. Several small ones together, effects that are not modelled, or "
    "a run that is not configured as the file says, explain the gap as well."
)


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing changed.

    what: it is; strength: of a cause that has one, else None (a switch); step_time: simulated with it; share: part of
    the gap that it explains (1: all, above: more, below 0: the wrong way); explains: whether that is all, within ALL,
    in the scenario's memory; effort: how large a change it is, as a logarithm of a ratio.
    """

    name: str
    what: str
    strength: float | None
    step_time: Seconds
    share: float
    explains: bool
    effort: float

    @property
    def visible(self) -> bool:
        """Whether it changes anything worth mentioning, towards what was measured."""
        return self.share >= VISIBLE

    @property
    def opposite(self) -> bool:
        """Whether it visibly widens the gap."""
        return self.share <= -VISIBLE

    @property
    def sentence(self) -> str:
        """What it is, and what it comes to."""
        part = f"{self.share:.0%} of the gap" if self.visible else "no visible part of the gap"
        return f"{self.what}: a step of {format_step_time(self.step_time)}, {part}"

    def to_json(self) -> dict[str, Any]:
        """The cause as plain data."""
        return {
            "name": self.name,
            "sentence": self.sentence,
            "strength": self.strength,
            "step_time_s": self.step_time,
            "share_of_gap": self.share,
            "explains": self.explains,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """A measured step time beside what is expected.

    result: the scenario as it stands; floor: seconds below which no step can be, see `explain_lower_bound`; causes: most
    plausible first, none where there is no gap or the floor is above what was measured.
    """

    result: SimulationResult
    measured: Seconds
    floor: Seconds
    causes: tuple[Cause, ...]

    @property
    def expected(self) -> Seconds:
        """The simulated step time."""
        return self.result.step_time

    @property
    def difference(self) -> float:
        """Measured over expected, minus 1."""
        return self.measured / self.expected - 1.0

    @property
    def inside_band(self) -> bool:
        """Whether what was measured lies where the scenario's step time is expected."""
        low, high = self.result.step_time_interval
        return low <= self.measured <= high

    @property
    def below_floor(self) -> bool:
        """Whether no accelerator of this kind could be that fast."""
        return self.measured < self.floor

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        low, high = map(format_step_time, self.result.step_time_interval)
        where = "inside the band, so reasonable" if self.inside_band else "outside the band"
        if self.below_floor:
            where = "below what is physically possible"
        return (
            f"expected {format_step_time(self.expected)} ({low} to {high}), measured "
            f"{format_step_time(self.measured)}: {_difference(self.difference)}, {where}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of the causes."""
        if self.below_floor:
            return (self._impossible(),)
        if abs(self.difference) <= NO_GAP:
            return ("There is no gap to explain.",)
        alone = () if any(cause.explains for cause in self.causes) else (self._nothing_alone(),)
        return (*alone, *self._untried(), HONESTY)

    def _impossible(self) -> str:
        peak = self.result.peak_flops
        needed = format_flops(peak * self.floor / self.measured)
        return (
            f"The busiest rank's matmuls and attention take {format_step_time(self.floor)} at the peak of "
            f"{format_flops(peak)}; {format_step_time(self.measured)} would need {needed}. No cause explains that: the "
            "run is likely another than the file says (fewer layers or tokens in a step, more GPUs, less recomputed, "
            "another number format), or what was timed is not a whole step."
        )

    def _nothing_alone(self) -> str:
        sign = "longer" if self.difference > 0 else "shorter"
        return f"No single cause within sensible limits makes the step as much {sign} as was measured."

    def _untried(self) -> Iterator[str]:
        """Jitter, where too many ranks would differ."""
        ranks = self.result.rank_count
        if self.difference > 0 and ranks > MOST_JITTERED:
            yield (
                f"Jitter of every kernel is not tried: {ranks:,} ranks that all differ take long to simulate "
                "(clustersim run with --set 'disturbances.jitter=2 %')."
            )

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data: seconds, fractions."""
        result = self.result
        return {
            "name": result.scenario.name,
            "expected_s": self.expected,
            "band_s": list(result.step_time_interval),
            "experience": result.interval_description,
            "measured_s": self.measured,
            "difference": self.difference,
            "inside_band": self.inside_band,
            "floor_s": self.floor,
            "below_floor": self.below_floor,
            "mfu_expected": result.mfu(),
            "mfu_measured": result.mfu() * self.expected / self.measured,
            "verdict": self.verdict,
            "breakdown_s": result.breakdown.mean(),
            "causes": [cause.to_json() for cause in self.causes],
            "notes": list(self.notes),
        }


def measured_time(text: str) -> Seconds:
    """Read a step time such as `4.2 s` or `850ms`; raise InputError for what is no time above zero."""
    wanted = "write a number above zero and its unit, such as '4.2 s' or '850 ms'"
    try:
        seconds = parse_quantity(text, Dimension.TIME)
    except InputError:
        raise InputError(f"{format_value(text)} is not the time of a step; {wanted}") from None
    if not 0.0 < seconds < math.inf:
        raise InputError(f"{format_value(text)} is not a time that a step can take; {wanted}")
    return seconds


def explain(
    scenario: Scenario,
    measured: Seconds,
    *,
    causes: Sequence[Continuous] = CONTINUOUS,
    switches: Sequence[Switch] = SWITCHES,
) -> Explanation:
    """Compare a measured step time with the simulated one, and look for causes of the gap among those given.

    Some 50 simulations of the scenario with all of them, at most 16 for each cause. Raise InputError where the two
    times are so far apart that they cannot be meant.
    """
    result = simulate(scenario)
    _require_comparable(result.step_time, measured)
    floor = floor_of(result)
    gap = Gap(result.step_time, measured)
    if measured < floor or abs(measured / result.step_time - 1.0) <= NO_GAP:
        return Explanation(result, measured, floor, ())
    found = [*_switched(result, gap, switches), *_strengths(scenario, gap, causes)]
    return Explanation(result, measured, floor, tuple(sorted(found, key=_plausibility)))


def _require_comparable(expected: Seconds, measured: Seconds) -> None:
    if not 0.0 < measured < math.inf:
        raise InputError(f"measured {measured!r} s is not a time that a step can take; it is above zero")
    if not 1.0 / MOST_TIMES <= measured / expected <= MOST_TIMES:
        raise InputError(
            f"measured {format_step_time(measured)} against an expected {format_step_time(expected)}: more than "
            f"{MOST_TIMES:,.0f} times apart; give the time of one step, and check its unit"
        )


def _plausibility(cause: Cause) -> tuple[bool, float]:
    """Sorts: what explains the gap by its effort, the rest by how far it is from doing so."""
    return not cause.explains, cause.effort if cause.explains else abs(cause.share - 1.0)


def _switched(result: SimulationResult, gap: Gap, switches: Sequence[Switch]) -> Iterator[Cause]:
    """Every switch that can be put the other way; they need no strength, so no effort."""
    for switch in switches:
        scenario = switch.flipped(result.scenario, longer=gap.longer)
        if scenario is not None:
            yield _switch_cause(switch, simulate(scenario), result, gap)


def _switch_cause(switch: Switch, changed: SimulationResult, result: SimulationResult, gap: Gap) -> Cause:
    fits, share = changed.fits_in_memory or not result.fits_in_memory, gap.share(changed.step_time)
    what = switch.words(longer=gap.longer) + ("" if fits else ", but would not fit in memory")
    return Cause(switch.name, what, None, changed.step_time, share, fits and abs(share - 1.0) <= ALL, 0.0)


def _strengths(scenario: Scenario, gap: Gap, causes: Sequence[Continuous]) -> Iterator[Cause]:
    """Every cause that has a strength, at the one that explains the gap, or at its limit."""
    for cause in causes:
        reach = cause.reach(scenario, longer=gap.longer)
        if reach is not None:
            step_times = _StepTimes(scenario, cause)
            found = find_strength(step_times, gap, none=reach.none, limit=reach.limit)
            yield _found_cause(cause, found, gap, cause.effort(reach, found.strength))


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """Step times of a scenario by the strength of a cause."""

    scenario: Scenario
    cause: Continuous

    def __call__(self, strength: float) -> Seconds:
        """Simulate."""
        return simulate(self.cause.apply(self.scenario, strength)).step_time


def _found_cause(cause: Continuous, found: Found, gap: Gap, effort: float) -> Cause:
    words = cause.words(found.strength)
    what, share = words if found.reached else f"even with {words}", gap.share(found.step_time)
    explains = found.reached and abs(share - 1.0) <= ALL
    return Cause(cause.name, what, found.strength, found.step_time, share, explains, effort)


def _difference(difference: float) -> str:
    if abs(difference) <= NO_GAP:
        return "as long as expected"
    return f"{abs(difference):.1%} {'longer' if difference >= 0 else 'shorter'}"
