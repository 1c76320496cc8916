"""What-if results: the step with one thing changed; filled in by the package that simulates (`planning`).

A step with more tokens takes longer without being worse. So besides step times there is the time of equal
work: `slowdown_seconds`, the additional seconds for the tokens of the baseline step, and `speedup`, the
relative increase of tokens/s per GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.units import Bytes, Seconds
from clustersim.scenario.changes.step_losses import StepLoss
from clustersim.scenario.overrides import command_arguments

MIN_IMPROVEMENT: Final = 5e-4  # fraction of the step: a smaller gain or loss is negligible


@dataclass(frozen=True, slots=True)
class WhatIfOutcome:
    """Result of one change.

    step_time, baseline_step_time: seconds of a step with and without it; token_ratio: tokens of a step with it
    over those without; tokens_per_s_per_gpu: with it; peak_memory: bytes on the GPU with the highest use;
    fits_in_memory: whether that is within its capacity; fit_probability: that it is, by published errors of predicted
    memory; ideal_change, loss_changes: additional seconds, for the tokens of the baseline step and averaged over
    ranks, of the model's FLOP at the peak and of each loss; they sum to `slowdown_seconds`.
    """

    step_time: Seconds
    baseline_step_time: Seconds
    token_ratio: float
    tokens_per_s_per_gpu: float
    peak_memory: Bytes
    fits_in_memory: bool
    fit_probability: float
    ideal_change: Seconds
    loss_changes: Mapping[StepLoss, Seconds]

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

    @property
    def is_faster(self) -> bool:
        """Whether the same work takes less time, by more than a negligible share of it."""
        return self.slowdown_ratio < -MIN_IMPROVEMENT

    @property
    def is_slower(self) -> bool:
        """Whether the same work takes more time, by more than a negligible share of it."""
        return self.slowdown_ratio > MIN_IMPROVEMENT

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data: seconds, bytes, fractions."""
        return {
            "step_time": self.step_time,
            "baseline_step_time": self.baseline_step_time,
            "token_ratio": self.token_ratio,
            "slowdown_ratio": self.slowdown_ratio,
            "speedup": self.speedup,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "peak_memory_bytes": self.peak_memory,
            "fits": self.fits_in_memory,
            "fit_probability": self.fit_probability,
            "loss_changes": {loss.value: seconds for loss, seconds in self.loss_changes.items()},
        }


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change, or several combined.

    name: key of the case; description: what is changed; outcome: None where it was not simulated; note: the
    reason, or a caveat on the outcome, if any; addresses: losses that it may reduce; overrides: settings that make the
    change, as for `--set`; empty: it is none that a user can set (faster links, another batch); changes_numerics:
    whether it computes in other number formats, which may affect convergence.
    """

    name: str
    description: str
    outcome: WhatIfOutcome | None
    note: str = ""
    addresses: frozenset[StepLoss] = frozenset()
    overrides: tuple[str, ...] = ()
    changes_numerics: bool = False

    @property
    def is_improvement(self) -> bool:
        """Whether a user can make the change, the same work then takes less time, and it fits in memory."""
        outcome = self.outcome
        return bool(self.overrides) and outcome is not None and outcome.fits_in_memory and outcome.is_faster

    @property
    def arguments(self) -> str:
        """The change as arguments of the command line; empty where it is none of settings."""
        return command_arguments(self.overrides)

    def to_json(self) -> dict[str, Any]:
        """The case as plain data: seconds, bytes, fractions."""
        outcome = self.outcome
        outcome_data = None if outcome is None else outcome.to_json()
        return {
            "name": self.name,
            "description": self.description,
            "note": self.note,
            "addresses": [loss.value for loss in StepLoss if loss in self.addresses],
            "set": list(self.overrides),
            "changes_numerics": self.changes_numerics,
            "outcome": outcome_data,
        }


@dataclass(frozen=True, slots=True)
class WhatIfReport:
    """Changes, each applied separately.

    step_time (seconds), tokens_per_s_per_gpu, fits_in_memory, fit_probability: of the unchanged scenario; cases: first
    changes of settings, those that can win most first, then hypothetical ones; combined: improvements applied
    together, if that is better than each of them.
    """

    step_time: Seconds
    tokens_per_s_per_gpu: float
    fits_in_memory: bool
    fit_probability: float
    cases: tuple[WhatIf, ...]
    combined: WhatIf | None = None

    @property
    def simulated(self) -> tuple[tuple[WhatIf, WhatIfOutcome], ...]:
        """Single cases that were simulated, with their outcomes."""
        return tuple((case, case.outcome) for case in self.cases if case.outcome is not None)

    @property
    def skipped(self) -> tuple[WhatIf, ...]:
        """Cases that were not simulated."""
        return tuple(case for case in self.cases if case.outcome is None)

    @property
    def tried_settings(self) -> tuple[WhatIf, ...]:
        """Changes of settings that were simulated."""
        return tuple(case for case, _ in self.simulated if case.overrides)

    @property
    def improvements(self) -> tuple[tuple[WhatIf, WhatIfOutcome], ...]:
        """Settings that make the same work take less time and fit in memory, the best first."""
        helpful = [(case, outcome) for case, outcome in self.simulated if case.is_improvement]
        return tuple(sorted(helpful, key=lambda improvement: improvement[1].slowdown_ratio))

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "step_time": self.step_time,
            "cases": [case.to_json() for case in self.cases],
            "combined": None if self.combined is None else self.combined.to_json(),
        }
