"""What of a step was measured before, and what was not?

Known is what published steps were like, all of them together. A step that has something of a kind that none of them had
is *unmeasured* in it; one that is larger in something than all of them is *beyond* it, by so many doublings. An
accelerator counts as measured where enough steps on it are published to know its pace, and as a sibling where that is
so of another with the same chip.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from clustersim.uncertainty.step_features import StepFeatures


@dataclass(frozen=True, slots=True)
class ValidatedDomain:
    """accelerators, siblings: their names; kinds: those that some step had, and traits; most: each amount's largest."""

    accelerators: frozenset[str]
    same_chip_accelerators: frozenset[str]
    categories: frozenset[str]
    max_quantities: Mapping[str, int]

    @classmethod
    def from_steps(
        cls, step_features: Iterable[StepFeatures], accelerators: Iterable[str], same_chip_accelerators: Iterable[str]
    ) -> Self:
        """What some steps had; accelerators, siblings: whose pace is known, and with whose chip it is."""
        steps = tuple(step_features)
        categories = frozenset(category for step in steps for category in step.all_categories)
        max_quantities: dict[str, int] = {}
        for step in steps:
            for name, quantity in step.quantities.items():
                max_quantities[name] = max(quantity, max_quantities.get(name, 0))
        measured = frozenset(accelerators)
        return cls(measured, frozenset(same_chip_accelerators) - measured, categories, max_quantities)

    def with_steps(self, accelerator: str, categories: Iterable[str]) -> Self:
        """What is known with steps of these kinds on an accelerator as well."""
        return replace(
            self, accelerators=self.accelerators | {accelerator}, categories=self.categories | frozenset(categories)
        )

    def unmeasured_accelerators(self, features: StepFeatures) -> tuple[str, ...]:
        """The accelerators of which neither they nor a sibling were measured."""
        return tuple(sorted(features.accelerators - self.accelerators - self.same_chip_accelerators))

    def unmeasured_categories(self, features: StepFeatures) -> tuple[str, ...]:
        """The kinds that no step had, accelerators among them (a sibling is one of them)."""
        accelerators = sorted(features.accelerators - self.accelerators)
        return (*(f"accelerator {name}" for name in accelerators), *sorted(features.all_categories - self.categories))

    def extrapolation_doublings(self, features: StepFeatures) -> dict[str, float]:
        """The amounts that are larger than any, with the doublings by which they are."""
        return dict(self._iter_extrapolation(features))

    def _iter_extrapolation(self, features: StepFeatures) -> Iterator[tuple[str, float]]:
        for name, quantity in features.quantities.items():
            maximum = self.max_quantities.get(name, 1)
            if quantity > maximum:
                yield name, math.log2(quantity / maximum)
