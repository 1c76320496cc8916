"""Which features of a step lie inside the validated domain?

The validated domain is the union of the features of all published steps. A category of a step that none of
them had is *unmeasured*; a quantity that exceeds all of theirs is *beyond* the domain, by a number of
doublings. An accelerator counts as measured if enough steps on it are published to fit its rate, and as a
same-chip accelerator if that is so of another with the same chip.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from clustersim.uncertainty.step_features import StepFeatures


@dataclass(frozen=True, slots=True)
class ValidatedDomain:
    """The domain covered by validated steps.

    accelerators, same_chip_accelerators: their names; categories: those of any step, visible features included;
    max_quantities: the largest value of each quantity.
    """

    accelerators: frozenset[str]
    same_chip_accelerators: frozenset[str]
    categories: frozenset[str]
    max_quantities: Mapping[str, int]

    @classmethod
    def from_steps(
        cls, step_features: Iterable[StepFeatures], accelerators: Iterable[str], same_chip_accelerators: Iterable[str]
    ) -> Self:
        """Union of the features of steps.

        accelerators: those with a fitted rate; same_chip_accelerators: those that have the chip of one.
        """
        steps = tuple(step_features)
        categories = frozenset(category for step in steps for category in step.all_categories)
        max_quantities: dict[str, int] = {}
        for step in steps:
            for name, quantity in step.quantities.items():
                max_quantities[name] = max(quantity, max_quantities.get(name, 0))
        measured = frozenset(accelerators)
        return cls(measured, frozenset(same_chip_accelerators) - measured, categories, max_quantities)

    def with_steps(self, accelerator: str, categories: Iterable[str]) -> Self:
        """The domain extended by steps of these categories on an accelerator."""
        return replace(
            self, accelerators=self.accelerators | {accelerator}, categories=self.categories | frozenset(categories)
        )

    def unmeasured_accelerators(self, features: StepFeatures) -> tuple[str, ...]:
        """Accelerators that were not measured, nor any with the same chip."""
        return tuple(sorted(features.accelerators - self.accelerators - self.same_chip_accelerators))

    def unmeasured_categories(self, features: StepFeatures) -> tuple[str, ...]:
        """Labels of categories that no validated step had, accelerators included (those of the same chip as well)."""
        accelerators = sorted(features.accelerators - self.accelerators)
        return (*(f"accelerator {name}" for name in accelerators), *sorted(features.all_categories - self.categories))

    def extrapolation_doublings(self, features: StepFeatures) -> dict[str, float]:
        """Quantities that exceed the validated maximum, with the number of doublings."""
        return dict(self._iter_extrapolation(features))

    def _iter_extrapolation(self, features: StepFeatures) -> Iterator[tuple[str, float]]:
        for name, quantity in features.quantities.items():
            maximum = self.max_quantities.get(name, 1)
            if quantity > maximum:
                yield name, math.log2(quantity / maximum)
