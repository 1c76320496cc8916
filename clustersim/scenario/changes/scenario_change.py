"""What is a change of a scenario? One thing that may be different, under a name, for some questions.

A discrete change (`ScenarioChange`) gives the changed scenario, or several alternatives of increasing effect. A
continuous one (`ContinuousChange`) has a strength, a number whose neutral value changes nothing. The catalogue
lists all of them; a question selects its own by `ChangeUse`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, Flag, auto

from clustersim.common.errors import ClusterSimError
from clustersim.common.units import Seconds
from clustersim.scenario.changes.step_losses import StepLoss
from clustersim.scenario.scenario import Scenario


class ChangeUse(Flag):
    """The questions that a change helps to answer.

    REMEDY: what of its own settings would make a step shorter? WHAT_IF: what would it be if something else were
    different (links, GPUs, the batch)? SENSITIVITY: does the best layout stay the best? LONGER_STEP,
    SHORTER_STEP: why is a measured step longer, or shorter, than the simulated one? GOODPUT: when would a run of
    weeks be done? MEMORY: what would make the scenario fit?
    """

    REMEDY = auto()
    WHAT_IF = auto()
    SENSITIVITY = auto()
    LONGER_STEP = auto()
    SHORTER_STEP = auto()
    GOODPUT = auto()
    MEMORY = auto()


class ChangeSubject(Enum):
    """What a change changes."""

    LINKS = "bandwidth of links"
    KERNELS = "speed of kernels"
    GPUS = "speed of some GPUs"
    HOST = "launches by the host"
    LAYOUT = "layout, and how its ranks communicate"
    SCHEDULE = "pipeline schedule"
    EXPERT_LOAD = "tokens of each expert"
    BATCH = "batch and microbatch"
    RECOMPUTE = "recomputation"
    PRECISION = "number formats"
    OFFLOAD = "what is on the host"
    FRAMEWORK = "kernels and overheads of the framework"
    RELIABILITY = "failures, restarts and checkpoints"


class Plausibility(Enum):
    """How often a change is what a slow step turns out to be, in steps: 0 is what reports name most.

    A judgement, from what reports of slow steps name in the end (NCCL's and PyTorch's issues); no measurement.
    """

    COMMON = 0
    POSSIBLE = 1
    UNUSUAL = 2


class InapplicableChangeError(ClusterSimError):
    """A change does not apply to a scenario; its text says why."""


class UnaffectedScenarioError(InapplicableChangeError):
    """A scenario lacks what would be changed, so it would run as it does."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A scenario to be changed, and what is known of its step, where that was simulated.

    busiest_rank: the first healthy rank with the most kernel time; work_seconds: time of each pipeline rank outside
    of the pipeline's bubbles; None: not simulated.
    """

    scenario: Scenario
    busiest_rank: int | None = None
    work_seconds: tuple[Seconds, ...] | None = None


@dataclass(frozen=True, slots=True)
class ChangedScenario:
    """A changed scenario.

    detail: what the label of the change leaves open, appended to it; overrides: settings that make the change, as for
    `--set`; empty: it cannot be made by settings; effort: beyond what is often found, as the logarithm of a ratio.
    """

    scenario: Scenario
    detail: str = ""
    overrides: tuple[str, ...] = ()
    effort: float = 0.0


ApplyChange = Callable[[Baseline], Iterator[ChangedScenario]]
"""Yields changed scenarios in order of increasing effect; where there is none (left), it ends, or raises
InapplicableChangeError with the reason."""


def apply_setter(setter: Callable[[Scenario], Scenario]) -> ApplyChange:
    """Apply a function that every scenario allows."""
    return lambda baseline: iter((ChangedScenario(setter(baseline.scenario)),))


@dataclass(frozen=True, slots=True)
class ScenarioChange:
    """One thing that may be different.

    name: unique within a use; label: what is changed, for users; requires_fit: the first alternative that leaves enough
    memory counts; relative_cost: of its simulation, relative to that of the unchanged scenario; is_relevant: whether a
    scenario has what is changed, so that the change is worth mentioning; addresses: losses of a step that it may
    reduce; plausibility: as the cause of a longer step; is_graded: its alternatives are sizes of what may have any size
    between them.
    """

    name: str
    label: str
    subject: ChangeSubject
    uses: ChangeUse
    apply: ApplyChange
    requires_fit: bool = False
    relative_cost: Callable[[Scenario], float] = lambda _: 1.0
    is_relevant: Callable[[Scenario], bool] = lambda _: True
    addresses: frozenset[StepLoss] = frozenset()
    plausibility: Plausibility = Plausibility.POSSIBLE
    is_graded: bool = False

    def alternatives(self, scenario: Scenario) -> Iterator[ChangedScenario]:
        """The changed scenarios, in order of increasing effect; none where the change does not apply."""
        if not self.is_relevant(scenario):
            return
        with suppress(InapplicableChangeError):
            yield from self.apply(Baseline(scenario))

    @property
    def invalidates_measured_collectives(self) -> bool:
        """Whether collectives measured before the change are not those after it."""
        return self.subject in (ChangeSubject.LINKS, ChangeSubject.LAYOUT)


@dataclass(frozen=True, slots=True)
class StrengthRange:
    """Range of a strength. neutral: the strength that changes nothing; limit: the largest plausible change."""

    neutral: float
    limit: float


@dataclass(frozen=True, slots=True)
class ContinuousChange:
    """One thing that may be different to a degree.

    strength_range: of a scenario, for a longer step (ChangeUse.LONGER_STEP) or a shorter one, None where it cannot
    be a cause; apply: the scenario at a strength; describe: the change at a strength, as the start of a sentence;
    magnitude: what a strength stands for, as a number above zero; plausibility: as the cause of a longer step; checks:
    what to look at, "" where the description says it.
    """

    name: str
    subject: ChangeSubject
    strength_range: Callable[[Scenario, ChangeUse], StrengthRange | None]
    apply: Callable[[Scenario, float], Scenario]
    describe: Callable[[float], str]
    magnitude: Callable[[float], float] = float
    plausibility: Plausibility = Plausibility.POSSIBLE
    checks: str = ""

    def effort(self, strength_range: StrengthRange, strength: float) -> float:
        """Size of the change: the absolute logarithm of the ratio of magnitudes after / before."""
        return abs(math.log(self.magnitude(strength) / self.magnitude(strength_range.neutral)))
