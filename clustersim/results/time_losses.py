"""What does a step lose, and what would help?

Ideal is a step in which every GPU runs the model's FLOP at its peak and nothing else. All else is lost: kernels below
the peak, what is computed again, the optimizer, launches, communication that nothing hides (by axis), bubbles, waiting.
Losses are means over all ranks, so with the ideal they sum to the step.

What helps is not guessed: it was simulated, with one thing changed (`results.what_if`), and the loss got smaller.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from clustersim.common.units import Seconds
from clustersim.results.time_categories import BUBBLE_CATEGORIES, EXPOSED_CATEGORIES, TimeCategory
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport

BELOW_PEAK: Final = "kernels below the peak"
BUBBLE: Final = "pipeline bubble"
MIN_LOSS_SHARE: Final = 0.005  # of the step: a smaller part is no loss worth a word
MIN_RELATIVE_CHANGE: Final = 0.05  # of a loss: what changes it by less does not help
_MIN_STEP_CHANGE: Final = 5e-4  # of the step: what is gained or lost by less is nothing

_LOSS_CATEGORIES: Final[Mapping[str, tuple[TimeCategory, ...]]] = {
    BELOW_PEAK: (TimeCategory.COMPUTE,),
    **{
        part.value: (part,)
        for part in (TimeCategory.RECOMPUTE, TimeCategory.OPTIMIZER, TimeCategory.LAUNCH, TimeCategory.SLOWED)
    },
    **{part.value: (part,) for part in EXPOSED_CATEGORIES.values()},
    BUBBLE: BUBBLE_CATEGORIES,
    TimeCategory.WAIT.value: (TimeCategory.WAIT,),
}


@dataclass(frozen=True, slots=True)
class TimeLoss:
    """What keeps a step from the ideal. seconds: the mean over ranks; share: of the step; parts: of the breakdown."""

    name: str
    seconds: Seconds
    share: float
    categories: tuple[TimeCategory, ...]


@dataclass(frozen=True, slots=True)
class LossRemedies:
    """Changes that were simulated, each alone. better: those that make a loss smaller, the most effective first;

    worse: where none does, the one of those that make it larger that changes little else, if any: what it hangs on.
    """

    helpful: tuple[tuple[WhatIf, WhatIfOutcome], ...]
    most_sensitive: tuple[WhatIf, WhatIfOutcome] | None = None


def time_losses(mean_seconds: Mapping[str, Seconds], ideal_seconds: Seconds) -> tuple[TimeLoss, ...]:
    """All that is worth a word, the largest first.

    mean: seconds of every part by its name, which sum to the step (`TimeBreakdown.mean_seconds`); ideal: seconds that the model's
    FLOP take at the peak, 0 where kernels are not longer: then nothing is told of them.
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
    """Which of the changes that were simulated make a loss smaller, and the step with it, and fit into memory."""
    changes = [
        (_loss_change(loss, outcome), case, outcome) for case, outcome in report.simulated if outcome.fits_in_memory
    ]
    threshold = MIN_RELATIVE_CHANGE * loss.seconds
    helpful = [change for change in changes if change[0] <= -threshold and change[2].slowdown_ratio < -_MIN_STEP_CHANGE]
    helpful.sort(key=lambda each: each[0])
    harmful = [item for item in changes if item[0] >= threshold and item[2].slowdown_ratio > _MIN_STEP_CHANGE]
    most_sensitive = max(harmful, key=lambda each: each[0] / each[2].slowdown_seconds, default=None)
    return LossRemedies(
        tuple((case, outcome) for _, case, outcome in helpful),
        None if helpful or most_sensitive is None else most_sensitive[1:],
    )


def _loss_change(loss: TimeLoss, outcome: WhatIfOutcome) -> Seconds:
    """Seconds by which the loss grows."""
    return sum(outcome.category_changes[category.value] for category in loss.categories)
