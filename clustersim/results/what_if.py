"""What would the step be with one thing changed? The answers, to be filled in by who simulates (`planning`).

A step with more tokens takes longer and is not worse for it. So beside step times stands the time of equal work:
`longer`, the seconds by which the tokens of the present step take longer, and `faster`, the part by which a GPU's rate
rises.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from clustersim.common.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one change comes to.

    step_time, base: seconds of a step with and without it; tokens: of a step with it, in multiples of those without;
    tokens_per_s_per_gpu: with it; peak_memory: bytes of the fullest GPU; fits: whether that is within its capacity;
    changes: by part of the breakdown the seconds by which the tokens of the step as it is take longer, the mean over
    ranks; they sum to `longer`.
    """

    step_time: Seconds
    base: Seconds
    tokens: float
    tokens_per_s_per_gpu: float
    peak_memory: Bytes
    fits: bool
    changes: Mapping[str, Seconds]

    @property
    def delta(self) -> Seconds:
        """Seconds by which the step is longer."""
        return self.step_time - self.base

    @property
    def longer(self) -> Seconds:
        """Seconds by which the tokens of the step as it is take longer."""
        return self.step_time / self.tokens - self.base

    @property
    def part(self) -> float:
        """`longer` as a part of the step."""
        return self.longer / self.base

    @property
    def faster(self) -> float:
        """Part by which tokens/s per GPU rise."""
        return self.base * self.tokens / self.step_time - 1.0


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change.

    name: of the case; words: what is changed; outcome: None where it was not tried; note: why not, or what must be
    known of the outcome, if anything.
    """

    name: str
    words: str
    outcome: Outcome | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class WhatIfs:
    """Changes, each alone, in a fixed order. step_time: seconds; tokens_per_s_per_gpu, fits: as the scenario stands."""

    step_time: Seconds
    tokens_per_s_per_gpu: float
    fits: bool
    cases: tuple[WhatIf, ...]

    @property
    def tried(self) -> tuple[tuple[WhatIf, Outcome], ...]:
        """Those that were simulated, with what came of them."""
        return tuple((case, case.outcome) for case in self.cases if case.outcome is not None)

    @property
    def untried(self) -> tuple[WhatIf, ...]:
        """Those that were not."""
        return tuple(case for case in self.cases if case.outcome is None)
