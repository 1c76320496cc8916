"""What would the step be with one thing changed? The answers, to be filled in by who simulates (`planning`).

A step with more tokens takes longer and is not worse for it. So beside step times stands the time of equal work:
`longer`, the seconds by which the tokens of the present step take longer, and `faster`, the part by which a GPU's rate
rises.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from clustersim.common.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class WhatIfOutcome:
    """What one change comes to.

    step_time, base: seconds of a step with and without it; tokens: of a step with it, in multiples of those without;
    tokens_per_s_per_gpu: with it; peak_memory: bytes of the fullest GPU; fits: whether that is within its capacity;
    changes: by part of the breakdown the seconds by which the tokens of the step as it is take longer, the mean over
    ranks; they sum to `longer`.
    """

    step_time: Seconds
    baseline_step_time: Seconds
    token_ratio: float
    tokens_per_s_per_gpu: float
    peak_memory: Bytes
    fits_in_memory: bool
    category_changes: Mapping[str, Seconds]

    @property
    def step_time_difference(self) -> Seconds:
        """Seconds by which the step is longer."""
        return self.step_time - self.baseline_step_time

    @property
    def slowdown_seconds(self) -> Seconds:
        """Seconds by which the tokens of the step as it is take longer."""
        return self.step_time / self.token_ratio - self.baseline_step_time

    @property
    def slowdown_ratio(self) -> float:
        """`longer` as a part of the step."""
        return self.slowdown_seconds / self.baseline_step_time

    @property
    def speedup(self) -> float:
        """Part by which tokens/s per GPU rise."""
        return self.baseline_step_time * self.token_ratio / self.step_time - 1.0


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change.

    name: of the case; words: what is changed; outcome: None where it was not tried; note: why not, or what must be
    known of the outcome, if anything.
    """

    name: str
    description: str
    outcome: WhatIfOutcome | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class WhatIfReport:
    """Changes, each alone, in a fixed order. step_time: seconds; tokens_per_s_per_gpu, fits: as the scenario stands."""

    step_time: Seconds
    tokens_per_s_per_gpu: float
    fits_in_memory: bool
    cases: tuple[WhatIf, ...]

    @property
    def simulated(self) -> tuple[tuple[WhatIf, WhatIfOutcome], ...]:
        """Those that were simulated, with what came of them."""
        return tuple((case, case.outcome) for case in self.cases if case.outcome is not None)

    @property
    def skipped(self) -> tuple[WhatIf, ...]:
        """Those that were not."""
        return tuple(case for case in self.cases if case.outcome is None)
