"""Between what and what is a step expected, and why?

Errors are logarithms of measured over predicted time, of published steps that the fit of all constants has not seen
(sources are left out one after the other). Their variance is taken as a sum of terms (variance components): one that
every step has, one for each trait (a share of it, where a trait is a share), and for what was not measured one for each
accelerator, one for each kind of anything, one for each doubling beyond the largest. So a band is wider wherever
less was measured, and never narrower. A step is expected within `quantile` standard deviations, within which nine of
ten errors of unseen sources are, sources counted alike.

Where kernels were measured on the machine itself, their own errors take the place of what rests on kernels: of the
accelerator's term, and of what the first term has beyond `repeat`, the deviation of equal steps that were published
twice. Where real steps on it were predicted, their errors take that of the kernels' (`uncertainty.holdout`). What a
framework, a network and a layout add remains.

`python -m calibrate fit-band` finds the constants, in topologies/experience.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from clustersim.uncertainty.step_features import VISIBLE, Facts, Trait
from clustersim.uncertainty.validated_domain import Known

ALL: Final = "all steps"
SHARE: Final = 0.9  # of unseen steps that a band holds
_ONE_NODE: Final = "one node"


class Gap(Enum):
    """What adds to the variance of every step, and of steps of which not all was measured."""

    ANY = "any step"
    ACCELERATOR = "an accelerator that was not measured"
    KIND = "a kind that was not measured"
    DOUBLING = "a doubling beyond what was measured"


Term = Gap | Trait
TERMS: Final[tuple[Term, ...]] = (Gap.ANY, *Trait, Gap.ACCELERATOR, Gap.KIND, Gap.DOUBLING)


def loads(facts: Facts, known: Known) -> dict[Term, float]:
    """How much of each term a step has."""
    traits: dict[Term, float] = {trait: facts.traits[trait] for trait in Trait}
    gaps: dict[Term, float] = {
        Gap.ACCELERATOR: float(len(known.strangers(facts))),
        Gap.KIND: float(len(known.unmeasured(facts))),
        Gap.DOUBLING: sum(known.beyond(facts).values()),
    }
    return {Gap.ANY: 1.0, **traits, **gaps}


def regimes(facts: Facts, known: Known) -> tuple[str, ...]:
    """The regimes that a step belongs to, in words: whether it has a network, its traits, and its gaps."""
    found = loads(facts, known)
    there = tuple(term.value for term in TERMS[1:] if found[term] >= VISIBLE)
    return there if facts.traits[Trait.NODES] else (_ONE_NODE, *there)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of unseen steps of one regime: cases of so many sources, and the share inside, sources counted alike."""

    cases: int
    sources: int
    inside: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a step itself. error: part by which what is known differs; unknown: part of busy time."""

    error: float = 0.0
    unknown: float = 1.0


NOTHING_MEASURED: Final = Measured()


@dataclass(frozen=True, slots=True)
class Expected:
    """A band. low, high: times the predicted time; regimes: of the step; unmeasured: what of it was not measured."""

    low: float
    high: float
    regimes: tuple[str, ...]
    unmeasured: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Experience:
    """What unseen steps tell: `cases` of so many sources; unseen: how many of each regime were inside their bands.

    deviations: standard deviation of the logarithm by term; repeat: the same of equal steps.
    """

    cases: int
    sources: int
    quantile: float
    repeat: float
    deviations: Mapping[Term, float]
    known: Known
    unseen: Mapping[str, Coverage]

    def expected(self, facts: Facts, measured: Measured = NOTHING_MEASURED) -> Expected:
        """The band of a step, symmetric in the logarithm."""
        width = math.log1p(measured.error) + self.quantile * math.sqrt(self.variance(facts, measured.unknown))
        return Expected(math.exp(-width), math.exp(width), regimes(facts, self.known), self._unmeasured(facts))

    def variance(self, facts: Facts, unknown: float = 1.0) -> float:
        """Of the logarithm of measured over predicted time; unknown: part of the busy time that nobody measured."""
        parts = {term: load * self.deviations[term] ** 2 for term, load in loads(facts, self.known).items()}
        steady = min(self.repeat**2, parts[Gap.ANY])
        parts[Gap.ANY] = steady + unknown * (parts[Gap.ANY] - steady)
        parts[Gap.ACCELERATOR] *= unknown
        return sum(parts.values())

    def _unmeasured(self, facts: Facts) -> tuple[str, ...]:
        most, beyond = self.known.most, self.known.beyond(facts)
        larger = (f"{name} {facts.amounts[name]:,} (at most {most.get(name, 1):,})" for name in beyond)
        return (*self.known.unmeasured(facts), *larger)
