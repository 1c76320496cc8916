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
from clustersim.results.time_categories import BUBBLES, EXPOSED, Part
from clustersim.results.what_if import Outcome, WhatIf, WhatIfs

BELOW_PEAK: Final = "kernels below the peak"
BUBBLE: Final = "pipeline bubble"
LEAST: Final = 0.005  # of the step: a smaller part is no loss worth a word
MOVES: Final = 0.05  # of a loss: what changes it by less does not help
_SLOWER: Final = 5e-4  # of the step: what is gained or lost by less is nothing

_NAMES: Final[Mapping[str, tuple[Part, ...]]] = {
    BELOW_PEAK: (Part.COMPUTE,),
    **{part.value: (part,) for part in (Part.RECOMPUTE, Part.OPTIMIZER, Part.LAUNCH, Part.SLOWED)},
    **{part.value: (part,) for part in EXPOSED.values()},
    BUBBLE: BUBBLES,
    Part.WAIT.value: (Part.WAIT,),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """What keeps a step from the ideal. seconds: the mean over ranks; share: of the step; parts: of the breakdown."""

    name: str
    seconds: Seconds
    share: float
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Help:
    """Changes that were simulated, each alone. better: those that make a loss smaller, the most effective first;

    worse: where none does, the one of those that make it larger that changes little else, if any: what it hangs on.
    """

    better: tuple[tuple[WhatIf, Outcome], ...]
    worse: tuple[WhatIf, Outcome] | None = None


def losses(mean: Mapping[str, Seconds], ideal: Seconds) -> tuple[Loss, ...]:
    """All that is worth a word, the largest first.

    mean: seconds of every part by its name, which sum to the step (`Breakdown.mean`); ideal: seconds that the model's
    FLOP take at the peak, 0 where kernels are not longer: then nothing is told of them.
    """
    step = sum(mean.values())
    found = (Loss(name, seconds, seconds / step, _NAMES[name]) for name, seconds in _seconds(mean, ideal))
    return tuple(sorted((item for item in found if item.share >= LEAST), key=lambda loss: -loss.seconds))


def _seconds(mean: Mapping[str, Seconds], ideal: Seconds) -> Iterator[tuple[str, Seconds]]:
    for name, parts in _NAMES.items():
        seconds = sum(mean[part.value] for part in parts)
        if name != BELOW_PEAK:
            yield name, seconds
        elif ideal > 0.0:
            yield name, seconds - ideal


def what_helps(loss: Loss, what_ifs: WhatIfs) -> Help:
    """Which of the changes that were simulated make a loss smaller, and the step with it, and fit into memory."""
    by = [(_change(loss, outcome), case, outcome) for case, outcome in what_ifs.tried if outcome.fits]
    least = MOVES * loss.seconds
    better = [item for item in by if item[0] <= -least and item[2].part < -_SLOWER]
    better.sort(key=lambda each: each[0])
    worse = [element for element in by if element[0] >= least and element[2].part > _SLOWER]
    most = max(worse, key=lambda each: each[0] / each[2].longer, default=None)
    return Help(tuple((case, outcome) for _, case, outcome in better), None if better or most is None else most[1:])


def _change(loss: Loss, outcome: Outcome) -> Seconds:
    """Seconds by which the loss grows."""
    return sum(outcome.changes[part.value] for part in loss.parts)
