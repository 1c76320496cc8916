"""What do all groups of a role put on links, where they differ in shape?

All groups of a role communicate at the same time. Where they differ in shape (a dead NVLink port, a layout that crosses
nodes in some places), the library chooses for each set of groups of one shape apart, and what the others load meanwhile
must be assumed: that they take the same algorithm, where their shape allows it, else the first that the library lists
for them, which loads its links evenly over the phases of the other. So sets that share no link are independent, bit for
bit, and where all are of one shape there is nothing to assume.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from clustersim.collectives.flow_routes import Routed
from clustersim.collectives.phase import Phase
from clustersim.common.arrays import FloatArray


class Siblings:
    """Routes sets of groups beside each other; each algorithm when it is asked for, and once.

    sets: the phases of each set by algorithm, in the library's order, of those that it can take.
    """

    def __init__(self, sets: Sequence[Mapping[str, tuple[Phase, ...]]], route: Callable[[Phase], Routed]) -> None:
        self._sets = sets
        self._route = route
        self._routed: dict[tuple[int, str], tuple[Routed, ...]] = {}
        self._loads: dict[str, list[FloatArray]] = {}

    def routed(self, number: int, algorithm: str) -> tuple[Routed, ...]:
        """The phases of an algorithm in one set; their loads are those of all sets."""
        own = self._own(number, algorithm)
        if len(self._sets) == 1:
            return own
        if algorithm not in self._loads:
            loads = [self._meanwhile(index, algorithm, len(own)) for index in range(len(self._sets))]
            self._loads[algorithm] = [sum(together[1:], together[0]) for together in zip(*loads, strict=True)]
        return tuple(replace(item, load=load) for item, load in zip(own, self._loads[algorithm], strict=True))

    def _own(self, number: int, algorithm: str) -> tuple[Routed, ...]:
        """The phases of one set by itself."""
        key = (number, algorithm)
        if key not in self._routed:
            self._routed[key] = tuple(self._route(phase) for phase in self._sets[number][algorithm])
        return self._routed[key]

    def _meanwhile(self, number: int, algorithm: str, phases: int) -> list[FloatArray]:
        """What one set loads in each of so many phases of an algorithm that another set takes."""
        able = self._sets[number]
        if algorithm in able:
            return [routed.load for routed in self._own(number, algorithm)]
        first, *others = (item.load for item in self._own(number, next(iter(able))))
        return [sum(others, first) / phases] * phases
