"""By how much do kernels and collectives on one GPU slow each other?

The kernel of a collective takes compute units and memory bandwidth from the kernels beside it, and they from it. While
both run, a kernel goes at 1/(1 + p) of its pace and a collective at 1/(1 + q) of its own. p and q are of the kind of
collective (whether it reduces, and how much it reads and writes for a byte that it sends) and of the class of kernel:
what that keeps busy is what there is to take. Assumed: they depend on neither payload, group nor shape.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Final, Self

from clustersim.common.enums import IdentityEnum
from clustersim.model.kernels import KernelKind
from clustersim.program.task import CollectiveType


class KernelClass(IdentityEnum):
    """What a kernel keeps busy."""

    COMPUTE = "compute"  # matrix units: products
    ATTENTION = "attention"  # matrix units and those of exponentials in turns: flash attention
    MEMORY = "memory-bound"  # everything else streams its operands


SlowdownTable = Mapping[tuple[CollectiveType, KernelClass], float]
"""By which part something takes longer, by who is beside whom."""

KERNEL_CLASSES: Final = tuple(KernelClass)
_CLASS_OF_KIND: Final = {
    KernelKind.MATMUL: KernelClass.COMPUTE,
    KernelKind.GROUPED_MATMUL: KernelClass.COMPUTE,
    KernelKind.STREAMED_MATMULS: KernelClass.COMPUTE,
    KernelKind.ATTENTION_FORWARD: KernelClass.ATTENTION,
    KernelKind.ATTENTION_BACKWARD: KernelClass.ATTENTION,
}
_SAME_TRANSFERS: Final = {CollectiveType.SHIFT: CollectiveType.SEND_RECV}
"""Of the same transfers: a shift is messages to the next member and from the previous one."""


def kernel_class_of(kind: KernelKind) -> KernelClass:
    """The class of a kind of kernels."""
    return _CLASS_OF_KIND.get(kind, KernelClass.MEMORY)


@dataclass(frozen=True, slots=True)
class Interference:
    """Parts by which kernels, and collectives, take longer while they run beside each other; of every pair."""

    kernels: SlowdownTable
    collectives: SlowdownTable

    @classmethod
    def uniform(cls, slowdown: float) -> Self:
        """One number for all kernels beside whatever collective, which is not slowed."""
        return cls(_complete_table({_ANY_PAIR: slowdown}), _complete_table({}))

    @classmethod
    def from_measurements(cls, kernels: SlowdownTable, collectives: SlowdownTable) -> Self:
        """From what was measured of some pairs.

        A class that was not measured beside a collective is slowed as the mean of those that were; what stands for a
        collective that was not is its likes, or the mean of those that were; where nothing was, nothing is slowed.
        """
        return cls(_complete_table(kernels), _complete_table(collectives))


_ANY_PAIR: Final = (CollectiveType.ALL_REDUCE, KernelClass.COMPUTE)


def _complete_table(measured: SlowdownTable) -> SlowdownTable:
    """Parts of all pairs, from those of some."""
    by_collective = {kind: _class_slowdowns(kind, measured) for kind in dict.fromkeys(kind for kind, _ in measured)}
    mean_slowdowns = [
        _exact_mean(slowdowns[index] for slowdowns in by_collective.values()) for index in range(len(KERNEL_CLASSES))
    ]
    completed = {
        kind: by_collective.get(kind) or by_collective.get(_SAME_TRANSFERS.get(kind, kind)) or mean_slowdowns
        for kind in CollectiveType
    }
    return {
        (kind, KERNEL_CLASSES[index]): completed[kind][index]
        for kind, index in product(CollectiveType, range(len(KERNEL_CLASSES)))
    }


def _class_slowdowns(kind: CollectiveType, measured: SlowdownTable) -> list[float]:
    """Parts of all classes beside one collective of which some are known."""
    mean_slowdown = _exact_mean(slowdown for (collective, _), slowdown in measured.items() if collective is kind)
    return [measured.get((kind, kernel_class), mean_slowdown) for kernel_class in KERNEL_CLASSES]


def _exact_mean(slowdowns: Iterable[float]) -> float:
    """Of equal parts that part, to the last digit."""
    values = list(slowdowns)
    return 0.0 if not values else values[0] if len(set(values)) == 1 else mean(values)


NO_INTERFERENCE: Final = Interference.uniform(0.0)
_Level = tuple[tuple[float, ...], ...]
"""Parts by machine and class."""


class InterferenceTable:
    """Which collectives of a program make a difference to kernels that others do not make?

    Number 0 is no collective; kinds that slow kernels of every class alike, on every machine, have one number. Two at
    once slow each class by the larger of both parts: together they keep busy what the larger of them does.
    together: whether there may be two at once; rows: [numbers - 1][machines][classes] by which part kernels take
    longer.
    """

    __slots__ = ("_combined_level", "_level_of", "levels")

    def __init__(
        self, interferences: Sequence[Interference], kinds: Iterable[CollectiveType], *, may_coincide: bool
    ) -> None:
        level_index: dict[_Level, int] = {}
        self._level_of: dict[CollectiveType, int] = {}
        for kind in kinds:
            level = tuple(
                tuple(interference.kernels[kind, kernel_class] for kernel_class in KERNEL_CLASSES)
                for interference in interferences
            )
            self._level_of[kind] = level_index.setdefault(level, len(level_index) + 1)
        self._combined_level: dict[tuple[int, int], int] = {}
        for first, second in product([*level_index], repeat=2) if may_coincide else ():
            combined = tuple(tuple(map(max, *slowdown_pairs)) for slowdown_pairs in zip(first, second, strict=True))
            self._combined_level[level_index[first], level_index[second]] = level_index.setdefault(
                combined, len(level_index) + 1
            )
        self.levels = list(level_index)

    @property
    def kinds(self) -> Iterable[CollectiveType]:
        """The collectives that may be beside kernels."""
        return self._level_of.keys()

    def level_of(self, kind: CollectiveType) -> int:
        """Number of a collective that may be beside kernels."""
        return self._level_of[kind]

    def combined_level(self, first: int, second: int) -> int:
        """Number of two collectives at once, by their numbers."""
        return self._combined_level[first, second] if first and second else first or second
