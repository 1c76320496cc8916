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


Parts = Mapping[tuple[CollectiveType, KernelClass], float]
"""By which part something takes longer, by who is beside whom."""

CLASSES: Final = tuple(KernelClass)
_CLASS: Final = {
    KernelKind.MATMUL: KernelClass.COMPUTE,
    KernelKind.GROUPED_MATMUL: KernelClass.COMPUTE,
    KernelKind.STREAMED_MATMULS: KernelClass.COMPUTE,
    KernelKind.ATTENTION_FORWARD: KernelClass.ATTENTION,
    KernelKind.ATTENTION_BACKWARD: KernelClass.ATTENTION,
}
_LIKE: Final = {CollectiveType.SHIFT: CollectiveType.SEND_RECV}
"""Of the same transfers: a shift is messages to the next member and from the previous one."""


def class_of(kind: KernelKind) -> KernelClass:
    """The class of a kind of kernels."""
    return _CLASS.get(kind, KernelClass.MEMORY)


@dataclass(frozen=True, slots=True)
class Interference:
    """Parts by which kernels, and collectives, take longer while they run beside each other; of every pair."""

    kernels: Parts
    collectives: Parts

    @classmethod
    def equal(cls, part: float) -> Self:
        """One number for all kernels beside whatever collective, which is not slowed."""
        return cls(_filled({_FIRST: part}), _filled({}))

    @classmethod
    def of(cls, kernels: Parts, collectives: Parts) -> Self:
        """From what was measured of some pairs.

        A class that was not measured beside a collective is slowed as the mean of those that were; what stands for a
        collective that was not is its likes, or the mean of those that were; where nothing was, nothing is slowed.
        """
        return cls(_filled(kernels), _filled(collectives))


_FIRST: Final = (CollectiveType.ALL_REDUCE, KernelClass.COMPUTE)


def _filled(some: Parts) -> Parts:
    """Parts of all pairs, from those of some."""
    known = {kind: _row(kind, some) for kind in dict.fromkeys(kind for kind, _ in some)}
    rest = [_mean(row[place] for row in known.values()) for place in range(len(CLASSES))]
    rows = {kind: known.get(kind) or known.get(_LIKE.get(kind, kind)) or rest for kind in CollectiveType}
    return {(kind, CLASSES[place]): rows[kind][place] for kind, place in product(CollectiveType, range(len(CLASSES)))}


def _row(kind: CollectiveType, some: Parts) -> list[float]:
    """Parts of all classes beside one collective of which some are known."""
    usual = _mean(part for (collective_type, _), part in some.items() if collective_type is kind)
    return [some.get((kind, kernel_class), usual) for kernel_class in CLASSES]


def _mean(parts: Iterable[float]) -> float:
    """Of equal parts that part, to the last digit."""
    every = list(parts)
    return 0.0 if not every else every[0] if len(set(every)) == 1 else mean(every)


NONE: Final = Interference.equal(0.0)
_Row = tuple[tuple[float, ...], ...]
"""Parts by machine and class."""


class Paces:
    """Which collectives of a program make a difference to kernels that others do not make?

    Number 0 is no collective; kinds that slow kernels of every class alike, on every machine, have one number. Two at
    once slow each class by the larger of both parts: together they keep busy what the larger of them does.
    together: whether there may be two at once; rows: [numbers - 1][machines][classes] by which part kernels take
    longer.
    """

    __slots__ = ("_both", "_number", "rows")

    def __init__(self, machines: Sequence[Interference], kinds: Iterable[CollectiveType], *, together: bool) -> None:
        found: dict[_Row, int] = {}
        self._number: dict[CollectiveType, int] = {}
        for kind in kinds:
            row = tuple(tuple(machine.kernels[kind, kernel_class] for kernel_class in CLASSES) for machine in machines)
            self._number[kind] = found.setdefault(row, len(found) + 1)
        self._both: dict[tuple[int, int], int] = {}
        for first, second in product([*found], repeat=2) if together else ():
            slower = tuple(tuple(map(max, *item)) for item in zip(first, second, strict=True))
            self._both[found[first], found[second]] = found.setdefault(slower, len(found) + 1)
        self.rows = list(found)

    @property
    def kinds(self) -> Iterable[CollectiveType]:
        """The collectives that may be beside kernels."""
        return self._number.keys()

    def number(self, kind: CollectiveType) -> int:
        """Number of a collective that may be beside kernels."""
        return self._number[kind]

    def both(self, first: int, second: int) -> int:
        """Number of two collectives at once, by their numbers."""
        return self._both[first, second] if first and second else first or second
