"""How is a band said? In a sentence: what is expected, how far unseen steps of such a regime were, what widens it."""

from typing import Final

from clustersim.common.units import Seconds, format_step_time
from clustersim.uncertainty.prediction_interval import SHARE, Expected, Experience, Gap

_GAPS: Final = frozenset(gap.value for gap in Gap)
_MOST: Final = 4  # of what was not measured that is named


def experience_words(experience: Experience, expected: Expected, band: tuple[Seconds, Seconds], known: str) -> str:
    """The sentence; known: what was measured on the machine itself, empty where nothing was."""
    low, high = map(format_step_time, band)
    parts = (
        f"expect {low} to {high} ({expected.low - 1.0:+.0%} to {expected.high - 1.0:+.0%}): ",
        _met(experience, expected),
        f"; nothing like {_listed(expected.unmeasured)} was measured: wider" if expected.unmeasured else "",
        f"; {known}: narrower, but for what a framework adds (clustersim calibrate --check)" if known else "",
    )
    return "".join(parts)


def _met(experience: Experience, expected: Expected) -> str:
    """How far unseen steps were, and of how many sources the steps of each of its regimes are."""
    told = {name: experience.unseen[name].sources for name in expected.regimes if name in experience.unseen}
    like = ", ".join(f"{name} {sources}" for name, sources in told.items() if name not in _GAPS)
    return (
        f"{SHARE:.0%} of {experience.cases} published steps were so near, predicted without their source "
        f"(sources: {experience.sources}{', ' if like else ''}{like})"
    )


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return " or ".join(names[:_MOST]) + more
