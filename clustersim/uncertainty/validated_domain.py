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

from clustersim.uncertainty.step_features import Facts


@dataclass(frozen=True, slots=True)
class Known:
    """accelerators, siblings: their names; kinds: those that some step had, and traits; most: each amount's largest."""

    accelerators: frozenset[str]
    siblings: frozenset[str]
    kinds: frozenset[str]
    most: Mapping[str, int]

    @classmethod
    def of(cls, facts: Iterable[Facts], accelerators: Iterable[str], siblings: Iterable[str]) -> Self:
        """What some steps had; accelerators, siblings: whose pace is known, and with whose chip it is."""
        seen = tuple(facts)
        kinds = frozenset(kind for item in seen for kind in item.had)
        most: dict[str, int] = {}
        for element in seen:
            for name, amount in element.amounts.items():
                most[name] = max(amount, most.get(name, 0))
        measured = frozenset(accelerators)
        return cls(measured, frozenset(siblings) - measured, kinds, most)

    def beside(self, accelerator: str, kinds: Iterable[str]) -> Self:
        """What is known with steps of these kinds on an accelerator as well."""
        return replace(self, accelerators=self.accelerators | {accelerator}, kinds=self.kinds | frozenset(kinds))

    def strangers(self, facts: Facts) -> tuple[str, ...]:
        """The accelerators of which neither they nor a sibling were measured."""
        return tuple(sorted(facts.accelerators - self.accelerators - self.siblings))

    def unmeasured(self, facts: Facts) -> tuple[str, ...]:
        """The kinds that no step had, accelerators among them (a sibling is one of them)."""
        accelerators = sorted(facts.accelerators - self.accelerators)
        return (*(f"accelerator {name}" for name in accelerators), *sorted(facts.had - self.kinds))

    def beyond(self, facts: Facts) -> dict[str, float]:
        """The amounts that are larger than any, with the doublings by which they are."""
        return dict(self._beyond(facts))

    def _beyond(self, facts: Facts) -> Iterator[tuple[str, float]]:
        for name, amount in facts.amounts.items():
            most = self.most.get(name, 1)
            if amount > most:
                yield name, math.log2(amount / most)
