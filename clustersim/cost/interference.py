"""By how much do kernels and collectives on one GPU slow each other?

The kernel of a collective takes SMs and memory bandwidth from the compute kernels it overlaps, and they
from it. While both run, a kernel runs at 1/(1 + p) of its rate and a collective at 1/(1 + q) of its own. p
and q depend on the collective type (whether it reduces, and how much it reads and writes per byte sent) and
on the class of kernel, by the resource that it keeps busy. Assumed: they do not depend on payload, group or
shape.

Where nobody measured q, kernels slow the rate at which a GPU moves data through its NVLink or xGMI ports, by a
number of its accelerator. A collective that slower links limit (NICs, PCIe) leaves these ports idle for a part of
the time, so it is slowed only by what that slack does not take.
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
    """The resource that a kernel keeps busy."""

    COMPUTE = "compute"  # matrix units: matmuls
    ATTENTION = "attention"  # matrix and exponential units in alternation: flash attention
    MEMORY = "memory-bound"  # everything else


SlowdownTable = Mapping[tuple[CollectiveType, KernelClass], float]
"""Slowdown (extra time as a fraction) by collective type and kernel class."""

KERNEL_CLASSES: Final = tuple(KernelClass)
_CLASS_OF_KIND: Final = {
    KernelKind.MATMUL: KernelClass.COMPUTE,
    KernelKind.GROUPED_MATMUL: KernelClass.COMPUTE,
    KernelKind.STREAMED_MATMULS: KernelClass.COMPUTE,
    KernelKind.ATTENTION_FORWARD: KernelClass.ATTENTION,
    KernelKind.ATTENTION_BACKWARD: KernelClass.ATTENTION,
}
_SAME_TRANSFERS: Final = {CollectiveType.SHIFT: CollectiveType.SEND_RECV}
"""Collectives with the same transfers: a shift is messages to the next member and from the previous one."""


def kernel_class_of(kind: KernelKind) -> KernelClass:
    """The class of a kernel kind."""
    return _CLASS_OF_KIND.get(kind, KernelClass.MEMORY)


@dataclass(frozen=True, slots=True)
class Interference:
    """Slowdowns of kernels and of collectives while they overlap, for every pair.

    nvlink_slowdown: of what crosses NVLink or xGMI ports, by kernels of every class.
    """

    kernels: SlowdownTable
    collectives: SlowdownTable
    nvlink_slowdown: float = 0.0

    @classmethod
    def uniform(cls, slowdown: float, nvlink_slowdown: float = 0.0) -> Self:
        """One slowdown for all kernels and collective types; collectives are slowed at ports only."""
        return cls(_complete_table({_ANY_PAIR: slowdown}), _complete_table({}), nvlink_slowdown)

    @classmethod
    def from_measurements(cls, kernels: SlowdownTable, collectives: SlowdownTable) -> Self:
        """From measurements of some pairs.

        A class that was not measured with a collective gets the mean of those that were; a collective that was not
        measured gets the values of one with the same transfers, or the mean over those that were; without
        measurements nothing slows.
        """
        return cls(_complete_table(kernels), _complete_table(collectives))

    @property
    def slows_collectives(self) -> bool:
        """Whether kernels slow any collective."""
        return self.nvlink_slowdown > 0.0 or any(slowdown > 0.0 for slowdown in self.collectives.values())

    def collective_slowdown(self, collective: CollectiveType, kernel_class: KernelClass, nvlink_share: float) -> float:
        """Slowdown of a collective by kernels of a class.

        nvlink_share: share of its transfer for which ports are busy; below 1 the rest is slack.
        """
        return max(self.collectives[collective, kernel_class], (1.0 + self.nvlink_slowdown) * nvlink_share - 1.0)


_ANY_PAIR: Final = (CollectiveType.ALL_REDUCE, KernelClass.COMPUTE)


def _complete_table(measured: SlowdownTable) -> SlowdownTable:
    """Slowdowns of all pairs, from those of some."""
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
    """Slowdowns of all classes for one collective type of which some are measured."""
    mean_slowdown = _exact_mean(slowdown for (collective, _), slowdown in measured.items() if collective is kind)
    return [measured.get((kind, kernel_class), mean_slowdown) for kernel_class in KERNEL_CLASSES]


def _exact_mean(slowdowns: Iterable[float]) -> float:
    """Mean that returns equal values unchanged, without rounding."""
    values = list(slowdowns)
    return 0.0 if not values else values[0] if len(set(values)) == 1 else mean(values)


NO_INTERFERENCE: Final = Interference.uniform(0.0)
_Level = tuple[tuple[float, ...], ...]
"""Slowdowns by device model and kernel class."""


class InterferenceTable:
    """Which collectives of a program slow kernels differently?

    Level 0 is no collective; types that slow kernels of every class equally, on every device model, share a
    level. Two collectives at once slow each class by the larger of both slowdowns: together they occupy what
    the larger one does. may_coincide: whether two may run at once; levels: [levels - 1][device models][classes]
    slowdown of kernels.
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
        """The collective types that may overlap kernels."""
        return self._level_of.keys()

    def level_of(self, kind: CollectiveType) -> int:
        """Interference level of a collective type that may overlap kernels."""
        return self._level_of[kind]

    def combined_level(self, first: int, second: int) -> int:
        """Interference level of two collectives at once, given their levels."""
        return self._combined_level[first, second] if first and second else first or second
