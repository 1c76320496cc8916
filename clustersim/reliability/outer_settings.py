"""With how few inner steps do rounds of local training reach a utilization?

Fewer inner steps between exchanges are closer to synchronous training, so of all settings that keep the replicas busy
those with the fewest inner steps come first. What travels (its format) and when (all at once and waited for, or in
fragments while the replicas go on) is varied; inner steps are found by doubling and bisection, because utilization
only rises with them: what a round loses does not depend on how many steps it has.

Published on what the choices cost in loss: arXiv:2501.18512 (fragments, overlap of 1 to 5 steps, 4 bits: none that can
be measured at 1B parameters and 100 inner steps), arXiv:2503.09799 (inner steps, replicas, sizes).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from clustersim.common.errors import InputError
from clustersim.results.outer_rounds import OuterChoice, OuterRounds
from clustersim.scenario.config.diloco import MAX_INNER_STEPS
from clustersim.scenario.diloco import DilocoSettings, OuterFormat

FORMATS: Final = (OuterFormat.FP32, OuterFormat.BF16, OuterFormat.INT8, OuterFormat.FP4)
OVERLAPS: Final = (0, 1, 5)
"""Inner steps that replicas go on while a fragment travels: none, and the range of streaming DiLoCo."""
MAX_FRAGMENTS: Final = 8


def outer_choices(
    rounds: Callable[[DilocoSettings], OuterRounds], settings: DilocoSettings, layers: int, utilization: float
) -> tuple[OuterChoice, ...]:
    """Settings that reach the utilization, those with the fewest inner steps first; raise InputError for none of it.

    rounds: of any settings; layers: of the model.
    """
    if not 0.0 < utilization < 1.0:
        raise InputError(f"utilization {utilization:g}: is not above 0 and below 1, such as 0.95")
    choices = [
        OuterChoice(chosen, rounds(chosen))
        for candidate in _candidates(settings, layers)
        if (chosen := _least_inner_steps(rounds, candidate, utilization)) is not None
    ]
    return tuple(sorted(choices, key=_order))


def _candidates(settings: DilocoSettings, layers: int) -> Iterator[DilocoSettings]:
    for overlap in OVERLAPS:
        for fragments in dict.fromkeys((1, min(layers, MAX_FRAGMENTS))):
            if overlap or fragments == 1:  # fragments that are waited for only add round trips
                for outer_format in FORMATS:
                    yield replace(settings, fragments=fragments, overlap=overlap, outer_gradients=outer_format)


def _least_inner_steps(
    rounds: Callable[[DilocoSettings], OuterRounds], settings: DilocoSettings, utilization: float
) -> DilocoSettings | None:
    """The settings with the fewest inner steps that reach the utilization; None if not even the most do.

    Each fragment has inner steps of its own to travel in, so that exchanges of a round do not meet, and arrives before
    it is sent again.
    """
    step_count = max(settings.overlap + 1, settings.fragments * max(1, settings.overlap))
    failing, reaching = step_count - 1, 0
    while not reaching:
        if rounds(replace(settings, inner_steps=step_count)).utilization >= utilization:
            reaching = step_count
        elif step_count == MAX_INNER_STEPS:
            return None
        else:
            failing, step_count = step_count, min(2 * step_count, MAX_INNER_STEPS)
    while reaching - failing > 1:
        middle = (failing + reaching) // 2
        if rounds(replace(settings, inner_steps=middle)).utilization >= utilization:
            reaching = middle
        else:
            failing = middle
    return replace(settings, inner_steps=reaching)


def _order(choice: OuterChoice) -> tuple[int, float, int, int]:
    """Fewest inner steps, then most bits, least overlap, fewest fragments."""
    settings = choice.settings
    return settings.inner_steps, -settings.outer_gradients.bytes, settings.overlap, settings.fragments
