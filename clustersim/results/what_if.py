"""What-if results: the step with one thing changed; filled in by the package that simulates (`planning`).

A step with more tokens takes longer without being worse. So besides step times there is the time of equal
work: `slowdown_seconds`, the additional seconds for the tokens of the baseline step, and `speedup`, the
relative increase of tokens/s per GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from clustersim.common.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class WhatIfOutcome:
    """Result of one change.

    step_time, baseline_step_time: seconds of a step with and without it; token_ratio: tokens of a step with it
    over those without; tokens_per_s_per_gpu: with it; peak_memory: bytes on the GPU with the highest use;
    fits_in_memory: whether that is within its capacity; category_changes: by time category, additional seconds
    for the tokens of the baseline step, averaged over ranks; they sum to `slowdown_seconds`.
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
        """Additional seconds for the tokens of the baseline step."""
        return self.step_time / self.token_ratio - self.baseline_step_time

    @property
    def slowdown_ratio(self) -> float:
        """`slowdown_seconds` as a fraction of the baseline step."""
        return self.slowdown_seconds / self.baseline_step_time

    @property
    def speedup(self) -> float:
        """Relative increase of tokens/s per GPU."""
        return self.baseline_step_time * self.token_ratio / self.step_time - 1.0


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change.

    name: key of the case; description: what is changed; outcome: None where it was not simulated; note: the
    reason, or a caveat on the outcome, if any.
    """

    name: str
    description: str
    outcome: WhatIfOutcome | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class WhatIfReport:
    """Changes, each applied separately, in a fixed order.

    step_time (seconds), tokens_per_s_per_gpu, fits_in_memory: of the unchanged scenario.
    """

    step_time: Seconds
    tokens_per_s_per_gpu: float
    fits_in_memory: bool
    cases: tuple[WhatIf, ...]

    @property
    def simulated(self) -> tuple[tuple[WhatIf, WhatIfOutcome], ...]:
        """Cases that were simulated, with their outcomes."""
        return tuple((case, case.outcome) for case in self.cases if case.outcome is not None)

    @property
    def skipped(self) -> tuple[WhatIf, ...]:
        """Cases that were not simulated."""
        return tuple(case for case in self.cases if case.outcome is None)
