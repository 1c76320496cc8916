"""Which pipeline rank holds which stage, and along which way do messages between stages go?

Stages are numbered through the model (virtual stages). A schedule places them: in a loop (rank r of p holds r, r + p,
...), in a V (the second half comes back), or as it likes, as long as stages that follow each other are on one rank or
on neighbours. Whatever depends on where a stage is follows from the placement: who is whose neighbour, what is handed
on within a rank, which chunk of its rank a stage is. Two pipelines that run towards each other (DualPipe) hold every
stage twice; each has half of the ranks, and what would be handed on within a rank goes to the other pipeline.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

from clustersim.common.errors import InputError

ACROSS: Final = 2
"""The way of a message to the same rank of the pipeline that runs the other way."""


@dataclass(frozen=True)
class Placement:
    """ranks: [stages] the pipeline rank of each stage, in model order; each rank from 0 on holds at least one.

    crosses: what stages on one rank hand on to each other goes to that rank of the pipeline that runs the other way.

    >>> Placement((0, 1, 1, 0)).stages_of(1)
    (1, 2)
    """

    ranks: tuple[int, ...]
    crosses: bool = False

    def __post_init__(self) -> None:
        size = self.size
        if set(self.ranks) != set(range(size)):
            raise InputError(f"placement {self.ranks}: every pipeline rank from 0 to {size - 1} must hold a stage")
        for stage, (source, target) in enumerate(zip(self.ranks, self.ranks[1:], strict=False)):
            if (target - source) % size not in {0, 1, size - 1}:
                raise InputError(
                    f"placement {self.ranks}: stages {stage} and {stage + 1} follow each other, but pipeline ranks "
                    f"{source} and {target} are no neighbours"
                )

    @cached_property
    def size(self) -> int:
        """How many pipeline ranks there are."""
        return 1 + max(self.ranks, default=0)

    @cached_property
    def chunks(self) -> int:
        """The most stages that a rank holds."""
        return max(map(len, self._stages))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in model order."""
        return self._stages[rank]

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's stages a stage is."""
        return self._stages[self.ranks[stage]].index(stage)

    def way(self, source: int, target: int) -> int:
        """Whether a message goes to the next rank (1), to the previous one (-1), stays (0) or crosses over (`ACROSS`).

        Of two ranks each is both to the other: there activations go on and gradients back.
        """
        distance = (self.ranks[target] - self.ranks[source]) % self.size
        if distance == 0:
            return ACROSS if self.crosses else 0
        ways = (1, -1) if target > source else (-1, 1)
        return next(way for way in ways if distance == way % self.size)

    def hops(self, way: int) -> tuple[tuple[int, int], ...]:
        """Ordered pairs of pipeline ranks between which messages go that way."""
        return tuple(sorted({(self.ranks[a], self.ranks[b]) for a, b in self._messages() if self.way(a, b) == way}))

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.size)]
        for stage, rank in enumerate(self.ranks):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def _messages(self) -> Iterator[tuple[int, int]]:
        """Pairs of stages, sender and receiver: activations and gradients."""
        for stage in range(len(self.ranks) - 1):
            yield stage, stage + 1
            yield stage + 1, stage


@cache
def looped(ranks: int, chunks: int = 1) -> Placement:
    """Stages dealt to the ranks in turn.

    >>> looped(2, chunks=2).ranks
    (0, 1, 0, 1)
    """
    return Placement(tuple(range(ranks)) * chunks)
