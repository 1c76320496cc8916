"""Time losses: what keeps a step from the ideal, and which changes help?

Ideal is a step in which every GPU runs the model's FLOP at its peak and nothing else. All other time is
lost: kernels below the peak, recomputation, the optimizer, launches, exposed communication (by axis),
bubbles, waiting. Losses are means over all ranks, so with the ideal they sum to the step.

What helps is simulated, not guessed: with one thing changed (`results.what_if`), the loss decreased.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from clustersim.common.units import Seconds
from clustersim.results.time_categories import BUBBLE_CATEGORIES, EXPOSED_CATEGORIES, TimeCategory
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport

BELOW_PEAK: Final = "kernels below the peak"
BUBBLE: Final = "pipeline bubble"
MIN_LOSS_SHARE: Final = 0.005  # fraction of the step: smaller losses are not reported
MIN_RELATIVE_CHANGE: Final = 0.05  # fraction of a loss: a smaller change does not count as help
_MIN_STEP_CHANGE: Final = 5e-4  # fraction of the step: smaller gains or losses are negligible

_LOSS_CATEGORIES: Final[Mapping[str, tuple[TimeCategory, ...]]] = {
    BELOW_PEAK: (TimeCategory.COMPUTE,),
    **{
        category.value: (category,)
        for category in (TimeCategory.RECOMPUTE, TimeCategory.OPTIMIZER, TimeCategory.LAUNCH, TimeCategory.SLOWED)
    },
    **{category.value: (category,) for category in EXPOSED_CATEGORIES.values()},
    BUBBLE: BUBBLE_CATEGORIES,
    TimeCategory.WAIT.value: (TimeCategory.WAIT,),
}


@dataclass(frozen=True, slots=True)
class TimeLoss:
    """A loss of a step. seconds: mean over ranks; share: of the step; categories: of the time breakdown."""

    name: str
    seconds: Seconds
    share: float
    categories: tuple[TimeCategory, ...]


@dataclass(frozen=True, slots=True)
class LossRemedies:
    """Simulated changes, each applied separately.

    helpful: those that reduce a loss, the most effective first; most_sensitive: if there is none, the change
    that increases the loss with the least effect on everything else, if any.
    """

    helpful: tuple[tuple[WhatIf, WhatIfOutcome], ...]
    most_sensitive: tuple[WhatIf, WhatIfOutcome] | None = None


def time_losses(mean_seconds: Mapping[str, Seconds], ideal_seconds: Seconds) -> tuple[TimeLoss, ...]:
    """All significant losses, the largest first.

    mean_seconds: by time category name, summing to the step (`TimeBreakdown.mean_seconds`); ideal_seconds: time
    of the model's FLOP at the peak; 0: no loss of kernels below the peak is reported.
    """
    step_time = sum(mean_seconds.values())
    candidates = (
        TimeLoss(name, seconds, seconds / step_time, _LOSS_CATEGORIES[name])
        for name, seconds in _loss_seconds(mean_seconds, ideal_seconds)
    )
    return tuple(
        sorted(
            (candidate for candidate in candidates if candidate.share >= MIN_LOSS_SHARE), key=lambda loss: -loss.seconds
        )
    )


def _loss_seconds(mean_seconds: Mapping[str, Seconds], ideal_seconds: Seconds) -> Iterator[tuple[str, Seconds]]:
    for name, categories in _LOSS_CATEGORIES.items():
        seconds = sum(mean_seconds[category.value] for category in categories)
        if name != BELOW_PEAK:
            yield name, seconds
        elif ideal_seconds > 0.0:
            yield name, seconds - ideal_seconds


def find_remedies(loss: TimeLoss, report: WhatIfReport) -> LossRemedies:
    """Simulated changes that reduce a loss and the step time, and fit in memory."""
    changes = [
        (_loss_change(loss, outcome), case, outcome) for case, outcome in report.simulated if outcome.fits_in_memory
    ]
    threshold = MIN_RELATIVE_CHANGE * loss.seconds
    helpful = [change for change in changes if change[0] <= -threshold and change[2].slowdown_ratio < -_MIN_STEP_CHANGE]
    helpful.sort(key=lambda change: change[0])
    harmful = [change for change in changes if change[0] >= threshold and change[2].slowdown_ratio > _MIN_STEP_CHANGE]
    most_sensitive = max(harmful, key=lambda change: change[0] / change[2].slowdown_seconds, default=None)
    return LossRemedies(
        tuple((case, outcome) for _, case, outcome in helpful),
        None if helpful or most_sensitive is None else most_sensitive[1:],
    )


def _loss_change(loss: TimeLoss, outcome: WhatIfOutcome) -> Seconds:
    """Seconds by which the loss grows."""
    return sum(outcome.category_changes[category.value] for category in loss.categories)
