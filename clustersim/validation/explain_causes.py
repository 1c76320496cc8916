"""Which candidate causes explain the gap between a measured and a simulated step, and which is the most plausible?

Continuous changes are tried at the strength at which the simulated step time equals the measured one, discrete ones at
the size that comes closest. A discrete cause explains a gap that it closes to a tenth, or whose measured time is as
expected of the changed scenario: at least half of the gap is closed, at most twice, and the measured time lies in the
50 % interval of its prediction. So does one of links or loads whose sizes are some of a range, where the gap is between
two of them.

Order: by a score, lower first. Its parts are steps: how often such a thing is found (`Plausibility`), how large a
continuous change is, and how far a cause is from the whole gap. So one that is often found and closes most of the gap
comes before a rare one that could be of any size. Within a score, causes that explain the gap come first, then the
nearest, then the smallest change.

Time outside the step's work (data loading, logging, a checkpoint) explains any longer step. Public reports found GPUs
that waited for data for 70 % of a step (AnswerDotAI/ModernBERT, issue 236) and for 95 % (klauscc/VindLU, issue 10).
Where a step needs nearly all memory, PyTorch's allocator may free and allocate again in every step (pytorch/pytorch,
issue 104509: 7.3 s in place of 5.0 s).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from clustersim.common.units import Seconds, format_step_time
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.scenario.changes.scenario_change import (
    ChangedScenario,
    ChangeUse,
    ContinuousChange,
    Plausibility,
    ScenarioChange,
)
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.simulation import simulate
from clustersim.validation.explain_root_finding import FittedStrength, StepTimeGap, find_strength

FULL_SHARE_TOLERANCE: Final = (
    0.1  # fraction of the gap that a cause with discrete effect may miss and still explain the gap
)
_EXPECTED_SHARES: Final = (0.5, 2.0)  # fractions of the gap: outside, a change is another than what was found
VISIBLE_SHARE: Final = 0.02  # fraction of the gap
MAX_IDLE_SHARE: Final = 0.95  # fraction of the measured time: what waits for longer is another job
FULL_MEMORY: Final = 0.9  # fraction of a GPU's memory: from here on the allocator runs out of cached blocks
_EFFORT_STEPS: Final = (1.25, 2.0, 4.0)  # ratios: beyond each, a continuous change is one step less plausible
_DISTANCE_STEPS: Final = (0.25, 0.5, 0.625, 0.75, 0.875, 1.0)  # of the gap: beyond each, a cause is one step farther


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


def find_causes(
    result: SimulationResult,
    gap: StepTimeGap,
    *,
    continuous: Sequence[ContinuousChange],
    discrete: Sequence[ScenarioChange],
    outside: bool,
) -> tuple[CandidateCause, ...]:
    """All candidate causes, the most plausible first. outside: also time outside the step's work."""
    candidates = [
        *(_allocator_cause(result, gap) if outside else ()),
        *_discrete_causes(result, gap, discrete),
        *_continuous_causes(result.scenario, gap, continuous),
        *(_idle_cause(gap) if outside else ()),
    ]
    return tuple(sorted(candidates, key=_plausibility_key))


def _plausibility_key(cause: CandidateCause) -> tuple[int, bool, float, float]:
    """Sort key: the score, then whether a cause explains the gap, its distance, its effort."""
    distance = 0.0 if cause.explains else abs(cause.gap_share - 1.0)
    effort = _steps_beyond(math.exp(cause.effort), _EFFORT_STEPS)
    score = cause.plausibility.value + effort + _steps_beyond(distance, _DISTANCE_STEPS)
    return score, not cause.explains, distance, cause.effort


def _steps_beyond(value: float, limits: Sequence[float]) -> int:
    return sum(value > limit for limit in limits)


def _idle_cause(gap: StepTimeGap) -> Iterator[CandidateCause]:
    """Time in which all GPUs wait for something outside the step's work: it takes the whole gap."""
    idle = gap.measured - gap.expected
    if 0.0 < idle <= MAX_IDLE_SHARE * gap.measured:
        description = f"GPUs wait {format_step_time(idle)} of each step for data, logging, or a checkpoint"
        effort = math.log(gap.measured / gap.expected)
        yield CandidateCause("idle", description, idle, gap.measured, 1.0, explains=True, effort=effort)


def _allocator_cause(result: SimulationResult, gap: StepTimeGap) -> Iterator[CandidateCause]:
    """Blocks that are freed and allocated in every step, where hardly any memory is left."""
    needed = result.peak_memory / result.memory_capacity
    added = gap.measured - gap.expected
    if 0.0 < added <= MAX_IDLE_SHARE * gap.measured and needed >= FULL_MEMORY:
        description = (
            f"the allocator frees and allocates memory for {format_step_time(added)} of each step (cudaMalloc "
            f"retries), of which a GPU needs {needed:.0%}"
        )
        yield CandidateCause(
            "allocator",
            description,
            added,
            gap.measured,
            1.0,
            explains=True,
            effort=0.0,
            plausibility=Plausibility.COMMON,
        )


def _discrete_causes(
    result: SimulationResult, gap: StepTimeGap, changes: Sequence[ScenarioChange]
) -> Iterator[CandidateCause]:
    """Every change in the direction of the gap that leaves the scenario legal; it has no strength and no effort."""
    for change in changes:
        if _use_of(gap) in change.uses:
            causes = list(_alternative_causes(change, result, gap))
            if causes:
                nearest = min(causes, key=lambda cause: abs(cause.gap_share - 1.0))
                is_between = change.is_graded and _is_between(causes)
                yield replace(nearest, explains=True) if is_between else nearest


def _is_between(causes: Sequence[CandidateCause]) -> bool:
    """Whether a smaller size explains less than the gap, and the next one more."""
    return len(causes) > 1 and VISIBLE_SHARE <= causes[-2].gap_share < 1.0 <= causes[-1].gap_share


def _alternative_causes(change: ScenarioChange, result: SimulationResult, gap: StepTimeGap) -> Iterator[CandidateCause]:
    """A change at each of its sizes, up to the first that explains all of the gap; of a shorter step the first."""
    for changed in change.alternatives(result.scenario):
        if not find_problems(changed.scenario):
            cause = _discrete_cause(change, changed, simulate(changed.scenario), result, gap)
            yield cause
            if cause.gap_share >= 1.0:
                return
        if not gap.is_slower:
            return


def _use_of(gap: StepTimeGap) -> ChangeUse:
    return ChangeUse.LONGER_STEP if gap.is_slower else ChangeUse.SHORTER_STEP


def _discrete_cause(
    change: ScenarioChange,
    changed: ChangedScenario,
    changed_result: SimulationResult,
    result: SimulationResult,
    gap: StepTimeGap,
) -> CandidateCause:
    fits_in_memory = changed_result.fits_in_memory or not result.fits_in_memory
    gap_share = gap.explained_share(changed_result.step_time)
    return CandidateCause(
        change.name,
        change.label + changed.detail + ("" if fits_in_memory else ", but would not fit in memory"),
        None,
        changed_result.step_time,
        gap_share,
        fits_in_memory and _explains(gap, gap_share, changed_result),
        changed.effort,
        change.plausibility,
    )


def _explains(gap: StepTimeGap, gap_share: float, changed_result: SimulationResult) -> bool:
    """Whether a discrete change explains the measured time."""
    low, high = changed_result.likely_step_time_interval
    least, most = _EXPECTED_SHARES
    return abs(gap_share - 1.0) <= FULL_SHARE_TOLERANCE or (least <= gap_share <= most and low <= gap.measured <= high)


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
