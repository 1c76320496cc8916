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

COUNTERPART: Final = 2
"""The way of a message to the same rank of the pipeline that runs the other way."""


@dataclass(frozen=True)
class Placement:
    """ranks: [stages] the pipeline rank of each stage, in model order; each rank from 0 on holds at least one.

    crosses: what stages on one rank hand on to each other goes to that rank of the pipeline that runs the other way.

    >>> Placement((0, 1, 1, 0)).stages_of(1)
    (1, 2)
    """

    stage_ranks: tuple[int, ...]
    bidirectional: bool = False

    def __post_init__(self) -> None:
        pipeline_size = self.pipeline_size
        if set(self.stage_ranks) != set(range(pipeline_size)):
            raise InputError(
                f"placement {self.stage_ranks}: every pipeline rank from 0 to {pipeline_size - 1} must hold a stage"
            )
        for stage, (source, target) in enumerate(zip(self.stage_ranks, self.stage_ranks[1:], strict=False)):
            if (target - source) % pipeline_size not in {0, 1, pipeline_size - 1}:
                raise InputError(
                    f"placement {self.stage_ranks}: stages {stage} and {stage + 1} follow each other, but pipeline ranks "
                    f"{source} and {target} are no neighbours"
                )

    @cached_property
    def pipeline_size(self) -> int:
        """How many pipeline ranks there are."""
        return 1 + max(self.stage_ranks, default=0)

    @cached_property
    def max_chunks(self) -> int:
        """The most stages that a rank holds."""
        return max(map(len, self._rank_stages))

    def stages_on_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in model order."""
        return self._rank_stages[rank]

    def chunk_index(self, stage: int) -> int:
        """Which of its rank's stages a stage is."""
        return self._rank_stages[self.stage_ranks[stage]].index(stage)

    def direction(self, source_stage: int, target_stage: int) -> int:
        """Whether a message goes to the next rank (1), to the previous one (-1), stays (0) or crosses over (`COUNTERPART`).

        Of two ranks each is both to the other: there activations go on and gradients back.
        """
        distance = (self.stage_ranks[target_stage] - self.stage_ranks[source_stage]) % self.pipeline_size
        if distance == 0:
            return COUNTERPART if self.bidirectional else 0
        directions = (1, -1) if target_stage > source_stage else (-1, 1)
        return next(step for step in directions if distance == step % self.pipeline_size)

    def edges(self, direction: int) -> tuple[tuple[int, int], ...]:
        """Ordered pairs of pipeline ranks between which messages go that way."""
        return tuple(
            sorted(
                {
                    (self.stage_ranks[a], self.stage_ranks[b])
                    for a, b in self._stage_edges()
                    if self.direction(a, b) == direction
                }
            )
        )

    @cached_property
    def _rank_stages(self) -> tuple[tuple[int, ...], ...]:
        rank_stages: list[list[int]] = [[] for _ in range(self.pipeline_size)]
        for stage, rank in enumerate(self.stage_ranks):
            rank_stages[rank].append(stage)
        return tuple(map(tuple, rank_stages))

    def _stage_edges(self) -> Iterator[tuple[int, int]]:
        """Pairs of stages, sender and receiver: activations and gradients."""
        for stage in range(len(self.stage_ranks) - 1):
            yield stage, stage + 1
            yield stage + 1, stage


@cache
def looped_placement(pipeline_size: int, chunks_per_rank: int = 1) -> Placement:
    """Stages dealt to the ranks in turn.

    >>> looped(2, chunks=2).ranks
    (0, 1, 0, 1)
    """
    return Placement(tuple(range(pipeline_size)) * chunks_per_rank)
